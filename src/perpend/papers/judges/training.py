"""Judges of training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perpend.papers.judges import (
    REFUTED,
    REPRODUCED,
    UNDERPOWERED,
    Outcome,
    Summary,
    judge,
    sided,
    told_interval,
)
from perpend.papers.measures import at


@judge("train")
def train_better(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = [
        row
        for row in at(summary.results, "paired", default=[])
        if row["variant"] in args["variants"] and row["budget"] == "tokens"
    ]
    if not rows:
        return None
    told = "; ".join(
        f"{row['variant']} {told_interval(row['mean'], row.get('low'), row.get('high'), '+.4f')} nats over "
        f"{row['n']} seeds"
        + (f" ({row['detectable']:.4f} would be found)" if row.get("detectable") is not None else "")
        for row in rows
    )
    statuses = [sided(row.get("low"), row.get("high"), below=True) for row in rows]
    status = next((s for s in (REPRODUCED, UNDERPOWERED, REFUTED) if s in statuses), UNDERPOWERED)
    return Outcome(status, f"at equal tokens: {told}")


@judge("train")
def gate(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = {
        row["variant"]: row for row in at(summary.results, "paired", default=[]) if row["budget"] == "tokens"
    }
    fixed = rows.get("value-exclude-self") or rows.get("value-full")
    learned = rows.get("value-gate") or rows.get("value-gate-head")
    if not fixed or not learned:
        return None
    ends = {
        row["variant"]: told_interval(row["mean"], row.get("low"), row.get("high"), "+.4f")
        for row in (learned, fixed)
    }
    told = (
        f"against {fixed['against']}: " + ", ".join(f"{name} {end}" for name, end in ends.items()) + " nats"
    )
    if None in (learned.get("low"), fixed.get("low")):
        return Outcome(UNDERPOWERED, f"{told}; one seed")
    if learned["low"] > fixed["high"]:
        return Outcome(REPRODUCED, told)
    return Outcome(REFUTED if learned["high"] < fixed["low"] else UNDERPOWERED, told)
