"""Jensen–Shannon divergence in nats, not its square root: ½KL(p‖m) + ½KL(q‖m), m = (p+q)/2.

Two formulas, one value:
  exact  JS = ½ Σ m·g(x),  x = (p−q)/(p+q),  g(x) = 2x·artanh(x) + log(1−x²) = x² + x⁴/6 + x⁶/15 + …
         Every term is non-negative and keeps its digits for nearly equal rows.
  fast   JS = ½(Σ p log p + Σ q log q) − Σ m log m, one logarithm an element; its rounding is about 1e-16
         absolute, so it loses the digits of small values.
`between` is the exact one. `matrix` takes the fast one and recomputes what comes out below EXACT_BELOW.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor

from .._rows import Rows
from . import Metric

EXACT_BELOW = 1e-4  # nats; above it the fast formula is good to a relative 1e-11
_BLOCK = (
    8,
    64,
)  # rows × rows of one block: its buffers stay in a core's cache, and below torch's own threading
_CHUNK = 1 << 15  # elements of one exact block


def between(x: Rows, y: Rows) -> Tensor:
    """The exact formula on broadcast rows."""
    return _exact(x.detached_from_zero(), y.detached_from_zero())


def matrix(rows: Rows) -> Tensor:
    """All pairs, upper triangle by blocks on as many threads as torch has, mirrored."""
    p = rows.detached_from_zero()
    if p.requires_grad:
        return _exact(p.unsqueeze(-2), p.unsqueeze(-3))
    flat = p.reshape(-1, *p.shape[-2:])
    out = torch.zeros(*flat.shape[:2], flat.shape[1], dtype=p.dtype, device=p.device)
    for index in range(len(flat)):
        _fill(flat[index].contiguous(), out[index])
    return out.reshape(*p.shape[:-1], p.shape[-2])


def _exact(p: Tensor, q: Tensor) -> Tensor:
    total = p + q
    # |x| = 1 only where one part is below the other's rounding: half a step inside, g is log 4 to 15 digits.
    x = ((p - q) / total).clamp(-1 + 2**-53, 1 - 2**-53)
    near = 2 * x * x.atanh() + torch.log1p(-x * x)
    # Where 1 − x² would round, the two logarithms apart.
    far = (1 + x) * torch.log1p(x) + (1 - x) * torch.log1p(-x)
    return (total * torch.where(x.abs() < 0.5, near, far)).sum(-1) / 4


def _fill(p: Tensor, out: Tensor) -> None:
    """Write the matrix of one set of rows: entropies, blocks of midpoints, then the small values exactly."""
    negentropy = _xlogx_sum(p)
    half = p / 2
    if p.is_cuda:
        _cuda_blocks(half, negentropy, out)
    else:
        strips = list(range(0, len(p), _BLOCK[0]))
        workers = max(1, min(torch.get_num_threads(), os.cpu_count() or 1, len(strips)))
        # Strip k goes to worker k mod n: strips shrink down the triangle, so each worker gets an even share.
        with ThreadPoolExecutor(workers) as pool:
            list(pool.map(lambda k: _strips(half, negentropy, out, strips[k::workers]), range(workers)))
    upper = torch.triu(out, 1)
    torch.add(upper, upper.T, out=out)
    del upper
    for i, j in _small(out):
        value = _exact(p[i], p[j])
        out[i, j] = value
        out[j, i] = value


def _strips(half: Tensor, negentropy: Tensor, out: Tensor, starts: list[int]) -> None:
    rows, columns = _BLOCK
    size, dim = half.shape
    midpoints = torch.empty(rows * columns * dim, dtype=half.dtype)
    logarithms = torch.empty_like(midpoints)
    for i in starts:
        for j in range(i, size, columns):
            a, b = half[i : i + rows], half[j : j + columns]
            shape = (len(a), len(b), dim)
            m = midpoints[: len(a) * len(b) * dim].view(shape)
            torch.add(a[:, None], b[None], out=m)
            log_m = logarithms[: m.numel()].view(shape)
            torch.log(m, out=log_m).mul_(m)
            pair = (negentropy[i : i + rows, None] + negentropy[None, j : j + columns]).div_(2)
            torch.sub(pair, log_m.sum(-1), out=out[i : i + rows, j : j + columns])


def _cuda_blocks(half: Tensor, negentropy: Tensor, out: Tensor) -> None:
    step = max(1, (1 << 26) // (half.shape[0] * half.shape[1]))
    for i in range(0, len(half), step):
        pair = (negentropy[i : i + step, None] + negentropy[None]) / 2
        out[i : i + step] = pair - _xlogx_sum(half[i : i + step, None] + half[None])


def _xlogx_sum(p: Tensor) -> Tensor:
    return (p.log() * p).sum(-1)


def _small(out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Index pairs i < j whose fast value is small, in chunks of at most _CHUNK elements of rows."""
    for i in range(len(out)):
        j = (out[i, i + 1 :] < EXACT_BELOW).nonzero()[:, 0] + i + 1
        for some in j.split(512):
            yield torch.tensor(i, device=out.device), some


METRIC = Metric(
    "jensen_shannon",
    "JS",
    between,
    matrix,
    laws=frozenset({"separates", "permutation"}),
)
