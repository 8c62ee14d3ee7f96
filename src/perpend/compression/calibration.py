"""Calibration sequences from a text of the user's choice, never those that the result is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perpend.batching import order
from perpend.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_SEQUENCES, DEFAULT_LENGTH = 32, 512


@dataclass(frozen=True)
class Calibration:
    """tokens [n, length] int64, and for the result where they come from."""

    tokens: Tensor
    record: dict[str, Any]


def calibration(
    text: Any,
    tokenizer: Any,
    *,
    sequences: int | None = None,
    length: int = DEFAULT_LENGTH,
    bos: str = "auto",
    avoid: Any = None,
    used: int = 0,
    seed: int = 0,
    model: Any = None,
) -> Calibration:
    """Cut a text for calibration. A model's huge maximum changes nothing; a small one shortens the sequences.

    sequences: how many; None takes up to DEFAULT_SEQUENCES, fewer if the text holds fewer. A text shorter
    than one sequence is used whole, as one shorter sequence. avoid: the `texts.Sequences` of the evaluation,
    of which `avoid.take(used, seed)` is evaluated: of the same text, only sequences that share no token with
    it are taken. model: where given, no sequence is longer than its positions.
    InputError: no text left, or more sequences asked for than there are.
    """
    from perpend import texts
    from perpend.models.limits import positions

    source = texts.read_text(text)
    total = len(texts.encode(tokenizer, source.text))
    notes = []
    limit = None if model is None else positions(model)
    if limit is not None and limit < length:
        notes.append(f"the model has {limit} positions: sequences of {limit} instead of {length}")
        length = limit
    if total < length:
        length = min(length, total + _added(tokenizer, bos))
        notes.append(f"the text holds {total} tokens: sequences of {length}, as it is too short for more")
    cut = texts.sequences(source, tokenizer, length=length, bos=bos, model=model)
    chosen = list(range(len(cut)))
    if avoid is not None and avoid.text.sha256 == source.sha256:
        chosen = _clear(cut, avoid, used, seed)
        which = "first " if seed == 0 else ""
        notes.append(
            f"same text as the evaluation: the {which}{len(cut) - len(chosen)} sequences with its tokens are "
            "left to it"
        )
    skip, there = len(cut) - len(chosen), len(chosen)
    if there < 1:
        raise InputError(
            f"{source.name} has no tokens left for calibration after {used} evaluated sequences of "
            f"{avoid.length}; give another calibration text, or evaluate fewer sequences"
        )
    if sequences is not None and sequences > there:
        raise InputError(
            f"{source.name} has {there} calibration sequences of {length} tokens, {sequences} were asked for"
        )
    count = min(DEFAULT_SEQUENCES, there) if sequences is None else sequences
    record = {
        "text": source.name,
        "text_sha256": source.sha256,
        "skipped": skip,
        "sequences": count,
        "length": length,
        "bos": cut.bos,
        "notes": notes,
    }
    return Calibration(cut.tokens[chosen[:count]], record)


def _added(tokenizer: Any, bos: str) -> int:
    """Special tokens of a sequence."""
    from perpend import texts

    cut = texts.sequences(["a short text to see what is put around it"], tokenizer, length=8, bos=bos)
    return len(cut.opening) + len(cut.closing)


def _body(cut: Any) -> int:
    return cut.length - len(cut.opening) - len(cut.closing)


def _clear(cut: Any, avoid: Any, used: int, seed: int) -> list[int]:
    """The sequences of `cut` that share no token of their common text with what is evaluated of `avoid`."""
    import torch

    ours, theirs = _body(cut), _body(avoid)
    taken = torch.zeros(len(avoid) + 1, dtype=torch.bool)
    taken[order(len(avoid), seed)[:used]] = True
    return [
        i
        for i in range(len(cut))
        if not taken[i * ours // theirs : min(((i + 1) * ours - 1) // theirs, len(avoid)) + 1].any()
    ]
