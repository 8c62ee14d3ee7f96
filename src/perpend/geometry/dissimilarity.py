"""Dissimilarities between rows: every metric, by pair and by matrix, with the sink kept or dropped.

`dissimilarity(p, q, metric)` compares row with row; `pairwise(rows, metric)` all rows with all. The metrics
live in perpend.geometry.metrics, one file each. Both compute in float64 whatever the rows' precision.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import InputError
from ._arrays import Array, Kind, Sink
from ._rows import Rows
from .metrics import METRICS, Metric, metric_named
from .simplex import same_parts

__all__ = ["METRICS", "Metric", "dissimilarities", "dissimilarity", "metric_named", "pairwise"]


def pairwise(
    rows: Array,
    metric: str,
    sink: Sink | None = None,
    policy: str = "keep",
    weight: float | None = None,
    *,
    log: bool = False,
) -> Array:
    """All dissimilarities of rows (..., n, parts): (..., n, n), float64, exactly symmetric, zero diagonal.

    metric: a name in METRICS: cosine (1 − cos), jensen_shannon (nats, not its root), euclidean, hellinger
        (√(1 − BC)), fisher_rao (2·arccos BC), aitchison (d_A), content (d_A⊥), aitchison_weighted (d_λ).
    Rows sum to one, to rounding, and are re-closed first, for the metrics of shares.
    sink, policy: "keep" compares whole rows, "drop" removes the sink's columns and re-closes first.
    weight: λ of d_λ² = d_A⊥² + λ(Δb)², for aitchison_weighted alone.
    log: rows are log-probabilities (or logits).
    Equal rows are at distance exactly 0, and equal rows are equally far from a third, bit for bit.
    Raises InputError for an unknown metric, a metric of the content without a sink, and rows it cannot take.
    """
    kind = Kind.of(rows)
    chosen = metric_named(metric)
    weight = _weight(chosen, weight)
    view = Rows.checked(kind, rows, log=log, sink=sink, policy=policy, weight=weight)
    if view.values.ndim < 2:
        raise InputError(f"rows must have shape (..., n, parts), got {tuple(view.values.shape)}")
    return kind.give(chosen.matrix(view))


def dissimilarity(
    p: Array,
    q: Array,
    metric: str,
    sink: Sink | None = None,
    policy: str = "keep",
    weight: float | None = None,
    *,
    log: bool = False,
) -> Array:
    """The dissimilarity of p and q (..., parts), broadcasting over batch axes; arguments as in `pairwise`."""
    return dissimilarities(p, q, [metric], sink, policy, weight, log=log)[metric]


def dissimilarities(
    p: Array,
    q: Array,
    metrics: Sequence[str],
    sink: Sink | None = None,
    policy: str = "keep",
    weight: float | None = None,
    *,
    log: bool = False,
) -> dict[str, Array]:
    """Several metrics of the same rows, name → values: what they share (checks, closure, logs) is done once.

    `weight` goes to the metric that takes one; arguments else as in `dissimilarity`.
    """
    kind = Kind.of(p, q)
    chosen = [metric_named(name) for name in metrics]
    takers = [metric for metric in chosen if metric.takes_weight] or chosen
    weight = _weight(takers[0], weight)
    x, y = (
        Rows.checked(kind, rows, log=log, sink=sink, policy=policy, weight=weight, name=name)
        for rows, name in ((p, "p"), (q, "q"))
    )
    same_parts(x.values, y.values)
    return {metric.name: kind.give(metric.between(x, y)) for metric in chosen}


def _weight(metric: Metric, weight: float | None) -> float | None:
    if not metric.takes_weight:
        if weight is not None:
            raise InputError(f"metric {metric.name!r} takes no weight; aitchison_weighted does")
        return None
    if weight is None or not weight >= 0 or weight == torch.inf:
        raise InputError(
            f"metric {metric.name!r} needs a weight λ ≥ 0 (λ = 0 is content, λ = 1 full d_A), got {weight!r}"
        )
    return float(weight)
