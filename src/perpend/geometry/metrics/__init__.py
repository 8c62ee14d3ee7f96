"""One file a metric. A new file here that defines `METRIC` is a new metric: it is found, and tested.

A metric is a distance of embedded rows (`embedded`), or gives its own `between` and `matrix`. It declares the
laws it keeps out of LAWS; the tests check that each declared law holds and that each other one fails.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from ...errors import unknown_name
from .._rows import Rows
from ..laws import LAWS
from ..simplex import norm


@dataclass(frozen=True)
class Metric:
    """A dissimilarity of rows.

    between: (Rows, Rows) → the dissimilarities of broadcast rows, (...).
    matrix: Rows (..., n, parts) → (..., n, n), exactly symmetric, zero diagonal.
    laws: those of LAWS it keeps.  orders_like: a metric that orders all pairs identically.
    """

    name: str
    title: str
    between: Callable[[Rows, Rows], Tensor]
    matrix: Callable[[Rows], Tensor]
    laws: frozenset[str]
    needs_sink: bool = False
    takes_weight: bool = False
    orders_like: str | None = None


def embedded(
    name: str,
    title: str,
    embed: Callable[[Rows], Tensor],
    laws: frozenset[str],
    finish: Callable[[Tensor], Tensor] = lambda distance: distance,
    **more: Any,
) -> Metric:
    """A metric that is `finish`(Euclidean distance of `embed`(rows)); `finish` must be increasing with 0 → 0.

    Nearly equal rows keep their digits (theirs is a sum of squared differences), the matrix is symmetric to
    the bit, and equal rows are equally far from any third.
    """

    def between(x: Rows, y: Rows) -> Tensor:
        return finish(norm(embed(x) - embed(y)))

    return Metric(name, title, between, lambda rows: _distances(embed(rows), finish), laws, **more)


BAND = 96  # rows taken at a time, whose intermediates lie in a core's cache
NEAR = 1 / 16  # of ‖x‖² + ‖y‖² about the mean row: a smaller ‖x − y‖² would lose digits in a product
FEW = 1 / 8  # of a band's pairs, up to which those that are near are taken one by one


def _distances(points: Tensor, finish: Callable[[Tensor], Tensor] = lambda distance: distance) -> Tensor:
    """Euclidean distances (..., n, n) of points (..., n, d), finished: upper bands, mirrored."""
    *batch, n, _ = points.shape
    products = n > BAND and not points.requires_grad
    if products and batch:  # each by itself: the bits of one matrix do not turn on the others
        matrices = [_distances(one, finish) for one in points.flatten(0, -3)]
        return torch.stack(matrices).view(*batch, n, n) if matrices else points.new_empty(*batch, n, n)
    if products and (equal := _equal_rows(points)):  # equally far from a third, to the bit
        rows, of = equal
        return _distances(rows, finish)[of][:, of]
    found = points.new_empty(*batch, n, n)
    measure = _by_products(points) if products else _by_differences(points)
    for start in range(0, n, BAND):
        band = slice(start, start + BAND)
        part = finish(measure(start))
        found[..., start:, band] = part.mT
        found[..., band, start:] = part
    found.diagonal(dim1=-2, dim2=-1).zero_()  # squares that overflow leave NaN there
    return found


def _equal_rows(points: Tensor) -> tuple[Tensor, Tensor] | None:
    """The distinct rows of (n, d) and which of them each row is; None where all are distinct."""
    number = (points * torch.arange(1, 1 + points.shape[1], device=points.device)).sum(-1)
    if len(torch.unique(number)) == len(points):  # the usual case, and quick to see
        return None
    rows, of = torch.unique(points, dim=0, return_inverse=True)
    return (rows, of) if len(rows) < len(points) else None


def _by_differences(points: Tensor) -> Callable[[int], Tensor]:
    """Gives the distances of a band of rows to its own and all later ones. Exact, and slower."""

    def measure(start: int) -> Tensor:
        own, later = points[..., start : start + BAND, :], points[..., start:, :]
        return torch.cdist(own, later, compute_mode="donot_use_mm_for_euclid_dist")

    return measure


def _by_products(points: Tensor) -> Callable[[int], Tensor]:
    """The same of points (n, d), to a few roundings, in half the time or less.

    ‖x − y‖² = ‖x‖² + ‖y‖² − 2<x, y> about the mean row; from the differences where that would lose digits, as
    of rows with one strong sink, and from then on if of many.
    """
    centred = points - points.mean(0)
    squares = torch.linalg.vecdot(centred, centred)
    exact = _by_differences(points)
    crowded = False

    def measure(start: int) -> Tensor:
        nonlocal crowded
        if crowded:
            return exact(start)
        band = slice(start, start + BAND)
        least = squares[band, None] + squares[start:]
        square = torch.addmm(least, centred[band], centred[start:].mT, alpha=-2)
        near = (square >= least.mul_(NEAR)).logical_not_()  # NaN too, where squares overflow
        near[:, : len(near)].triu_(1)  # the others lie on the diagonal or are mirrored
        count = int(torch.count_nonzero(near))
        crowded = count > FEW * near.numel()
        if crowded:
            return exact(start)
        if count:
            place = near.view(-1).nonzero()[:, 0]
            row, column = place // near.shape[1], place % near.shape[1]
            apart = points[band].index_select(0, row) - points[start:].index_select(0, column)
            square.view(-1).index_copy_(0, place, torch.linalg.vecdot(apart, apart))
        own = square[:, : len(square)].triu_(1)
        own += own.mT.clone()
        return square.sqrt_()

    return measure


def metric_named(name: str) -> Metric:
    """The metric called `name`; InputError with the near and the known names if there is none."""
    if name not in METRICS:
        raise unknown_name("metric", name, METRICS)
    return METRICS[name]


def _discover() -> dict[str, Metric]:
    found = {}
    for module in sorted(
        info.name for info in pkgutil.iter_modules(__path__) if not info.name.startswith("_")
    ):
        metric = importlib.import_module(f"{__name__}.{module}").METRIC
        unknown = metric.laws - LAWS.keys()
        if metric.name != module or unknown:
            raise ValueError(
                f"metrics/{module}.py must define METRIC named {module!r} with laws of LAWS {unknown or ''}"
            )
        found[module] = metric
    return found


METRICS = MappingProxyType(_discover())
