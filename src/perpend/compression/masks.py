"""Which entries of a score matrix are the lowest: the one rule behind every mask, ties included.

Among equal scores the lower index goes first (a stable sort), so a mask is a function of the scores alone.
"""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from perpend.compression.matrices import kept_name
from perpend.errors import InputError

SPARSITY = 0.5  # where none is asked for


def lowest(scores: Tensor, count: int) -> Tensor:
    """bool [..., n]: True at the `count` smallest entries of the last axis, ties by index, NaN last.

    The same entries as the first `count` of a stable sort, several times sooner.
    """
    if not count:
        return torch.zeros_like(scores, dtype=torch.bool)
    if scores.isnan().any():  # no comparison places it
        order = torch.argsort(scores, dim=-1, stable=True)[..., :count]
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order, True)
    return _lowest_of_few(scores, count) if scores.shape[-1] <= FEW else _lowest_of_many(scores, count)


FEW = 8  # entries up to which comparing each with each is the quickest


def _lowest_of_few(scores: Tensor, count: int) -> Tensor:
    """An entry goes if fewer than `count` come before it."""
    entries = [entry.contiguous() for entry in scores.unbind(-1)]
    found = torch.empty_like(scores, dtype=torch.bool)
    for i, own in enumerate(entries):
        before = torch.zeros_like(own, dtype=torch.int8)
        for j, other in enumerate(entries):
            if j != i:
                before += other <= own if j < i else other < own
        found[..., i] = before < count
    return found


def _lowest_of_many(scores: Tensor, count: int) -> Tensor:
    """All below the `count`-th smallest value, and of those that equal it the first, up to `count`."""
    last = torch.kthvalue(scores, count, dim=-1, keepdim=True).values
    below, equal = scores < last, scores == last
    room = count - below.sum(-1, keepdim=True)
    if (equal.sum(-1, keepdim=True) > room).any():
        equal &= equal.cumsum(-1) <= room
    return below | equal


def pattern_of(text: str) -> tuple[int, int] | None:
    """ "2:4" -> (2, 4): two kept of each four neighbours; "unstructured" -> None."""
    if text == "unstructured":
        return None
    match = re.fullmatch(r"(\d+):(\d+)", str(text))
    if match is None or not 0 < int(match[1]) < int(match[2]):
        raise InputError(f"pattern must be 'unstructured' or KEPT:OF such as 2:4 or 4:8, got {text!r}")
    return int(match[1]), int(match[2])


def pruned(
    scores: Tensor, *, pattern: str = "unstructured", sparsity: float = 0.5, scope: str = "row"
) -> Tensor:
    """bool [out, in], True where a weight goes.

    unstructured: floor(sparsity * n) lowest of each output row (scope "row") or of the matrix ("matrix");
    n:m: all but the n highest of each m consecutive inputs; sparsity is then 1 - n/m.
    """
    kept_of = pattern_of(pattern)
    if kept_of is None:
        pool = scores.reshape(1, -1) if scope == "matrix" else scores
        return lowest(pool, removed(pool.shape[-1], sparsity)).reshape(scores.shape)
    kept, of = kept_of
    groups = scores.reshape(*scores.shape[:-1], -1, of)
    return lowest(groups, of - kept).reshape(scores.shape)


def removed(total: int, sparsity: float) -> int:
    """floor(sparsity * total), safe against 0.29 * 100 = 28.999...96."""
    return math.floor(sparsity * total + 1e-9)


def check_pattern(name: str, width: int, pattern: str, sparsity: float) -> None:
    """InputError naming the matrix if its width does not hold whole groups of the pattern, and for a sparsity
    that is none or that the pattern contradicts.
    """
    if not 0 <= sparsity < 1:
        raise InputError(f"sparsity must lie in [0, 1), got {sparsity}")
    kept_of = pattern_of(pattern)
    if kept_of is None:
        return
    fixed = 1 - kept_of[0] / kept_of[1]
    if sparsity not in (SPARSITY, fixed):
        raise InputError(
            f"pattern {pattern} fixes the sparsity at {fixed:g}, {sparsity:g} was asked for: give one"
        )
    if width % kept_of[1]:
        raise InputError(
            f"{name} has {width} input features, not a multiple of {kept_of[1]}: pattern {pattern} does not "
            f"fit; use another pattern or leave the matrix out with keep={kept_name(name)!r}"
        )
