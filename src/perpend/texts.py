"""Text in, token sequences out.

    sequences = sequences(read_text("wiki.txt"), tokenizer, length=192, bos="auto")
    tokens = sequences.take(256, seed=0)          # LongTensor [256, 192]

A text is one token stream, cut into consecutive sequences that do not overlap; the rest at its end is left
out. Where a BOS is used it opens *every* sequence and counts in its length.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perpend.batching import order
from perpend.errors import InputError, unknown_name
from perpend.models.limits import check_positions, check_vocabulary
from perpend.reading import Text, read_text

if TYPE_CHECKING:
    import torch

__all__ = ["BOS", "Sequences", "Text", "encode", "read_text", "sequences"]

BOS = ("auto", "always", "never")


@dataclass(frozen=True)
class Sequences:
    """Token sequences of one length, in the order of the text."""

    tokens: torch.Tensor  # int64 [n, length]
    bos: bool  # whether position 0 of every sequence is a BOS (an encoder's [CLS] too)
    text: Text
    length: int
    opening: tuple[str, ...] = ()  # the tokens that open every sequence
    closing: tuple[str, ...] = ()  # and close it ([SEP])
    stream: int = 0  # tokens in the text
    policy: str = "auto"
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, count: int | None = None, seed: int = 0) -> torch.Tensor:
        """int64 [count, length]: the first `count` in order for seed 0, else after a seeded shuffle.

        None takes all. InputError, with the number there is, for more than the text holds.
        """
        held = len(self.tokens)
        if count is None:
            count = held
        if count < 1:
            raise InputError(f"the number of sequences must be at least 1, not {count}")
        if count > held:
            raise InputError(
                f"{self.text.name} holds {held} sequences of {self.length} tokens and {count} were asked "
                "for; ask for fewer, choose a shorter length=, or give a longer text="
            )
        if seed == 0:
            return self.tokens[:count]
        return self.tokens[order(held, seed)[:count]]

    def describe(self) -> dict[str, Any]:
        """What a result says of its text."""
        return {
            "text": self.text.name,
            "text_sha256": self.text.sha256,
            "text_tokens": self.stream,
            "sequences": len(self.tokens),
            "length": self.length,
            "bos": self.bos,
            "bos_policy": self.policy,
            "opening": list(self.opening),
            "closing": list(self.closing),
            "notes": list(self.notes),
        }


def sequences(
    text: Text | str | os.PathLike[str] | Sequence[str] | None,
    tokenizer: Any,
    length: int = 192,
    bos: str = "auto",
    *,
    model: Any = None,
) -> Sequences:
    """Cut a text into sequences of `length` tokens.

    `bos`: "auto" opens each with what the tokenizer itself puts first (and closes an encoder's with its
    [SEP]), "always" with a BOS in any case, "never" with none. `model`, where given, is checked against them:
    token ids inside its vocabulary, `length` within its positions.

    Raises InputError: no tokenizer, a text shorter than one sequence, a tokenizer of another model.
    """
    import torch

    text = read_text(text)
    if bos not in BOS:
        raise unknown_name("bos", bos, BOS)
    if tokenizer is None:
        raise InputError("the model has no tokenizer, so it cannot read text; give token ids of your own")
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError("this is an image model: it reads a folder of images, not text")
    adds, ends = _added_by(tokenizer)
    opening = () if bos == "never" else adds
    closing = ends if opening and getattr(tokenizer, "sep_token_id", None) in ends else ()
    if bos == "always" and not opening:
        opening = (_bos_id(tokenizer),)
    body = length - len(opening) - len(closing)
    if body < 1:
        raise InputError(
            f"length {length} leaves no room for text beside {len(opening) + len(closing)} special tokens"
        )
    if model is not None:
        check_positions(model, length)
    stream = encode(tokenizer, text.text)
    total = len(stream)
    if opening and tuple(stream[: len(opening)]) == opening:  # the text brings its own: never doubled
        stream = stream[len(opening) :]
    count = len(stream) // body
    if count == 0:
        raise InputError(
            f"{text.name} has {total} tokens, fewer than one sequence of {length}; choose a "
            "shorter length= or give a longer text="
        )
    middle = torch.tensor(stream[: count * body], dtype=torch.long).view(count, body)
    parts = [torch.tensor(ids, dtype=torch.long).expand(count, len(ids)) for ids in (opening, closing)]
    tokens = torch.cat([parts[0], middle, parts[1]], dim=1)
    if model is not None:
        check_vocabulary(model, tokenizer, tokens)
    return Sequences(
        tokens=tokens,
        bos=bool(opening),
        text=text,
        length=length,
        opening=tuple(tokenizer.convert_ids_to_tokens(list(opening))),
        closing=tuple(tokenizer.convert_ids_to_tokens(list(closing))),
        stream=total,
        policy=bos,
        notes=_bos_notes(tokenizer, adds, opening, model, bos),
    )


def encode(tokenizer: Any, text: str) -> list[int]:
    """Token ids of a text of any length, without special tokens, in time linear in the text."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None or not hasattr(backend, "encode_batch_fast"):
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    backend.no_truncation()  # a saved tokenizer may cut at 128 tokens without a word
    backend.no_padding()
    return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _added_by(tokenizer: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What the tokenizer puts before and after a text, found by tokenizing one."""
    bare = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    full = list(tokenizer("a")["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            before = dict.fromkeys(full[:start])  # a template and a flag may add the same token twice
            return tuple(before), tuple(full[start + len(bare) :])
    return (), ()


def _bos_id(tokenizer: Any) -> int:
    for name in ("bos_token_id", "cls_token_id"):
        if getattr(tokenizer, name, None) is not None:
            return int(getattr(tokenizer, name))
    raise InputError(
        "bos=always needs a BOS, and this tokenizer has none; set tokenizer.bos_token, or use bos=auto"
    )


def _bos_notes(tokenizer: Any, adds: tuple, opening: tuple, model: Any, policy: str) -> tuple[str, ...]:
    """What position 0 is, and whether the model knows it so; probable mistakes are warned about too."""
    name = " ".join(tokenizer.convert_ids_to_tokens(list(opening))) if opening else ""
    notes = [f"position 0 is {name}" if opening else "position 0 is an ordinary token of the text, no BOS"]
    entry = getattr(getattr(model, "perpend_source", None), "entry", None)
    trained = bool(adds) or bool(entry is not None and entry.adds_bos)
    if trained and not opening:
        what = " ".join(tokenizer.convert_ids_to_tokens(list(adds))) if adds else "a BOS"
        notes.append(f"the model was trained with {what} before a text, and bos={policy} leaves it out")
        warnings.warn(f"{notes[-1]}; its sink may move or vanish", stacklevel=3)
    if opening and not adds:
        notes.append(f"the tokenizer itself adds no {name}: the model may not know it as the start of a text")
    return tuple(notes)
