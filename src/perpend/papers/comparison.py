"""Printed and measured numbers side by side, with the interval of the measured one.

    rows = compare(item, "gpt2", [run])          # one Comparison a quantity
    rows[0].published, rows[0].measured, rows[0].low, rows[0].high, rows[0].agrees

A model that the paper does not have is an extra row of the table: the same quantities, the range that the
paper prints over its models instead of a printed value, and no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from perpend.papers import Entry, items, published
from perpend.papers.measures import Measured, measure
from perpend.papers.protocol import Item

if TYPE_CHECKING:
    from perpend.runs.reader import FinishedRun

PROSE = ("prose", "prose-models")


@dataclass(frozen=True)
class Comparison:
    """One quantity in the paper's unit. `published` is None where the paper prints none of this model.

    `margin` is half a unit of the last digit plus three times the printed sd (none is printed: rounding
    alone). `relation`: "<" and ">" are bounds. `low`, `high`: the measured value's 95 % interval.
    """

    name: str
    unit: str
    published: float | None
    sd: float | None
    measured: float
    low: float | None
    high: float | None
    margin: float | None
    relation: str = "="
    range: tuple[float, float] | None = None
    sentence: str = ""

    @property
    def within(self) -> bool | None:
        """Whether |difference| ≤ margin (bounds: whether it holds); None without a printed value."""
        if self.published is None or self.margin is None:
            return None
        if not math.isfinite(self.measured):
            return False
        if self.relation == "<":
            return self.measured < self.published + self.margin
        if self.relation == ">":
            return self.measured > self.published - self.margin
        return abs(self.measured - self.published) <= self.margin

    @property
    def agrees(self) -> bool | None:
        """`within`, or the printed value, to rounding and its sd, lies in the measured interval."""
        if self.within is not False or self.low is None or self.high is None or self.relation != "=":
            return self.within
        return self.low - self.margin <= self.published <= self.high + self.margin


def entries_of(item: Item) -> list[Entry]:
    """Printed numbers of an item: its own file's, and those of the prose that belong to it."""
    known = items(item.paper)
    file = item.values or item.name
    own = list(published(item.paper, file).entries.values()) if file in known else []
    prose = [
        entry
        for passage in PROSE
        if passage in known and passage != item.name
        for entry in published(item.paper, passage).entries.values()
        if entry.more.get("item") == item.item
    ]
    return own + prose


def key_of(item: Item, entry: Entry) -> str:
    """The name that `measures` gives to what an entry prints."""
    if item.compare == "prune":
        quantity = entry.more["quantity"]
        if quantity in ("base", "cv"):
            return quantity
        return f"{round(100 * float(entry.more.get('sparsity', 0.2)))}/{quantity}"
    model = entry.more.get("model")
    return entry.name.removeprefix(f"{model}/")


def compare(item: Item, model: str, runs: Sequence[FinishedRun]) -> list[Comparison]:
    """Hold the runs of one model (by its name in the paper) against the item's printed numbers.

    Quantities that the paper prints of no model are listed too where the item carries no printed value.
    """
    if item.compare == "simulate":
        return _simulated(item, runs[-1])
    found = measure(item.compare, runs)
    if item.quantities:
        found = {name: one for name, one in found.items() if name.startswith(item.quantities)}
    entries = entries_of(item)
    own = {key_of(item, e): e for e in entries if e.more.get("model", model) == model}
    own = {key: entry for key, entry in own.items() if key in found}
    if own:
        return [_beside(key, entry, found[key]) for key, entry in own.items()]
    printed: dict[str, list[Entry]] = {}
    for entry in entries:
        printed.setdefault(key_of(item, entry), []).append(entry)
    wanted = [key for key in found if key in printed] or list(found)
    return [_extra(key, found[key], printed.get(key, [])) for key in wanted]


def _scaled(measured: Measured, unit: str) -> tuple[float, float | None, float | None]:
    factor = 100.0 if unit == "%" and measured.unit == "fraction" else 1.0
    return tuple(None if v is None else factor * v for v in (measured.value, measured.low, measured.high))


def _beside(key: str, entry: Entry, measured: Measured) -> Comparison:
    value, low, high = _scaled(measured, entry.unit)
    sd = float(entry.more["sd"]) if "sd" in entry.more else None
    margin = entry.half_digit + 3 * (sd or 0.0)
    unit, sentence = entry.unit, str(entry.more.get("sentence", ""))
    return Comparison(key, unit, entry.value, sd, value, low, high, margin, entry.relation, sentence=sentence)


def _extra(key: str, measured: Measured, entries: Sequence[Entry]) -> Comparison:
    unit = entries[0].unit if entries else measured.unit
    value, low, high = _scaled(measured, unit)
    ends = (min(e.value for e in entries), max(e.value for e in entries)) if entries else None
    return Comparison(key, unit, None, None, value, low, high, None, range=ends)


def _simulated(item: Item, run: FinishedRun) -> list[Comparison]:
    """The checks that `perpend simulate` made of this item, statements apart."""
    table = run.tables["comparison"]
    title = {"figure": "Figure", "table": "Table"}.get(item.name.partition("-")[0])
    named = table["item"].str.startswith(("Table", "Figure"))
    if item.name == "figure-1":  # it draws Table 1's witness
        chosen = table["item"] == "Table 1"
    elif title:
        chosen = table["item"] == f"{title} {item.name.partition('-')[2]}"
    else:
        chosen = ~named
    rows = []
    for line in table[chosen & (table["kind"] != "statement")].itertuples():
        words = str(line.paper).split()
        relation = words[0] if words[0] in ("<", ">") else "="
        printed = float(words[-1])
        # The check's own verdict, made a margin: it knows the sampling error of both sides.
        margin = abs(line.measured - printed) if line.reproduced else abs(line.measured - printed) - line.off
        ends = [None if v != v else float(v) for v in (line.low, line.high)]
        sd = None
        rows.append(
            Comparison(line.quantity, "", printed, sd, line.measured, *ends, margin + 1e-12, relation)
        )
    return rows
