"""Charts and tables as compact JSON: data once, by columns, at the digits a screen or a reader can use.

A page of 32 layers × 32 heads stays small because every table is stored by columns, equal tables are stored
once, and numbers that are not whole keep seven significant digits (the run folder's files keep all).
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from perpend import rounding
from perpend.report import theme
from perpend.report.charts import CHOSEN, PICKED
from perpend.runs import plain

if TYPE_CHECKING:
    import pandas as pd

DIGITS = 7
_ROLE_OF = {light: f"var(--{role})" for role, light in theme.LIGHT.items()}


class Store:
    """The page's data sets by name; adding equal data twice stores it once."""

    def __init__(self) -> None:
        self.columns: dict[str, dict[str, list[Any]]] = {}
        self.digits: dict[str, dict[str, int]] = {}  # of a table's columns, where not the usual number

    def add(self, columns: dict[str, list[Any]]) -> str:
        content = json.dumps(columns, ensure_ascii=False, allow_nan=False)
        name = f"d{hashlib.sha256(content.encode()).hexdigest()[:12]}"
        self.columns[name] = columns
        return name

    def table(self, table: pd.DataFrame) -> str:
        name = self.add({str(name): _values(table[name].tolist()) for name in table.columns})
        shown = {str(one): rounding.digits(table[one]) for one in table.columns}
        self.digits[name] = {one: count for one, count in shown.items() if count != rounding.LEAST}
        return name

    def rows(self, rows: list[dict[str, Any]]) -> str:
        names = list(dict.fromkeys(name for row in rows for name in row))
        return self.add({name: _values([row.get(name) for row in rows]) for name in names})

    def chart(self, chart: Any) -> dict[str, Any]:
        """An altair chart as {"chart": spec without data, "uses": names in this store}."""
        import altair as alt

        with alt.data_transformers.enable("default", max_rows=None, consolidate_datasets=True):
            spec = chart.to_dict() if hasattr(chart, "to_dict") else copy.deepcopy(dict(chart))
        spec.pop("config", None)
        spec.pop("$schema", None)
        names = {old: self.rows(rows) for old, rows in spec.pop("datasets", {}).items()}
        used: list[str] = []
        spec = _renamed(spec, names, used)
        return {"chart": spec, "uses": sorted(set(used)), "framed": _mentions(spec, PICKED)}


def script_json(value: Any) -> str:
    """JSON that can stand inside a script element: no '<' in it can open or close anything."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _renamed(spec: Any, names: Mapping[str, str], used: list[str]) -> Any:
    """The specification with the store's data names, and theme colours as the page's variables."""
    if isinstance(spec, dict):
        data = spec.get("data")
        if isinstance(data, dict) and data.get("name") in names:
            used.append(names[data["name"]])
            spec = {**spec, "data": {"name": names[data["name"]]}}
        elif isinstance(data, dict) and data.get("name") == CHOSEN:
            spec = {**spec, "data": {"name": CHOSEN}}
        return {key: _renamed(value, names, used) for key, value in spec.items()}
    if isinstance(spec, list):
        return [_renamed(value, names, used) for value in spec]
    return _ROLE_OF.get(spec, spec) if isinstance(spec, str) else spec


def _mentions(spec: Any, name: str) -> bool:
    if isinstance(spec, dict):
        return spec.get("name") == name or any(_mentions(value, name) for value in spec.values())
    return isinstance(spec, list) and any(_mentions(value, name) for value in spec)


def _values(values: list[Any]) -> list[Any]:
    return [_value(value) for value in values]


def _value(value: Any) -> Any:
    if isinstance(value, float):
        return _short(value)
    if value is None or isinstance(value, (str, int)):
        return value
    if type(value).__name__ in ("NAType", "NaTType"):
        return None
    return _deep(plain(value))


def _deep(value: Any) -> Any:
    if isinstance(value, list):
        return [_deep(item) for item in value]
    return _short(value) if isinstance(value, float) else value


def _short(value: float) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = value if value.is_integer() else float(f"{value:.{DIGITS}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded
