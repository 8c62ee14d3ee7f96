"""How numbers are shown in a table, on the terminal, in a notebook and in a report: one rule for all.

    enough = digits(frame["loss"])              # of a column: as many as tell its rows apart
    [cell(value, enough) for value in frame["loss"]]

Files and a page's own data keep the numbers; this is how they are read. The report's script follows `cell`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

LEAST, MOST = 4, 7  # significant digits
WHOLE = 1e15  # from here on a float's last digits mean nothing


def digits(column: pd.Series, least: int = LEAST) -> int:
    """Significant digits that show how a column's numbers differ: its spread to two, within bounds."""
    if column.dtype.kind != "f":
        return least
    sizes = column[column.abs() < math.inf]
    span = float(sizes.max() - sizes.min()) if len(sizes) > 1 else 0.0
    if span <= 0:
        return least
    needed = math.floor(math.log10(float(sizes.abs().max()))) - math.floor(math.log10(span)) + 2
    return min(max(least, needed), MOST)


def cell(value: Any, digits: int = LEAST) -> str:
    """A value at so many significant digits; whole numbers and the whole part of large ones stay whole."""
    if value is None or value != value:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if not isinstance(value, float):
        return str(value)
    if abs(value) < WHOLE and (value.is_integer() or abs(value) >= 10 ** (digits - 1)):
        return str(round(value))
    return f"{value:.{digits}g}"
