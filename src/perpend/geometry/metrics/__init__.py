"""One file a metric. A new file here that defines `METRIC` is a new metric: it is found, and tested.

A metric is a distance of embedded rows (`embedded`), or gives its own `between` and `matrix`. It declares the
laws it keeps out of LAWS; the tests check that each declared law holds and that each other one fails.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
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

    The distance is a sum of squared differences, never a Gram matrix: nearly equal rows keep their digits,
    the matrix is symmetric to the bit, and equal rows are equally far from any third.
    """

    def between(x: Rows, y: Rows) -> Tensor:
        return finish(norm(embed(x) - embed(y)))

    def matrix(rows: Rows) -> Tensor:
        points = embed(rows)
        if points.device.type == "cpu" and not points.requires_grad:
            return torch.from_numpy(_by_scipy(points.numpy(), finish))
        return finish(_distances(points))

    return Metric(name, title, between, matrix, laws, **more)


BAND = 128  # rows whose distances torch takes at a time
STRIP = 32  # and scipy
FEW = 512  # points up to which one call for all pairs is quicker than strips


def _distances(points: Tensor) -> Tensor:
    """Euclidean distances (..., n, n) of points (..., n, d): the upper triangle by bands, mirrored."""
    n = points.shape[-2]
    found = points.new_zeros(*points.shape[:-1], n)
    for start in range(0, n, BAND):
        band = slice(start, start + BAND)
        part = torch.cdist(
            points[..., band, :], points[..., start:, :], compute_mode="donot_use_mm_for_euclid_dist"
        )
        found[..., band, start:] = part
        found[..., start:, band] = part.mT
    return found


def _by_scipy(points: np.ndarray, finish: Callable[[Tensor], Tensor]) -> np.ndarray:
    """The same on the processor and without a gradient, finished: scipy's loop over pairs takes 60 % of the
    time of torch's, and a strip is finished and mirrored while it lies in a core's cache."""
    from scipy.spatial.distance import cdist, pdist, squareform

    *batch, n, _ = points.shape
    if batch:
        found = np.empty((*batch, n, n))
        for index in np.ndindex(*batch):
            found[index] = _by_scipy(points[index], finish)
        return found
    if 1 < n <= FEW:
        return finish(torch.from_numpy(squareform(pdist(points), checks=False))).numpy()
    found = np.empty((n, n))

    def work(starts: Sequence[int]) -> None:
        for start in starts:
            strip = slice(start, start + STRIP)
            part = finish(torch.from_numpy(cdist(points[strip], points[start:]))).numpy()
            found[strip, start:] = part
            found[start:, strip] = part.T

    in_threads(work, range(0, n, STRIP))
    return found


def in_threads(work: Callable[[Sequence[int]], None], starts: Sequence[int]) -> None:
    """`work` on the starts of a triangle's strips, on as many threads as torch has.

    Thread k of n has every n-th strip: strips shrink down the triangle, so each has an even share.
    """
    workers = max(1, min(torch.get_num_threads(), os.cpu_count() or 1, len(starts)))
    if workers == 1:
        return work(starts)
    with ThreadPoolExecutor(workers) as pool:
        list(pool.map(work, (starts[k::workers] for k in range(workers))))


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
