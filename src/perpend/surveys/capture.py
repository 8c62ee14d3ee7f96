"""The hook of the attention survey: what each layer's call adds to the sums of the running block.

It sees q and k as the kernel got them, and forms logits of the kept keys only: a few rows at a time, or none
where only signatures are wanted. Which rows count is read from the mask: a row is in when it is a real query
that sees every key of the support; the others are counted, never filled in.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from perpend.models.attention import AttentionCall, valid_rows, visible
from perpend.models.attention.support import additive
from perpend.surveys.importance import Prefixes, what_is_seen
from perpend.surveys.rows import (
    SAMPLED,
    STATISTICS,
    Columns,
    Sums,
    Waiting,
    Work,
    by_head,
    centred,
    centred_keys,
    chunk_rows,
    mean_logits,
    over_sequences,
)
from perpend.surveys.supports import Support

_SAMPLED = [STATISTICS.index(name) for name in SAMPLED]
NO_DOUBLE = {"mps"}  # devices without float64: what they computed is added up on the CPU


@dataclass
class LayerSums:
    """What one layer has added in one block: sums per head, and rows in, left out and padded."""

    heads: Sums
    name: str = ""  # of its module
    rows: int = 0
    left_out: int = 0
    padding: int = 0
    importance: Tensor | None = None  # [H, t] of the first t tokens, sequences added up
    over: Tensor | None = None  # [H, t] sequences whose importance exceeds SINK_SHARE
    prefixes: int = 0
    calls: int = 0  # in the running batch
    most_calls: int = 0  # in any batch: more than one where blocks share the layer
    sample: list[Tensor] = field(default_factory=list)  # [H, S, SAMPLED] a sequence
    kept: dict[tuple[int, int], Tensor] = field(default_factory=dict)  # (sequence, query) -> logits [H, D]


@dataclass
class Capture:
    """Collects one block; its `hook` is for `attach`. One instance a block, buffers shared by all its
    layers.

    `support`: or what gives it, of the first call that is seen.
    `weigh(call, b, keys)` gives what is added to the logits [H, |keys|] of one sequence of a call: rows are
    weighted by its exponential before closure. `wanted`: queries of each sequence (numbered from `first`,
    the first of the running batch) whose rows are kept one by one.
    """

    support: Support | Callable[[AttentionCall], Support]
    lengths: Tensor | None  # real tokens of each sequence of the running batch, None without padding
    want_rows: bool = True
    retained: bool = False
    sample: int = 0
    weigh: Callable[[AttentionCall, int, int], Tensor] | None = None
    wanted: Mapping[int, Sequence[int]] | None = None
    importance: bool = True
    first: int = 0
    layers: dict[int, LayerSums] = field(default_factory=dict)
    work: Work = field(default_factory=Work)
    waiting: Waiting = field(init=False)  # rows whose statistics are taken together
    prefixes: Prefixes = field(default_factory=Prefixes)  # the same of the first tokens
    _read: dict[tuple, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = Waiting(self.work)

    def batch(self, lengths: Tensor | None, first: int = 0) -> None:
        """A new batch begins, with sequence number `first`: its masks are new. What waits was settled."""
        self.lengths, self.first = lengths, first
        self.forget()
        for layer in self.layers.values():
            layer.calls = 0

    @torch.no_grad()
    def settle(self) -> None:
        """A batch is over: what waits is added."""
        self.waiting.settle()
        self.prefixes.settle()

    def forget(self) -> None:
        """What was read from masks is no longer theirs."""
        self._read.clear()

    def hook(self, call: AttentionCall, output: Tensor) -> None:
        """Add one call's rows."""
        if not isinstance(self.support, Support):
            self.support = self.support(call)
        with torch.no_grad():
            if call.query.device.type in NO_DOUBLE:
                call = on_cpu(call, self.retained)
                self.forget()  # its mask is a copy, of no use to the next layer
            chosen, left_out, padding, biased = self._rows(call)
            layer = self._layer(call, self.support.columns)
            for span, rows in self._together(call, chosen):
                if rows is not None:
                    self._add_sequences(call, span, rows, biased)
                elif self.sample:
                    self.new_sample(call.layer, call.query.shape[1])
            layer.calls += 1
            layer.most_calls = max(layer.most_calls, layer.calls)
            layer.left_out += left_out
            layer.padding += padding
            if self.importance and self.want_rows and self.support.causal:
                seen = self._once(call, lambda: what_is_seen(call), "prefix")
                self.prefixes.add(layer, call, seen)

    def _rows(self, call: AttentionCall) -> tuple[list[Any], int, int, bool]:
        """Per sequence its rows (None: no row), how many real rows are out, how many are padding.

        Also whether anything is added to the logits.
        """
        return self._once(call, lambda: self._read_mask(call), "rows")

    def _once(self, call: AttentionCall, read: Callable[[], Any], what: str) -> Any:
        """What `read` takes from a call's mask, once a batch for all layers that share it."""
        key = (
            what,
            call.query.device,  # layers of a model that is spread over several have masks of their own
            id(call.mask),
            id(call.padding),
            id(call.bias),
            id(call.rule),
            call.sinks is None,
            call.causal,
            call.enforce_window and call.window,
        )
        if key not in self._read:
            held = call.mask, call.padding, call.bias, call.rule  # so that their ids stay theirs
            self._read[key] = read(), held
        return self._read[key][0]

    def _read_mask(self, call: AttentionCall) -> tuple[list[Any], int, int, bool]:
        batch, length = call.query.shape[0], call.query.shape[2]
        rows = self.support.rows(length)
        keys = slice(0, self.support.window)
        candidates = range(length)[rows] if isinstance(rows, slice) else rows.tolist()
        if not len(candidates) or (self.support.virtual and call.sinks is None):
            return [None] * batch, 0, 0, False
        extra = additive(call, rows, keys)
        biased = extra is not None and bool(extra.any())
        if (
            call.mask is None
            and call.padding is None
            and call.rule is None
            and (not call.causal or candidates[0] >= self.support.window - 1)
            and not call.enforce_window
        ):
            return [rows] * batch, 0, 0, biased
        real = valid_rows(call)[:, rows]
        if self.support.ragged:
            inside = real
        else:
            seen = visible(call, rows, keys)
            inside = real if seen is None else real & seen.all(-1).all(1)
        if bool(inside.all()):
            return [rows] * batch, 0, 0, biased
        numbers = torch.as_tensor(candidates, device=inside.device)
        chosen = [_as_slice(numbers[inside[b]]) for b in range(batch)]
        return chosen, int((real & ~inside).sum()), int((~real).sum()), biased

    def _together(self, call: AttentionCall, chosen: list[Any]) -> Iterator[tuple[range, Any]]:
        """Consecutive sequences with the same rows, as many as a chunk holds: fewer and larger operations."""
        heads, device = call.query.shape[1], call.query.device
        start = 0
        while start < len(chosen):
            rows, most = chosen[start], 1
            if rows is not None and not self.support.ragged:
                count = _count(rows, call.query.shape[2])
                most = max(1, chunk_rows(heads, self.support.columns.parts, device) // count)
            stop = start + 1
            while stop < min(len(chosen), start + most) and _same(chosen[stop], rows):
                stop += 1
            yield range(start, stop), rows
            start = stop

    def _layer(self, call: AttentionCall, columns: Columns) -> LayerSums:
        if call.layer not in self.layers:
            heads, device = call.query.shape[1], call.query.device
            wide = dict(dtype=torch.float64, device=device)
            self.layers[call.layer] = LayerSums(
                Sums(
                    torch.zeros(heads, columns.parts, **wide),
                    torch.zeros(heads, columns.parts, **wide) if self.want_rows else None,
                    torch.zeros(heads, len(STATISTICS), **wide) if self.want_rows else None,
                ),
                call.site.name,
            )
        return self.layers[call.layer]

    def _add_sequences(self, call: AttentionCall, span: range, rows: Any, biased: bool) -> None:
        """Add the rows of sequences that have the same; their heads lie one after another, [S·H, ...]."""
        columns, window = self.support.columns, self.support.window
        if self.support.ragged:
            length = call.query.shape[2] if self.lengths is None else int(self.lengths[span.start])
            columns, window = self.support.ragged_columns(length), length
        layer = self.layers[call.layer]
        some = slice(span.start, span.stop)
        query = call.query[some][:, :, rows].flatten(0, 1)
        key = call.key[some, :, :window].flatten(0, 1)
        heads, count = call.query.shape[1], query.shape[1]
        sums = layer.heads
        if self.support.ragged:  # rows only: the parts of the composition differ between sequences
            sums = Sums(torch.zeros_like(layer.heads.logits[:, :0]), None, layer.heads.statistics)
        plain = not biased and call.softcap is None and not columns.virtual
        weights = None
        if self.weigh is not None:
            weights = torch.cat([self.weigh(call, b, key.shape[1]) for b in span])
        keys = centred_keys(key, call.scale, columns) if plain else None
        if keys is not None and not self.support.ragged:
            total = mean_logits(query, keys)
            if weights is not None:
                total = total + count * centred(weights, columns)
            sums.logits[:, columns.order] += over_sequences(total, heads)
        if self.want_rows or not plain:
            tables = [self.new_sample(call.layer, heads) for _ in span] if self.sample else []
            self._add_chunks(call, span, rows, query, key, keys, columns, sums, weights, tables)
        layer.rows += count * len(span)

    def _add_chunks(
        self,
        call: AttentionCall,
        span: range,
        rows: Any,
        query: Tensor,
        key: Tensor,
        keys: Tensor | None,
        columns: Columns,
        sums: Sums,
        weights: Tensor | None,
        tables: list[Tensor],
    ) -> None:
        dtype = query.dtype if query.dtype == torch.float64 else torch.float32
        order, sinks = columns.order, len(columns.sink)
        groups, count = query.shape[:2]
        heads, some = call.query.shape[1], slice(span.start, span.stop)
        plain = keys is not None
        ready = by_head(keys if plain else key.to(dtype).mul(call.scale), call.groups, dtype).mT
        step = chunk_rows(groups, columns.parts, query.device)
        lse = None
        if self.retained:
            lse = call.lse[some][:, :, rows].flatten(0, 1).to(dtype)
            # the content's mean key: its logit is what centring takes out
            content = key if columns.virtual else key[:, order][:, sinks:]
            middle = (content.to(dtype).mean(1) * call.scale)[..., None].repeat_interleave(call.groups, 0)
        if weights is not None:
            weights = (centred(weights, columns) if plain else weights)[:, None].to(dtype)
        wanted = _spread(count, self.sample)
        keep = [self.kept_places(b, rows, count) for b in span]
        for start in range(0, count, step):
            part = slice(start, min(count, start + step))
            piece = query[:, part]
            if piece.dtype != dtype:
                piece = self.work.take("query", tuple(piece.shape), ready).copy_(piece)
            taken = None if lse is None else lse[:, part]
            room = self.waiting.room(groups, piece.shape[1], columns, ready)
            if plain:
                logits = torch.bmm(piece, ready, out=room)
                if weights is not None:
                    logits += weights
                if taken is not None:
                    taken = taken - torch.bmm(piece, middle)[..., 0]
            else:
                logits = torch.bmm(piece, ready)
                if call.softcap is not None:
                    logits = logits.div_(call.softcap).tanh_().mul_(call.softcap)
                extra = additive(call, _part(rows, part), slice(0, key.shape[1]))
                if extra is not None:
                    logits.unflatten(0, (-1, heads)).add_(extra[some] if extra.shape[0] > 1 else extra)
                if weights is not None:
                    logits += weights
                if columns.virtual:
                    sink = call.sinks.to(dtype).repeat(len(span)).view(-1, 1, 1)
                    logits = torch.cat([sink.expand(-1, logits.shape[1], 1), logits], -1)
                logits = logits[..., order]
                mean = logits[..., sinks:].mean(-1, keepdim=True)
                logits = torch.sub(logits, mean, out=room)
                if taken is not None:
                    taken = taken - mean[..., 0]
                if not self.support.ragged:
                    sums.logits[:, order] += over_sequences(logits.sum(1, dtype=torch.float64), heads)
            for n, places in enumerate(keep):
                for i, place in places.items():
                    if start <= i < part.stop:
                        row = torch.empty(heads, columns.parts, dtype=torch.float32)
                        row[:, order] = logits[n * heads : (n + 1) * heads, i - start].float().cpu()
                        self.layers[call.layer].kept[place] = row
            if self.want_rows:
                self.waiting.add(sums, logits, taken, picks(tables, wanted, part))

    def kept_places(self, b: int, rows: Any, count: int) -> dict[int, tuple[int, int]]:
        """Which of one sequence's rows are kept whole: number among its rows -> (sequence, query)."""
        if not self.wanted:
            return {}
        sequence = self.first + b
        queries = set(self.wanted.get(sequence, ()))
        start = (rows.start or 0) if isinstance(rows, slice) else None
        numbers = range(start, start + count) if start is not None else rows.tolist()
        return {i: (sequence, t) for i, t in enumerate(numbers) if t in queries}

    def new_sample(self, index: int, heads: int) -> Tensor:
        """A sequence's table of single rows, [heads, sample, SAMPLED]: NaN where it has fewer."""
        table = torch.full((heads, self.sample, len(SAMPLED)), float("nan"), dtype=torch.float32)
        self.layers[index].sample.append(table)
        return table

    def damage(self) -> tuple[int, str] | None:
        """The first layer whose sums are not finite, and what there is to say of it."""
        if self.weigh is not None:  # a weight of zero is a logit without bound
            return None
        for index, layer in sorted(self.layers.items()):
            held = [values for values in (layer.heads.logits, layer.heads.statistics) if values is not None]
            if math.isfinite(sum(float(values.sum()) for values in held)):
                continue
            for values in held:
                if bool(torch.isfinite(values).all()):
                    continue
                head = int((~torch.isfinite(values)).any(-1).nonzero()[0])
                return index, (
                    f"layer {index} ({layer.name}), head {head}: its attention logits are not finite; "
                    "the model overflows in its dtype (load it with dtype=float32 or bfloat16) or its "
                    "weights are damaged"
                )
        return None


def picks(tables: list[Tensor], wanted: list[int], part: slice) -> Callable[[Tensor], None] | None:
    """Puts the wanted rows of a chunk into their sequences' tables; None where it has none of them.

    `wanted`: row numbers, each for one place in a table; `part`: those of the chunk.
    """
    places = [i for i, row in enumerate(wanted) if part.start <= row < part.stop]
    if not tables or not places:
        return None
    rows = [wanted[i] - part.start for i in places]

    def put(each: Tensor) -> None:
        for table, own in zip(tables, each[:, _SAMPLED][..., rows].mT.float().cpu().chunk(len(tables))):
            table[:, places] = own

    return put


def on_cpu(call: AttentionCall, with_lse: bool) -> AttentionCall:
    """The same call with its tensors on the CPU."""
    tensors = ("query", "key", "value", "mask", "sinks", "bias", "padding")
    moved = {name: value.cpu() for name in tensors if (value := getattr(call, name)) is not None}
    other = dataclasses.replace(call, **moved)
    return other.with_lse(call.lse.cpu()) if with_lse else other


def _count(rows: Any, length: int) -> int:
    """How many rows there are."""
    return len(range(*rows.indices(length))) if isinstance(rows, slice) else len(rows)


def _same(rows: Any, others: Any) -> bool:
    """Whether two sequences have the same rows; other than slices only where it is one tensor."""
    return rows is others or (isinstance(rows, slice) and isinstance(others, slice) and rows == others)


def _as_slice(numbers: Tensor) -> Any:
    """Row numbers as a slice where they are consecutive, None where there is none."""
    if not len(numbers):
        return None
    first, last = int(numbers[0]), int(numbers[-1])
    return slice(first, last + 1) if last - first + 1 == len(numbers) else numbers


def _part(rows: Any, part: slice) -> Any:
    """The rows of one chunk, as positions in the call."""
    if isinstance(rows, slice):
        start = rows.start or 0
        return slice(start + part.start, start + part.stop)
    return rows[part]


def _spread(count: int, sample: int) -> list[int]:
    """Evenly spaced row numbers, the same whatever the chunks."""
    if not sample or not count:
        return []
    return sorted({round(i * (count - 1) / max(1, sample - 1)) for i in range(min(sample, count))})
