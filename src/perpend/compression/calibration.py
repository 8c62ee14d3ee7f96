"""Calibration sequences from a text of the user's choice, never those that the result is evaluated on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
) -> Calibration:
    """Cut a text for calibration. The length is never taken from the model: a huge maximum changes nothing.

    sequences: how many; None takes up to DEFAULT_SEQUENCES, fewer if the text holds fewer. A text shorter
    than one sequence is used whole, as one shorter sequence. avoid: the `texts.Sequences` of the evaluation
    and `used`, how many of them are evaluated: of the same text, only what comes after them is taken.
    InputError: no text left, or more sequences asked for than there are.
    """
    from perpend import texts

    source = texts.read_text(text)
    total = len(texts.encode(tokenizer, source.text))
    notes = []
    if total < length:
        notes.append(f"the text holds {total} tokens: sequences of {total} instead of {length}")
        length = total
    cut = texts.sequences(source, tokenizer, length=length, bos=bos)
    skip = 0
    if avoid is not None and avoid.text.sha256 == source.sha256:
        skip = -(-used * avoid.length // length)
        notes.append(f"same text as the evaluation: the first {skip} sequences are left to it")
    there = len(cut) - skip
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
    return Calibration(cut.tokens[skip : skip + count], record)
