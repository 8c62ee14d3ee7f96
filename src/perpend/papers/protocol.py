"""Every table and figure of both papers: the question it answers, what it needs, the command that makes it.

A list of data (items.json). An item names a verb with its options, `{model}` standing for each of its
models, or says why there is none; `published` says whether the paper's text carries its values, which then
lie in a file of that name. `compare` names how a run is held against them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from perpend.errors import unknown_name
from perpend.papers import Entry, published


@dataclass(frozen=True)
class Item:
    """One table or figure. `models`: short names or folders; `command`: a verb and its options, or None."""

    item: str
    question: str
    needs: str
    published: bool
    command: tuple[str, ...] | None = None
    models: tuple[str, ...] = ()
    compare: str | None = None
    why: str = ""

    def commands(self, models: Sequence[str] | None = None) -> list[tuple[str | None, list[str]]]:
        """(model, words of the command) for each model asked for, the item's own ones by default."""
        if self.command is None:
            return []
        if "{model}" not in self.command:
            return [(None, list(self.command))]
        chosen = models or self.models
        return [(model, [word.replace("{model}", model) for word in self.command]) for model in chosen]

    @property
    def here(self) -> str:
        """Whether any machine can make it, in a word or two."""
        if self.command is None:
            return "no"
        return "yes" if self.needs == "nothing" else f"with {self.needs}"


@cache
def catalog() -> dict[str, Item]:
    """All items by name, in the papers' order."""
    raw = json.loads((resources.files("perpend.papers") / "items.json").read_text("utf-8"))
    found = {}
    for record in raw:
        for name in ("command", "models"):
            if record.get(name) is not None:
                record[name] = tuple(record[name])
        found[record["item"]] = Item(**record)
    return found


def find(name: str) -> Item:
    """The item of that name; InputError with near ones otherwise."""
    known = catalog()
    if name not in known:
        raise unknown_name("table or figure", name, known)
    return known[name]


@dataclass(frozen=True)
class Comparison:
    """One published number beside the measured one, in the paper's unit. `within`: |difference| ≤ `margin`.

    `margin` is half a unit of the last digit plus three times the printed sd (none is printed: rounding
    alone).
    """

    name: str
    unit: str
    published: float
    sd: float | None
    measured: float
    margin: float

    @property
    def within(self) -> bool:
        return math.isfinite(self.measured) and abs(self.measured - self.published) <= self.margin


def compare(item: Item, model: str, results: Mapping[str, Any]) -> list[Comparison]:
    """Hold a run's results against the item's published numbers of that model; empty where there are none."""
    if item.compare is None:
        return []
    paper, name = item.item.split("/", 1)
    rows = []
    for entry in published(paper, name).entries.values():
        if entry.more.get("model") != model:
            continue
        measured = _MEASURES[item.compare](entry, results)
        if measured is None:
            continue
        scale = 100.0 if entry.unit == "%" else 1.0
        sd = float(entry.more["sd"]) if "sd" in entry.more else None
        margin = entry.half_digit + 3 * (sd or 0.0)
        rows.append(Comparison(entry.name, entry.unit, entry.value, sd, scale * measured, margin))
    return rows


def _survey(entry: Entry, results: Mapping[str, Any]) -> float | None:
    quantity = entry.more["quantity"]
    if quantity == "sink_row":
        return results["sink"]["row_mass"]
    if quantity == "sink_signature":
        return results["sink"]["signature_mass"]
    if quantity == "collapse_disagreement":
        return results["collapse"]["disagreement"]
    return results["reversal"][quantity]["mean"]


def _prune(entry: Entry, results: Mapping[str, Any]) -> float | None:
    quantity = entry.more["quantity"]
    if quantity == "base":
        return results["base"]["perplexity"]
    sparsity = float(entry.more.get("sparsity", 0.2))
    for cell in results["cells"]:
        if cell["criterion"] == quantity and math.isclose(cell["sparsity"], sparsity):
            return cell["perplexity"]
    return None


_MEASURES: dict[str, Callable[[Entry, Mapping[str, Any]], float | None]] = {
    "survey": _survey,
    "prune": _prune,
}
