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
from dataclasses import dataclass
from functools import cached_property

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
LARGEST_MASS = 1e30  # of exponentials of centred logits, in fp32
CPU_LOGITS = 1 << 19  # of one chunk of queries on a CPU: two buffers of two megabytes, and few operations
GPU_LOGITS = 1 << 26


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


def over_sequences(values: Tensor, heads: int) -> Tensor:
    """[S·heads, ...] of S sequences, one after another, summed over them: [heads, ...]."""
    return values if len(values) == heads else values.unflatten(0, (-1, heads)).sum(0)


def mean_logits(query: Tensor, keys: Tensor) -> Tensor:
    """Sum over rows of the centred logits, [G, D] float64 in working order, from the sum of queries.

    `query` [G, n, d]; `keys` as `centred_keys` gives them, of G / groups heads. Exact for rows that see all
    of the keys, without soft-cap, bias or learned sink.
    """
    total = _sum_rows(query).unflatten(0, (keys.shape[0], -1))
    return torch.bmm(total, keys).flatten(0, 1)


def _sum_rows(query: Tensor) -> Tensor:
    """Σ over rows [G, n, d] → [G, d], float64; pieces keep the widened copy small."""
    pieces = [piece.double().sum(1) for piece in query.split(256, dim=1)]
    return pieces[0] if len(pieces) == 1 else torch.stack(pieces).sum(0)


def centred(logits: Tensor, columns: Columns) -> Tensor:
    """Logits [..., D], columns in the user's order, in working order and less their content's mean."""
    logits = logits[..., columns.order]
    return logits - logits[..., len(columns.sink) :].mean(-1, keepdim=True)


def centred_keys(key: Tensor, scale: float, columns: Columns) -> Tensor:
    """Keys [G, W, d] → [G, d, D] float64 in working order, scaled, less the content's mean key: for plain
    logits."""
    wide = key.double()[:, columns.order]
    wide = (wide - wide[:, len(columns.sink) :].mean(1, keepdim=True)).mul_(scale)
    return wide.transpose(1, 2)


def chunk_rows(groups: int, parts: int, device: torch.device) -> int:
    """How many queries a chunk holds."""
    room = CPU_LOGITS if device.type == "cpu" else GPU_LOGITS
    return max(8, room // max(1, groups * parts))


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


def add_rows(sums: Sums, logits: Tensor, columns: Columns, work: Work, lse: Tensor | None = None) -> Tensor:
    """Add one chunk: centred logits [G, n, D] in working order (destroyed). Returns STATISTICS [G, 10, n].

    G is the heads that `sums` has, or these for several sequences, one after another.
    `lse` [G, n] is the whole row's log-sum-exp less the content's mean logit, for the mass the support
    retains, which is the eleventh of STATISTICS and not among those returned.
    """
    sinks, heads = len(columns.sink), len(sums.logits)
    sink_logits = logits[..., :sinks].clone()
    logits[..., :sinks] = 0.0
    dispersion = torch.linalg.vector_norm(logits, dim=-1)
    exponents = work.take("exponents", tuple(logits.shape), logits)
    torch.exp(logits, out=exponents)
    exponents[..., :sinks] = 0.0
    mass = exponents.sum(-1)
    top = None
    if not float(mass.max()) < LARGEST_MASS:  # a logit times its exponential would overflow: shift first
        top = logits[..., sinks:].amax(-1, keepdim=True)
        torch.exp(logits - top, out=exponents)
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
    values = torch.stack([*rows, share.square(), dispersion.square(), balance.square()], 1)
    together = values.double().sum(-1)
    if sums.statistics is not None:
        sums.statistics[:, : values.shape[1]] += over_sequences(together, heads)
        if lse is not None:
            retained = (torch.logaddexp(log_mass, split.lse) - lse).clamp_(max=0.0).exp_()
            sums.statistics[:, -1] += over_sequences(retained.sum(-1, dtype=torch.float64), heads)
    if sums.arithmetic is not None:
        part = torch.bmm((split.rest / mass)[:, None], exponents)[:, 0].double()
        part[:, :sinks] = together[:, :1] if sinks == 1 else (share[..., None] * split.pure).double().sum(1)
        sums.arithmetic[:, columns.order] += over_sequences(part, heads)
    return values
