"""Statistics of attention rows on a fixed support, from their logits, summed per head as they stream by.

A row's logits l on D parts, r of them the sink, in three numbers that never underflow: the content's
log-sum-exp, its dispersion and its mean. With the logits centred on the content's mean,

    s = σ(lse(sink) − lse(content))      H(π) = lse(content) − Σ π l      C_A⊥ = ‖l content‖₂
    b = √(r(D−r)/D) · mean(l sink)       H_b(s) = s·softplus(−x) + (1−s)·softplus(x),  x = logit of s

The mean of a set of rows in Aitchison geometry is the softmax of their mean logit; without a soft-cap the
mean logit over queries is (mean q)·k, so signatures need no rows at all. Centring is done on the keys: q·(k
− mean k) has the content's mean taken out already.

Source: "Which Question Is Your Attention Metric Answering?", Definitions 1-2, Proposition 1, Appendix E.5.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

# Means over rows are kept of these; the squares give spreads and the total Aitchison variance.
STATISTICS = (
    "sink_mass",
    "binary",
    "content",
    "weighted_content",
    "within_sink",
    "dispersion",
    "balance",
    "sink_mass_square",
    "dispersion_square",
    "balance_square",
    "retained",
)
SAMPLED = ("sink_mass", "binary", "content", "dispersion", "balance")
LOG2_E = 1 / math.log(2)
LARGEST_MASS = 1e30  # of exponentials of centred logits, in fp32
CPU_LOGITS = 1 << 18  # taken together on a CPU: two buffers of a megabyte, and few operations
GPU_LOGITS = 1 << 24


@dataclass(frozen=True)
class Columns:
    """Which logits make a row: the columns of the composition, in the user's order, split for the arithmetic.

    `keys`: positions whose logits are the columns; `virtual`: a learned sink logit is column 0, before them.
    `sink`: columns that are the sink. Work is done sink first, content last (`order`).
    """

    keys: tuple[int, ...]
    sink: tuple[int, ...]
    virtual: bool = False

    @property
    def parts(self) -> int:
        """D, the number of parts of a row."""
        return len(self.keys) + self.virtual

    @cached_property
    def order(self) -> slice | list[int]:
        """Columns as the arithmetic takes them, sink, then content: an index, which costs nothing if it may.

        A sink that comes first, the usual one, leaves the user's order as it is.
        """
        sink = set(self.sink)
        order = [*self.sink, *(column for column in range(self.parts) if column not in sink)]
        return slice(None) if order == list(range(self.parts)) else order

    @property
    def balance_scale(self) -> float:
        """√(r(D−r)/D)."""
        r = len(self.sink)
        return math.sqrt(r * (self.parts - r) / self.parts)


@dataclass
class Sums:
    """Sums over rows for G heads, float64: of logits [G, D], probabilities [G, D] and STATISTICS [G, F].

    Logits are centred on the content's mean, columns in the user's order.
    """

    logits: Tensor
    arithmetic: Tensor | None
    statistics: Tensor | None

    def add(self, rows: RowSums, columns: Columns, own: slice = slice(None)) -> None:
        """Add the sums `own` of these: of the heads that are here, for one sequence or several in a row."""
        heads = len(self.logits)
        if self.statistics is not None:
            found = over_sequences(rows.statistics[own], heads)
            self.statistics[:, : found.shape[1]] += found
        if self.arithmetic is not None:
            self.arithmetic[:, columns.order] += over_sequences(rows.arithmetic[own], heads)


@dataclass(frozen=True)
class RowSums:
    """Sums over the n rows of each of G heads, and what each row has.

    `statistics` [G, F] float64, in STATISTICS' order, without `retained` where no log-sum-exp was given;
    `arithmetic` [G, D] float64 in working order; `each` [G, F, n], never with `retained`.
    """

    statistics: Tensor
    arithmetic: Tensor
    each: Tensor


class Work:
    """Buffers that are used again for every chunk: fresh memory costs more here than the arithmetic."""

    def __init__(self) -> None:
        self._held: dict[tuple, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        size = math.prod(shape)
        key = (name, like.dtype, like.device)
        held = self._held.get(key)
        if held is None or held.numel() < size:
            self._held[key] = held = torch.empty(size, dtype=like.dtype, device=like.device)
        return held[:size].view(shape)


def exponential(values: Tensor, out: Tensor | None = None) -> Tensor:
    """e to the power of values.

    On a CPU as a power of 2: torch's own exp is a library's that takes up to four times as long, on AMD.
    """
    if not values.is_cpu:
        return torch.exp(values, out=out)
    return torch.mul(values, LOG2_E, out=out).exp2_()


def over_sequences(values: Tensor, heads: int) -> Tensor:
    """[S·heads, ...] of S sequences, one after another, summed over them: [heads, ...]."""
    return values if len(values) == heads else values.unflatten(0, (-1, heads)).sum(0)


def mean_logits(query: Tensor, keys: Tensor) -> Tensor:
    """Sum over rows of the centred logits, [G, D] float64 in working order, from the sum of queries.

    `query` [G, n, d]; `keys` [K, D, d] as `centred_keys` gives them. Exact for rows that see all
    of the keys, without soft-cap, bias or learned sink.
    """
    total = _sum_rows(query).unflatten(0, (keys.shape[0], -1))
    return torch.bmm(total, keys.mT).flatten(0, 1)


def _sum_rows(query: Tensor) -> Tensor:
    """Σ over rows [G, n, d] → [G, d], float64; pieces keep the widened copy small."""
    pieces = [piece.double().sum(1) for piece in query.split(256, dim=1)]
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(0)


def centred(logits: Tensor, columns: Columns) -> Tensor:
    """Logits [..., D], columns in the user's order, in working order and less their content's mean."""
    logits = logits[..., columns.order]
    return logits - logits[..., len(columns.sink) :].mean(-1, keepdim=True)


def centred_keys(key: Tensor, scale: float, columns: Columns) -> Tensor:
    """Keys [K, W, d] → [K, D, d] float64 in working order, scaled, less the content's mean key: for plain
    logits."""
    wide = key.double()[:, columns.order]
    return (wide - wide[:, len(columns.sink) :].mean(1, keepdim=True)).mul_(scale)


def by_head(keys: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
    """[K, ...] of key-value heads → [K·groups, ...] of query heads, in this dtype."""
    wide = torch.empty(len(keys), groups, *keys.shape[1:], dtype=dtype, device=keys.device)
    return wide.copy_(keys[:, None]).flatten(0, 1)


def most_logits(device: torch.device) -> int:
    """How many logits are taken together."""
    return CPU_LOGITS if device.type == "cpu" else GPU_LOGITS


def chunk_rows(groups: int, parts: int, device: torch.device) -> int:
    """How many queries a chunk holds."""
    return max(8, most_logits(device) // max(1, groups * parts))


@dataclass(frozen=True)
class SinkSplit:
    """A row's split at the sink, each [...]: s, 1−s, H_b(s), the sink's own entropy times s, its log-sum-exp.

    `pure` [..., r] is the composition of the sink itself.
    """

    share: Tensor
    rest: Tensor
    binary: Tensor
    within: Tensor
    lse: Tensor
    pure: Tensor


def sink_split(sink_logits: Tensor, log_mass: Tensor) -> SinkSplit:
    """The split of rows from their sink's logits [..., r] and their content's log-sum-exp [...].

    Proposition 1's chain rule; nothing underflows, however large a logit.
    """
    softplus = torch.nn.functional.softplus
    one = sink_logits.shape[-1] == 1
    lse = sink_logits[..., 0] if one else sink_logits.logsumexp(-1)
    odds = lse - log_mass
    against = -odds
    share, rest = torch.sigmoid(odds), torch.sigmoid(against)
    binary = torch.addcmul(share * softplus(against), rest, softplus(odds))
    if one:
        nothing = share.new_zeros(()).expand_as(share)
        return SinkSplit(share, rest, binary, nothing, lse, share.new_ones(()).expand_as(sink_logits))
    pure = torch.softmax(sink_logits, -1)
    within = share * (lse - (pure * sink_logits).sum(-1))
    return SinkSplit(share, rest, binary, within, lse, pure)


def row_sums(logits: Tensor, columns: Columns, work: Work, lse: Tensor | None = None) -> RowSums:
    """Sums over rows from their centred logits [G, n, D] in working order, which are destroyed.

    `lse` [G, n] is the whole row's log-sum-exp less the content's mean logit, for the mass the support
    retains, the eleventh of STATISTICS.
    """
    sinks = len(columns.sink)
    sink_logits = logits[..., :sinks].clone()
    logits[..., :sinks] = 0.0
    dispersion = torch.linalg.vector_norm(logits, dim=-1)
    exponents = work.take("exponents", tuple(logits.shape), logits)
    exponential(logits, exponents)
    exponents[..., :sinks] = 0.0
    mass = exponents.sum(-1)
    top = None
    if not float(mass.max()) < LARGEST_MASS:  # a logit times its exponential would overflow: shift first
        top = logits[..., sinks:].amax(-1, keepdim=True)
        exponential(logits - top, exponents)
        exponents[..., :sinks] = 0.0
        mass = exponents.sum(-1)
    log_mass = mass.log()
    inner = logits.mul_(exponents).sum(-1).div_(mass)  # Σ π l
    if top is not None:
        log_mass = log_mass + top[..., 0]
    content = log_mass - inner
    split = sink_split(sink_logits, log_mass)
    share, balance = split.share, sink_logits.mean(-1) if sinks > 1 else sink_logits[..., 0]
    balance = balance * columns.balance_scale
    rows = (share, split.binary, content, split.rest * content, split.within, dispersion, balance)
    each = torch.stack([*rows, share.square(), dispersion.square(), balance.square()], 1)
    statistics = each.double().sum(-1)
    arithmetic = torch.bmm((split.rest / mass)[:, None], exponents)[:, 0].double()
    arithmetic[:, :sinks] = (
        statistics[:, :1] if sinks == 1 else (share[..., None] * split.pure).double().sum(1)
    )
    if lse is not None:
        retained = (torch.logaddexp(log_mass, split.lse) - lse).clamp_(max=0.0).exp_()
        statistics = torch.cat([statistics, retained.sum(-1, dtype=torch.float64, keepdim=True)], 1)
    return RowSums(statistics, arithmetic, each)


@dataclass
class _Placed:
    """Whose rows lie where: the sums they go to, how many heads (of one sequence or several), their lse.

    `then` gets what each of these rows has, as in `RowSums.each`.
    """

    sums: Sums
    groups: int
    lse: Tensor | None
    then: Callable[[Tensor], None] | None


class Waiting:
    """Logits of several calls side by side, until there are enough: few and large operations.

    `room` is where a call writes its centred logits, `add` says whose they are; `settle` takes their sums, as
    do both where rows of another kind come or the buffer is full.
    """

    def __init__(self, work: Work) -> None:
        self.work = work  # others' too; what waits has a buffer of its own
        self._own = Work()
        self._placed: list[_Placed] = []
        self._filled = 0
        self._kind: tuple[Any, ...] = ()

    def room(self, groups: int, count: int, columns: Columns, like: Tensor) -> Tensor:
        """A place for logits [groups, count, D], in working order; until the next call of this."""
        kind, size = (columns, count, like.dtype, like.device), groups * count * columns.parts
        most = most_logits(like.device)
        if kind != self._kind or self._filled + size > most:
            self.settle()
            self._kind = kind
        self._buffer = self._own.take("logits", (max(most, size),), like)
        return self._buffer[self._filled : self._filled + size].view(groups, count, columns.parts)

    def add(
        self,
        sums: Sums,
        logits: Tensor,
        lse: Tensor | None = None,
        then: Callable[[Tensor], None] | None = None,
    ) -> None:
        """What was last written belongs to these sums."""
        self._placed.append(_Placed(sums, len(logits), lse, then))
        self._filled += logits.numel()

    def settle(self) -> None:
        """Add everything that waits to its sums."""
        placed, filled = self._placed, self._filled
        self._placed, self._filled = [], 0
        if not placed:
            return
        columns, count = self._kind[:2]
        logits = self._buffer[:filled].view(-1, count, columns.parts)
        lse = None if placed[0].lse is None else torch.cat([one.lse for one in placed])
        found = row_sums(logits, columns, self.work, lse)
        start = 0
        for one in placed:
            own = slice(start, start + one.groups)
            one.sums.add(found, columns, own)
            if one.then is not None:
                one.then(found.each[own])
            start = own.stop
