"""Judges of audits of signatures."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from perpend.papers.judges import (
    CLASSICAL,
    REFUTED,
    REPRODUCED,
    UNDERPOWERED,
    Outcome,
    Summary,
    drawn,
    either,
    equal,
    judge,
    told_interval,
)
from perpend.papers.measures import at

FEWEST_IN_ORDER = 4  # models whose order has a chance below 5 %: 1/4! is, 1/3! is not
EMERGENCE = 0.05  # a rise of the sink's share in training below this is no emergence


@judge("audit")
def aggregation(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    both = at(summary.results, "aggregation", default={})
    if not both.get("arithmetic"):
        return None
    gaps = {m: abs(both["arithmetic"][m] - both["aitchison"][m]) for m in CLASSICAL}
    return either(max(gaps.values()) <= args["most"], ", ".join(f"{m} {v:.3f}" for m, v in gaps.items()))


def _temperature(summary: Summary, metric: str) -> list[Mapping[str, Any]]:
    rows = at(summary.results, "temperature", default=[])
    return [row for row in rows if row.get("metric") == metric]


@judge("audit")
def temperature_content(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = _temperature(summary, "content")
    if not rows:
        return None
    same = all(row["identical"] for row in rows)
    worst = max(row["flips"] for row in rows)
    return either(same, f"{worst:.1%} of verdicts flip over {len(rows)} temperatures, prune sets "
               f"{'identical' if same else 'not identical'}")  # fmt: skip


@judge("audit")
def temperature_js(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = _temperature(summary, "jensen_shannon")
    if not rows:
        return None
    flips, kept = max(row["flips"] for row in rows), min(row["retention"] for row in rows)
    ends = drawn(summary, "temperature_worst/jensen_shannon/flips")
    told = told_interval(flips, *ends, form=".1%")
    found = f"up to {told} of verdicts flip, {1 - kept:.1%} of the prune set changes"
    return either(flips > 0 or kept < 1, found)


@judge("audit")
def sink_set(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    found = at(summary.results, "sink_set")
    if not found:
        return None
    ends = {name: drawn(summary, f"sink_set/{name}") for name in ("content", "jensen_shannon")}
    told = {name: told_interval(found[name], *ends[name], form=".3f") for name in ends}
    words = f"content {told['content']}, dropped-row JS {told['jensen_shannon']} of verdicts"
    (low, high), (js_low, js_high) = ends["content"], ends["jensen_shannon"]
    if None not in (low, high, js_low, js_high) and low <= js_high and js_low <= high:
        return Outcome(UNDERPOWERED, words)
    return either(found["content"] < found["jensen_shannon"], words)


@judge("audit")
def nested(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    found = at(summary.results, "sink_set")
    if not found:
        return None
    return either(found["violations"] == 0, f"{found['violations']} violations in {found['pairs']} pairs")


@judge("audit")
def hellinger_content(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    same = at(summary.results, "rivals", "hellinger_content_neighbours")
    sets = at(summary.results, "rivals", "hellinger_content_prune_sets", default={})
    if same is None or not sets:
        return None
    found = f"{same:.1%} of neighbours the same; prune sets' Jaccard at least {min(sets.values()):.2f}"
    return either(same == 1 and min(sets.values()) == 1, found)


@judge("audit")
def measured_witness(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    share = at(summary.results, "witness", "share")
    if share is None:
        return None
    triple = at(summary.results, "witness", "triple")
    names = ", ".join(f"{n} = {triple[n][0]}.{triple[n][1]}" for n in "pqr") if triple else "none"
    return either(share > 0, f"{share:.1%} of triples; sharpest {names} (layer.head)")


@judge("taxonomy", "audit")
def taxonomy(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    table = at(summary.results, "between_conventions") or at(
        summary.results, "taxonomy", "between_conventions", default={}
    )
    if summary.results.get("protocol") == "clark":
        return None
    records = {m: row if isinstance(row, Mapping) else {"mean": row} for m, row in table.items()}
    if not all(m in records for m in CLASSICAL):
        return None
    found = ", ".join(
        f"{m} {records[m]['mean']:.2f}"
        + (f" [{records[m]['low']:.2f}, {records[m]['high']:.2f}]" if "low" in records[m] else "")
        for m in CLASSICAL
    )
    content = records.get("content", {}).get("mean")
    found += "" if content is None else f"; content {content:.2f}"
    return either(all(records[m]["mean"] <= args["most"] for m in CLASSICAL), f"ARI {found}")


@judge("taxonomy")
def clark_block(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = [
        row for row in at(summary.results, "blocks", "sep", default=[]) if row["metric"] == "jensen_shannon"
    ]
    keep = [row["jaccard"] for row in rows if row["policy"] == "keep"]
    drop = [row["jaccard"] for row in rows if row["policy"] == "drop"]
    size = at(summary.results, "majority", "sep")
    if summary.results.get("protocol") == "clark" and size is not None and not rows:
        return Outcome(UNDERPOWERED, f"{size} heads with most of their signature on [SEP]: no block to find")
    if not keep or not drop:
        return None
    found = f"{size} heads on [SEP]; Jaccard {min(keep):.2f}–{max(keep):.2f} with the sink, "
    return either(min(keep) > max(drop), f"{found}{min(drop):.2f}–{max(drop):.2f} without")


@judge()
def prediction(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    scored = at(summary.results, "predictions", "scored", default=[])
    row = next((row for row in scored if row["name"] == args["prediction"]), None)
    if row is None:
        return None
    numbers = ", ".join(
        f"{key.replace('_', ' ')} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
        for key, value in row["numbers"].items()
        if isinstance(value, (int, float))
    )
    told = f"{row['outcome']} ({row['why'] or numbers})" if row["why"] or numbers else row["outcome"]
    if "different families" in str(row["numbers"].get("scope", "")):
        return Outcome(
            UNDERPOWERED, f"{told}; models of different families, and the claim is of one family's"
        )
    # Rising in some pairs and falling in others is no rise.
    status = {"confirmed": REPRODUCED, "refuted": REFUTED, "mixed": REFUTED}.get(row["outcome"])
    count = row["numbers"].get("models") or round((1 + math.sqrt(1 + 8 * row["numbers"].get("pairs", 0))) / 2)
    if status == REPRODUCED and 1 < count < FEWEST_IN_ORDER:
        return Outcome(UNDERPOWERED, f"{told}; {count} models fall into one order by chance in 1 of "
                       f"{math.factorial(count)}")  # fmt: skip
    return Outcome(status or UNDERPOWERED, told)


def _sink_ends(summary: Summary) -> tuple[float, float] | tuple[None, None]:
    """The mean sink share of the first checkpoint and of the one with the lowest entropy."""
    rows = {row["checkpoint"]: row for row in at(summary.results, "checkpoints", default=[])}
    ends = [at(rows, at(summary.results, "collapse", end), "sink_mass") for end in ("from", "to")]
    return (None, None) if None in ends else (ends[0], ends[1])


@judge("checkpoints")
def content_flat(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    collapse = at(summary.results, "collapse", default={})
    change = collapse.get("dispersion_change")
    if change is None:
        return None
    low, high = at(collapse, "intervals", "dispersion_change", default=(None, None))
    before, after = _sink_ends(summary)
    told = f"C_A⊥ changes by {change:+.1%}, H by {collapse['total']:+.3f} nats"
    told += "" if before is None else f", the sink's share from {before:.3f} to {after:.3f}"
    if before is not None and after - before < EMERGENCE:
        return Outcome(UNDERPOWERED, f"{told}: no sink emerges in this training")
    return Outcome(equal(change, low, high, args["most"]), told) if low is not None else either(
        abs(change) <= args["most"], told
    )  # fmt: skip


@judge("checkpoints")
def collapse_share(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    collapse = at(summary.results, "collapse", default={})
    share = collapse.get("share")
    if share is None:
        return None
    low, high = at(collapse, "intervals", "share", default=(share, share))
    status = REPRODUCED if low > args["least"] else REFUTED if high < args["least"] else UNDERPOWERED
    before, after = _sink_ends(summary)
    told = f"share {share:.1%} [{low:.1%}, {high:.1%}] of a fall of {collapse['total']:+.3f} nats"
    told += "" if before is None else f", the sink's share from {before:.3f} to {after:.3f}"
    if before is not None and after - before < EMERGENCE:
        return Outcome(UNDERPOWERED, f"{told}: no sink emerges in this training")
    return Outcome(status, told)
