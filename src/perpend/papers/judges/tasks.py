"""Judges of tasks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perpend.papers.judges import REFUTED, REPRODUCED, UNDERPOWERED, Outcome, Summary, every, judge, sided
from perpend.papers.measures import at


def _paired(summary: Summary, edit: str) -> list[tuple[str, str, Mapping[str, Any]]]:
    tasks = at(summary.results, "comparison", edit, "tasks", default={})
    return [(task, name, row) for task, rows in tasks.items() for name, row in rows.items()]


@judge("evaluate")
def tasks_equal(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = [(t, n, r) for t, n, r in _paired(summary, args["edit"]) if r.get("unit") != "nats"]
    if args.get("long"):  # tasks of a stated length are the long-context ones
        rows = [(t, n, r) for t, n, r in rows if "@" in t]
    if not rows:
        return None
    statuses = {"equivalent": REPRODUCED, "different": REFUTED}
    told = "; ".join(
        f"{task} {100 * r['difference']:+.1f} points, 90 % "
        f"[{100 * r['low90']:+.1f}, {100 * r['high90']:+.1f}]"
        for task, _, r in rows
    )
    floor = [task for task, _, r in rows if r.get("base_at_floor")]
    told += f"; unedited no better than chance on {', '.join(floor)}" if floor else ""
    judged = [
        UNDERPOWERED if r.get("base_at_floor") else statuses.get(r.get("verdict"), UNDERPOWERED)
        for _, _, r in rows
    ]
    return Outcome(every(judged), told)


@judge("evaluate")
def tasks_fall(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = [(t, r) for t, n, r in _paired(summary, args["edit"]) if r.get("unit") != "nats"]
    if not rows:
        return None
    told = "; ".join(
        f"{task} {100 * r['difference']:+.1f} points [{100 * r['low']:+.1f}, {100 * r['high']:+.1f}]"
        for task, r in rows
    )
    return Outcome(every([sided(r["low"], r["high"], below=True) for _, r in rows]), told)
