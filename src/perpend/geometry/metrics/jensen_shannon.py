"""Jensen–Shannon divergence in nats, not its square root: ½KL(p‖m) + ½KL(q‖m), m = (p+q)/2.

Two formulas, one value:
  exact  JS = ½ Σ m·g(x),  x = (p−q)/(p+q),  g(x) = 2x·artanh(x) + log(1−x²) = x² + x⁴/6 + x⁶/15 + …
         Every term is non-negative and keeps its digits for nearly equal rows.
  fast   JS = ½(Σ p log p + Σ q log q) − Σ m log m, one logarithm an element; its rounding is about 1e-16
         absolute, so it loses the digits of small values.
`between` is the exact one. `matrix` takes the fast one and recomputes what comes out below EXACT_BELOW.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .._rows import Rows
from . import Metric

EXACT_BELOW = 1e-4  # nats; above it the fast formula is good to a relative 1e-11
_BLOCK = (32, 64)  # rows × rows of one block: its two buffers stay in a core's cache
_PAIRS = 1 << 11  # pairs recomputed at once


def between(x: Rows, y: Rows) -> Tensor:
    """The exact formula on broadcast rows."""
    return _exact(x.detached_from_zero(), y.detached_from_zero())


def matrix(rows: Rows) -> Tensor:
    """All pairs, upper triangle by blocks on as many threads as torch has, mirrored."""
    p = rows.detached_from_zero()
    if p.requires_grad:
        return _exact(p.unsqueeze(-2), p.unsqueeze(-3))
    flat = p.reshape(math.prod(p.shape[:-2]), *p.shape[-2:])
    out = torch.zeros(*flat.shape[:2], flat.shape[1], dtype=p.dtype, device=p.device)
    for index in range(len(flat)):
        _fill(flat[index].contiguous(), out[index])
    return out.reshape(*p.shape[:-1], p.shape[-2])


def _exact(p: Tensor, q: Tensor) -> Tensor:
    total = p + q
    # |x| = 1 only where one part is below the other's rounding: half a step inside, g is log 4 to 15 digits.
    x = ((p - q) / total).clamp(-1 + 2**-53, 1 - 2**-53)
    above, below = torch.log1p(x), torch.log1p(-x)
    g = (1 + x) * above + (1 - x) * below
    # Where the two terms nearly cancel, their difference by itself, with artanh x = (above − below)/2:
    # torch's atanh rounds otherwise at the end of an array, so that equal rows would not be equally far.
    near = x.abs() < 1 / 16
    small = x[near]
    g[near] = small * (above - below)[near] + torch.log1p(-small * small)
    return (total * g).sum(-1) / 4


def _fill(p: Tensor, out: Tensor) -> None:
    """Write the matrix of one set of rows: strips of the upper triangle, then its mirror."""
    negentropy = _xlogx_sum(p)
    strips = range(0, len(p), _BLOCK[0])
    if p.is_cuda:
        _strips(p, negentropy, out, strips)
    else:
        _in_threads(lambda starts: _strips(p, negentropy, out, starts), strips)
    out.copy_(out.triu(1) + out.triu(1).T)


def _in_threads(work: Callable[[Sequence[int]], None], starts: Sequence[int]) -> None:
    """`work` on the starts of a triangle's strips, on as many threads as torch has.

    Thread k of n has every n-th strip: strips shrink down the triangle, so each has an even share.
    """
    workers = max(1, min(torch.get_num_threads(), os.cpu_count() or 1, len(starts)))
    if workers == 1:
        return work(starts)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, (starts[k::workers] for k in range(workers))))


def _strips(p: Tensor, negentropy: Tensor, out: Tensor, starts: Sequence[int]) -> None:
    """The strips of the upper triangle that begin at the rows `starts`."""
    rows, columns = _BLOCK if not p.is_cuda else (_BLOCK[0], len(p))
    half = p / 2
    midpoints = half.new_empty(rows * columns * p.shape[1])
    logarithms = torch.empty_like(midpoints)
    for i in starts:
        a = half[i : i + rows, None]
        for j in range(i, len(p), columns):
            b = half[None, j : j + columns]
            shape = (a.shape[0], b.shape[1], p.shape[1])
            m, log_m = (buffer[: math.prod(shape)].view(shape) for buffer in (midpoints, logarithms))
            torch.add(a, b, out=m)
            torch.log(m, out=log_m).mul_(m)
            pair = (negentropy[i : i + rows, None] + negentropy[None, j : j + columns]).div_(2)
            torch.sub(pair, log_m.sum(-1), out=out[i : i + rows, j : j + columns])
        small = (out[i : i + rows, i:] < EXACT_BELOW).triu(1).nonzero() + i
        for pairs in small.split(_PAIRS):
            if len(pairs):
                left, right = pairs.unbind(-1)
                out[left, right] = _exact(p[left], p[right])


def _xlogx_sum(p: Tensor) -> Tensor:
    return (p.log() * p).sum(-1)


METRIC = Metric(
    "jensen_shannon",
    "JS",
    between,
    matrix,
    laws=frozenset({"separates", "permutation"}),
)
