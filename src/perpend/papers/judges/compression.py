"""Judges of compression."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perpend.papers.judges import ARTEFACT, REFUTED, REPRODUCED, Outcome, Summary, either, judge
from perpend.papers.measures import at
from perpend.studies.compression import FIGURE_6


def _ordering(summary: Summary) -> list[Mapping[str, Any]]:
    """Local rows of the paper's own regimes, else of at least four."""
    rows = [row for row in at(summary.results, "ordering", default=[]) if row["mode"] == "local"]
    own = [row for row in rows if tuple(row["order"]) == FIGURE_6]
    return own or [row for row in rows if len(row["order"]) >= 4]


@judge("compress")
def ordering(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = _ordering(summary)
    if not rows:
        return None
    held = {row["part"]: row[args["measure"]] for row in rows}
    told = "; ".join(
        f"{part}: {'holds' if o['mean'] else 'fails'} in the mean, at {o['layers']:.0%} of layers"
        for part, o in held.items()
    )
    return either(all(o["mean"] for o in held.values()), f"{' < '.join(rows[0]['order'])} in e⊥, {told}")


@judge("compress")
def parallel_interleaves(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = _ordering(summary)
    if not rows:
        return None
    told = "; ".join(
        f"{row['part']}: the order {'holds' if row['parallel']['mean'] else 'fails'} in the mean, at "
        f"{row['parallel']['layers']:.0%} of layers (e⊥ {row['perpendicular']['layers']:.0%})"
        for row in rows
    )
    worse = [row["parallel"]["layers"] < row["perpendicular"]["layers"] for row in rows]
    return either(all(worse), f"in e∥ {told}")


@judge("compress")
def predicts_better(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = [
        row
        for row in at(summary.results, "relations", default=[])
        if row["mode"] == "local" and row["over"] == "regimes" and row.get("spearman") is not None
    ]
    if not rows:
        return None
    by_part: dict[str, dict[str, float]] = {}
    for row in rows:
        by_part.setdefault(row["part"], {})[row["measure"]] = row["spearman"]
    needed = ("perpendicular", "total", "parallel")
    parts = {part: own for part, own in by_part.items() if all(name in own for name in needed)}
    if not parts:
        return None
    told = "; ".join(
        f"{part}: e⊥ {own['perpendicular']:.2f}, e {own['total']:.2f}, e∥ {own['parallel']:.2f}"
        for part, own in parts.items()
    )
    points = min(row.get("points", 0) for row in rows)
    found = f"rank correlation with the loss change over {points} regimes, {told}"
    better = [own["perpendicular"] > own["total"] for own in parts.values()]
    worse = [own["perpendicular"] < own["total"] for own in parts.values()]
    if any(worse):
        return Outcome(REFUTED, found)
    return Outcome(REPRODUCED if all(better) else ARTEFACT, found)


@judge("compress")
def correlation(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = [
        (name, row)
        for name, outcome in at(summary.results, "regimes", default={}).items()
        for row in outcome.get("summary", [])
        if row["mode"] == "local" and row["part"] == "mlp" and row.get("along", "update") == "update"
    ]
    rows = [(name, row) for name, row in rows if row.get("r_over_tokens") is not None]
    if not rows:
        return None
    null = min(row["r_isotropic"] for _, row in rows)
    told = ", ".join(
        f"{name} {row['r_over_tokens']:.3f} ({row['energy_share']:.0%} of the energy)" for name, row in rows
    )
    found = f"MLP, r(‖e⊥‖, ‖e‖) over tokens: {told}; an error without direction has {null:.4f}"
    if any(row["r_over_tokens"] <= args["least"] for _, row in rows):
        return Outcome(REFUTED, found)
    return Outcome(ARTEFACT if null > args["least"] else REPRODUCED, found)


@judge("updates")
def second_order(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    layers = at(summary.results, "updates", "per_layer", default=[])
    gaps = [(row["layer"], at(row, "block", "gap_median")) for row in layers]
    gaps = [(layer, gap) for layer, gap in gaps if gap is not None]
    if not gaps:
        return None
    good = sum(gap <= args["most"] for _, gap in gaps)
    layer, worst = max(gaps, key=lambda pair: pair[1])
    sizes = [at(row, "block", "relative_norm") for row in layers]
    size = max((value for value in sizes if value is not None), default=math.nan)
    found = (
        f"within {args['most']} for the median token in {good} of {len(gaps)} blocks, off by {worst:.3g} in "
        f"layer {layer}; ‖Δ‖/‖x‖ up to {size:.2g}"
    )
    return either(good == len(gaps), found)
