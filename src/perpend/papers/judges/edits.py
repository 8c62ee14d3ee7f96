"""Judges of updates and edits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perpend.papers.judges import (
    ARTEFACT,
    NATS,
    REFUTED,
    REPRODUCED,
    UNDERPOWERED,
    Outcome,
    Summary,
    either,
    equal,
    every,
    judge,
    told_interval,
)
from perpend.papers.measures import at


@judge("updates")
def parallel_ratio(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    over = at(summary.results, "updates", "over_layers", default={})
    null = at(summary.results, "updates", "null", "ratio_mean")
    if not over or null is None:
        return None
    ratios = {part: at(row, "all", "ratio") for part, row in over.items()}
    trimmed = {part: at(row, "without_both", "ratio") for part, row in over.items()}
    known = {part: value for part, value in ratios.items() if value is not None}
    if not known:
        return None
    told = ", ".join(
        f"{part} {value:.3f}"
        + (f" ({trimmed[part]:.3f} without position 0 and the top 1 %)" if trimmed[part] else "")
        for part, value in known.items()
    )
    found = f"along over across: {told}; a random direction has {null:.3f}"
    kept = [trimmed[part] if trimmed[part] is not None else value for part, value in known.items()]
    return Outcome(REPRODUCED if min(kept) > 2 * null else ARTEFACT, found)


def _cells(
    summary: Summary, site: str, parallel: float, perpendicular: float, control: str | None = None
) -> list[Mapping[str, Any]]:
    """Cells of a sweep, all layers and heads; head reference first."""
    found = [
        cell
        for cell in at(summary.results, "cells", default=[])
        if (cell["site"] == site or (site == "*" and cell["site"] != "unedited"))
        and cell.get("parallel") == parallel
        and cell.get("perpendicular") == perpendicular
        and cell.get("control") == control
        and cell.get("layers") is None
        and cell.get("heads") is None
    ]
    return sorted(found, key=lambda cell: cell.get("reference") != "head")


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['site']} ({cell['reference']})" if cell.get("reference") else cell["site"]


def _change(cell: Mapping[str, Any]) -> str:
    return told_interval(cell["change"], cell.get("change_low"), cell.get("change_high"))


@judge("edit")
def edit_equal(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    cells = _cells(summary, args["site"], args["parallel"], 1.0)
    if not cells:
        return None
    statuses = [
        equal(cell["change"], cell.get("change_low"), cell.get("change_high"), args["margin"])
        for cell in cells
    ]
    told = ", ".join(f"{_change(cell)} nats under the {cell['reference']} reference" for cell in cells)
    # Several readings of the reference: the claim holds if it does under one.
    status = next(
        (wanted for wanted in (REPRODUCED, UNDERPOWERED, REFUTED) if wanted in statuses), UNDERPOWERED
    )
    return Outcome(status, f"{told}; margin ±{args['margin']} nats, intervals 95 %")


@judge("edit")
def edit_greater(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    first = {(c["site"], c.get("reference")): c for c in _cells(summary, *args["first"])}
    second = {(c["site"], c.get("reference")): c for c in _cells(summary, *args["second"])}
    if args["first"][0] == "*":
        pairs = [(first[key], second[key]) for key in first if key in second]
    else:
        pairs = [(a, b) for a in first.values() for b in second.values()]
        same = [(a, b) for a, b in pairs if a.get("reference") == b.get("reference")]
        pairs = same or pairs
    if not pairs:
        return None
    statuses, told = [], []
    for a, b in pairs:
        apart = (a["change_low"] > b["change_high"]) - (a["change_high"] < b["change_low"])
        statuses.append({1: REPRODUCED, 0: UNDERPOWERED, -1: REFUTED}[apart])
        against = "parallel" if args["first"][0] == "*" else _name(b)
        told.append(f"{_name(a)} {_change(a)} against {against} {_change(b)}")
    return Outcome(every(statuses), "; ".join(told) + " nats")


@judge("edit")
def edit_control(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    """Per site, whether the parallel part costs less than its control of the same norm; equal: geometry."""
    statuses, told = [], []
    for cell in _cells(summary, "*", 0.0, 1.0):
        same = [
            c
            for c in _cells(summary, cell["site"], 0.0, 1.0, args["control"])
            if c.get("reference") == cell.get("reference")
        ]
        if not same:
            continue
        other = same[0]
        below = cell["change_high"] < other["change_low"]
        above = cell["change_low"] > other["change_high"]
        statuses.append(REPRODUCED if below else REFUTED if above else ARTEFACT)
        told.append(f"{_name(cell)} {_change(cell)} against {_change(other)}")
    if not statuses:
        return None
    found = f"parallel against {args['control']}, same norm: " + "; ".join(told) + " nats"
    return Outcome(every(statuses), found)


@judge("edit")
def basin(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = [row for row in at(summary.results, "basins", default=[]) if row["tolerance"] == NATS]
    sites: dict[tuple[str, Any], dict[str, Mapping[str, Any]]] = {}
    for row in rows:
        sites.setdefault((row["site"], row.get("reference")), {})[row["scale"]] = row
    both = {key: pair for key, pair in sites.items() if len(pair) == 2}
    if not both:
        return None
    told, wider = [], []
    for (site, _), pair in both.items():
        widths = {name: row["high"] - row["low"] for name, row in pair.items()}
        wider.append(widths["parallel"] > widths["perpendicular"])
        told.append(
            f"{site}: s∥ {pair['parallel']['low']:.2f} to {pair['parallel']['high']:.2f}, s⊥ "
            f"{pair['perpendicular']['low']:.2f} to {pair['perpendicular']['high']:.2f}"
        )
    return either(all(wider), f"at {NATS} nats " + "; ".join(told))


def _whole(summary: Summary, table: str, key: str, name: str) -> Mapping[str, Any] | None:
    """The row over all layers of a table of the diagonal study."""
    rows = at(summary.results, "diagonal", table, default=[])
    return next((row for row in rows if row.get("layer") is None and row[key] == name), None)


@judge("edit")
def diagonal_value(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    row = _whole(summary, "diagonal", "form", "value.exclude_self")
    if row is None:
        return None
    return either(row["max"] <= 1e-6, f"{row['min']:+.2f} to {row['max']:+.2f}, median {row['median']:+.3f}")


@judge("edit")
def diagonal_residual(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    row = _whole(summary, "diagonal", "form", "residual.attn head")
    if row is None:
        return None
    return either(row["min"] < 0 < row["max"], f"{row['min']:+.2f} to {row['max']:+.2f}")


@judge("edit")
def applied_output(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    value = _whole(summary, "audit", "site", "value.exclude_self")
    residual = _whole(summary, "audit", "site", "residual.attn")
    if value is None or residual is None:
        return None
    told = ", ".join(
        f"{name.replace('_', ' ')} {value[name]:.1%} against {residual[name]:.1%}"
        for name in ("norm_change", "energy_removed")
    )
    return either(
        all(value[n] > residual[n] for n in ("norm_change", "energy_change", "energy_removed")), told
    )


def _heads(summary: Summary, table: str) -> list[Mapping[str, Any]]:
    return at(summary.results, "heads", table, default=[])


@judge("edit")
def heads_signs(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    heads = _heads(summary, "heads")
    if not heads:
        return None
    up, down = sum(row["low"] > 0 for row in heads), sum(row["high"] < 0 for row in heads)
    found = f"of {len(heads)} heads {up} raise the loss, {down} lower it, the rest's interval holds 0"
    return Outcome(UNDERPOWERED if not up or not down else REPRODUCED, found)


@judge("edit")
def heads_joint(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rest = _heads(summary, "layers")[1:]
    if not rest:
        return None
    below = sum(row["joint"] < row["sum_of_sizes"] for row in rest)
    inside = sum(row["within_envelope"] for row in rest)
    found = f"of {len(rest)} layers {below} below the sum of sizes, {inside} within the heads' range"
    return either(below == inside == len(rest), found)


@judge("edit")
def heads_first(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    layers = _heads(summary, "layers")
    if len(layers) < 3:
        return None
    joint = [abs(row["joint"]) for row in layers]
    found = f"|joint| {joint[0]:.3f} nats in layer 0, at most {max(joint[1:]):.3f} after"
    return either(joint[0] > 2 * max(joint[1:]), found)
