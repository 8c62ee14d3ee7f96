"""The fixed support of a survey: which keys make a row, which of them are the sink, which queries are rows.

Causal models: queries t >= W, keys 0..W-1. Encoders and image models: all keys (or a window), all queries.
The sink rule names positions, the learned sink logit (`virtual`), or leaves the choice to the data (`auto`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from perpend.errors import InputError
from perpend.surveys.rows import Columns
from perpend.surveys.sink_rule import sink_positions

WINDOW = 64

Sink = "str | int | Sequence[int]"
Queries = "str | tuple[int, int] | None"


@dataclass(frozen=True)
class Support:
    """Keys 0..window-1, sink columns, and the queries that count.

    `ragged`: the sink sits at each sequence's own last token, so there are row statistics and no signatures.
    """

    window: int
    sink: tuple[int, ...]
    causal: bool
    first: int
    last: int | None
    without: tuple[int, ...] = ()
    virtual: bool = False
    ragged: bool = False
    rule: str = "first"

    @cached_property
    def columns(self) -> Columns:
        """The parts of a row; with a learned sink logit it is column 0 and keys follow."""
        if self.virtual:
            return Columns(tuple(range(self.window)), (0,), True)
        return Columns(tuple(range(self.window)), self.sink)

    def ragged_columns(self, length: int) -> Columns:
        """The parts of a row of a sequence of `length` real tokens, the last of which is the sink."""
        return Columns(tuple(range(length)), (length - 1,))

    def rows(self, length: int) -> slice | Tensor:
        """Queries that may count, of a call with `length` queries."""
        span = slice(min(self.first, length), length if self.last is None else min(self.last, length))
        if not self.without:
            return span
        return torch.tensor([t for t in range(length)[span] if t not in set(self.without)], dtype=torch.long)

    @property
    def words(self) -> str:
        """The convention in a sentence, for results."""
        where = "learned sink logit" if self.virtual else f"keys {', '.join(map(str, self.sink))}"
        if self.ragged:
            where = "each sequence's last token"
        end = "the end" if self.last is None else f"query {self.last - 1}"
        return (
            f"sink {self.rule}: {where}; rows on keys 0 to {self.window - 1}, "
            f"queries {self.first} to {end}{', without the sink as a query' if self.without else ''}"
        )


def plan_support(
    *,
    causal: bool,
    length: int,
    lengths: Tensor | None,
    window: int | None,
    sink: str | int | Sequence[int],
    queries: str | tuple[int, int] | None,
    has_virtual: bool,
) -> Support:
    """The support for sequences of `length` tokens; InputError where a rule does not fit, with the remedy.

    `window` None: 64 keys for causal models, all otherwise. `queries` None: t >= W, or all; `no_sinks`
    leaves the sink's own positions out (encoders); a pair (start, stop) chooses. `lengths`: real tokens of
    each sequence.
    """
    if window is not None and window < 2:
        raise InputError(f"a window of {window} keys makes no composition; give at least 2")
    width = window if window is not None else WINDOW if causal else length
    if width > length or (causal and queries is None and width >= length):
        raise InputError(
            f"sequences of {length} tokens are too short for rows on the first {width} "
            f"keys{' seen by queries after them' if causal else ''}; use longer sequences, length=, or a "
            "smaller window="
        )
    rule = sink if isinstance(sink, str) else ",".join(map(str, [sink] if isinstance(sink, int) else sink))
    if rule == "virtual" and not has_virtual:
        raise InputError(
            "this model has no learned sink logits, so no virtual sink; use sink=first (or auto, which looks)"
        )
    differ = lengths is not None and bool((lengths != lengths[0]).any())
    ragged = rule == "sep" and differ and not causal and window is None
    shortest = length if lengths is None or ragged else int(lengths.max())
    positions = sink_positions(sink, shortest)
    virtual = rule == "virtual"
    outside = [p for p in positions if not 0 <= p < width]
    if outside and not ragged:
        raise InputError(
            f"the sink at position {outside[0]} is outside the support (keys 0 to {width - 1}); widen the "
            "window or choose another sink"
        )
    if len(positions) >= width:
        raise InputError(f"{len(positions)} sink positions leave no content among {width} keys")
    first, last, without = (width if causal else 0), None, ()
    if isinstance(queries, tuple):
        first, last = queries
        if not 0 <= first < last:
            raise InputError(f"queries is a pair (start, stop) with 0 <= start < stop, not {queries}")
        if lengths is None and last > length:
            raise InputError(
                f"queries end at {last}, and the sequences have {length} tokens; use longer sequences, "
                f"length=, or queries that end at {length}"
            )
        if causal and first < width - 1:
            raise InputError(
                f"query {first} of a causal model does not see all of keys 0 to {width - 1}; start at "
                f"{width - 1}"
            )
    elif queries == "no_sinks":
        if causal:
            raise InputError("queries='no_sinks' is for encoders: a causal model's rows start after the sink")
        without = positions
    elif queries not in (None, "all"):
        raise InputError(f"queries is None, 'no_sinks' or a pair (start, stop), not {queries!r}")
    return Support(width, positions, causal, first, last, tuple(without), virtual, ragged, rule)
