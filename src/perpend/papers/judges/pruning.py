"""Judges of pruning."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perpend.papers.judges import (
    REFUTED,
    REPRODUCED,
    UNDERPOWERED,
    UNIFORM_SINK,
    Outcome,
    Summary,
    either,
    judge,
)
from perpend.papers.measures import at


def at_sparsity(summary: Summary, sparsity: float) -> dict[str, float]:
    """criterion → perplexity over base at one sparsity, random draws left out."""
    return {
        cell["criterion"]: cell["over_base"]
        for cell in at(summary.results, "cells", default=[])
        if math.isclose(cell.get("sparsity", -1), sparsity)
        and not cell["criterion"].startswith("random")
        and "over_base" in cell  # models without a perplexity have none
    }


@judge("prune")
def regime_rule(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    scored = at(summary.results, "score", default={})
    if scored.get("outcome") is None and scored.get("held") is None:
        return None
    found = f"predicted {scored['predicted']}, outcome {scored['outcome']}"
    if scored["held"] is None:
        return Outcome(UNDERPOWERED, f"{found}: the rule abstained")
    return either(bool(scored["held"]), found)


@judge("prune")
def every_criterion_fails(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    worst: dict[str, float] = {}
    for cell in at(summary.results, "cells", default=[]):
        if not cell["criterion"].startswith("random") and "over_base" in cell:
            worst[cell["criterion"]] = max(worst.get(cell["criterion"], 0.0), cell["over_base"])
    if not worst:
        return None
    beaten = {k: v["beaten"] for k, v in at(summary.results, "random_beats", default={}).items()}
    safe = [name for name, value in worst.items() if value <= 4 and not beaten.get(name)]
    told = ", ".join(f"{name} {value:.3g}×" for name, value in worst.items())
    return either(
        not safe, f"worst over the base: {told}" + (f"; safe here: {', '.join(safe)}" if safe else "")
    )


@judge("prune")
def hundredfold(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    cells = [
        cell
        for cell in at(summary.results, "cells", default=[])
        if not cell["criterion"].startswith("random") and "over_base" in cell
    ]
    if not cells:
        return None
    worst = max(cells, key=lambda cell: cell["over_base"])
    found = f"worst: {worst['criterion']} at {worst['sparsity']:.0%}, {worst['over_base']:.3g} times the base"
    return either(worst["over_base"] > 100, found)


@judge("prune")
def random_beats(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    counted = at(summary.results, "random_beats", "content")
    if not counted or not counted["of"]:
        return None
    k, n = counted["beaten"], counted["of"]
    half = 1.96 * math.sqrt(0.25 / n)
    status = REPRODUCED if abs(k / n - 0.5) <= half else REFUTED
    if half > 0.35:  # a handful of comparisons is compatible with nearly everything
        status = UNDERPOWERED
    return Outcome(status, f"a random draw beats it in {k} of {n} comparisons")


@judge("prune")
def content_l1_best(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    cells, cv = at_sparsity(summary, 0.2), at(summary.results, "prediction", "cv")
    if "content_l1" not in cells or len(cells) < 5 or cv is None or cv > UNIFORM_SINK:
        return None  # the claim is about models whose heads all have a strong sink
    best = min(cells, key=cells.get)
    found = f"best at 20 %: {best} ({cells[best]:.2f}×); content_l1 {cells['content_l1']:.2f}× the base"
    return either(best == "content_l1", found)


@judge("prune")
def set_stability(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    mean = {
        row["criterion"]: row["jaccard"]
        for row in at(summary.results, "stability", default=[])
        if math.isclose(row["sparsity"], 0.2) and row["jaccard"] is not None
    }
    if not {"js_l1", "content_l1"} <= set(mean):
        return None
    js, content = mean["js_l1"], mean["content_l1"]
    found = f"mean Jaccard over seeds: JS-L1 {js:.2f}, content-L1 {content:.2f}"
    if js == content == 1:  # seeds that read the same text choose the same sets
        return Outcome(UNDERPOWERED, found)
    return either(js >= 0.92 and content < js, found)
