"""What the two papers print, as data: one JSON file a table, figure or passage, in a folder a paper.

    published("attention", "table-1")  →  Published(title, entries, notes)

An entry is a number as printed, with the place and the sentence it stands in; nothing here is computed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from typing import Any

from perpend.errors import unknown_name


@dataclass(frozen=True)
class Entry:
    """A printed number: its name, the characters printed, and how it was obtained.

    kind: "exact" (a closed form, right to its last digit), "sampled" (Monte Carlo), or "model" (measured on a
    pretrained model). trials: how many draws a sampled number rests on. relation: "=" or, for bounds in
    words, "<" and ">". place: where in the paper, by section or item.
    """

    name: str
    printed: str
    kind: str = "exact"
    unit: str = ""
    trials: int | None = None
    relation: str = "="
    place: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float:
        """The number that the characters say."""
        return float(self.printed)

    @property
    def half_digit(self) -> float:
        """Half a unit of the last printed digit: what rounding alone allows."""
        decimals = re.fullmatch(r"[-+]?\d+(?:\.(\d*))?", self.printed)
        return 0.5 * math.pow(10, -len(decimals.group(1) or "")) if decimals else 0.0


@dataclass(frozen=True)
class Published:
    """One table, figure or passage of a paper."""

    paper: str
    item: str
    title: str
    sentence: str
    entries: Mapping[str, Entry]

    def __getitem__(self, name: str) -> Entry:
        if name not in self.entries:
            raise unknown_name(f"entry of {self.item}", name, self.entries)
        return self.entries[name]


def items(paper: str) -> list[str]:
    """The items of a paper that have a file, such as table-1 or figure-3."""
    folder = resources.files(__name__) / paper
    return sorted(file.name.removesuffix(".json") for file in folder.iterdir() if file.name.endswith(".json"))


@cache
def published(paper: str, item: str) -> Published:
    """The published numbers of one item. InputError with the known items if there is none of that name."""
    known = items(paper)
    if item not in known:
        raise unknown_name(f"item of the {paper} paper", item, known)
    document = json.loads((resources.files(__name__) / paper / f"{item}.json").read_text("utf-8"))
    shared = document.get("shared", {})
    names = Entry.__dataclass_fields__.keys() - {"more"}
    entries = {}
    for raw in document["entries"]:
        facts = {**shared, **raw}
        more = {key: value for key, value in facts.items() if key not in names}
        entries[facts["name"]] = Entry(**{k: v for k, v in facts.items() if k in names}, more=more)
    return Published(paper, item, document["title"], document["sentence"], entries)
