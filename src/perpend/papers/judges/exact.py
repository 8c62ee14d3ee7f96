"""Judges of what needs no model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perpend.papers.judges import Outcome, Summary, either, judge
from perpend.papers.measures import at


@judge("simulate")
def simulated(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    counts = at(summary.results, "by_item", default={})
    if not all(item in counts for item in args["items"]):
        return None
    good = sum(counts[item]["reproduced"] for item in args["items"])
    total = sum(counts[item]["checks"] for item in args["items"])
    off = [
        f"{line['quantity']} ({line['paper']} printed, {line['measured']:.4g} measured)"
        for line in at(summary.results, "not_reproduced", default=[])
        if line["item"] in args["items"]
    ]
    found = f"{good} of {total} numbers and statements" + (f"; not {'; '.join(off)}" if off else "")
    return either(good == total, found)
