"""Pieces that the charts share: fields, tooltips, colour scales, reference lines.

Nothing in a table becomes markup or an expression: a column's name is escaped where Vega-Lite reads a path.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt
import pandas as pd

from perpend.errors import InputError
from perpend.report import theme


def field(name: str) -> str:
    """A column's name as a path of one step: dots, brackets, quotes and colons stay part of the name."""
    return str(name).translate({ord(c): f"\\{c}" for c in "\\.[]:'\""})


def words(name: Any) -> str:
    return str(name).replace("_", " ")


def need(table: pd.DataFrame, *names: str | None) -> None:
    """Refuses a column that is not there; None stands for a column that was not asked for."""
    missing = [name for name in names if name is not None and name not in table.columns]
    if missing:
        known = ", ".join(map(str, table.columns))
        raise InputError(f"the table has no column {missing[0]!r}; it has {known}")


def tip(name: str, form: str | None = None, title: str | None = None) -> alt.Tooltip:
    """One line of a tooltip; `form` for numbers."""
    settings = {"format": form, "type": "quantitative"} if form else {"type": "nominal"}
    return alt.Tooltip(field(name), title=title or words(name), **settings)


def tips_of(table: pd.DataFrame, names: Sequence[str | None], form: str) -> list[alt.Tooltip]:
    """A line for each column, numbers with a fraction formatted."""
    wanted = [name for name in names if name is not None]
    return [tip(name, form if table[name].dtype.kind == "f" else None) for name in wanted]


@dataclass(frozen=True)
class Series:
    """How the series of a chart are told apart: by colour, and on paper by shape or dash.

    colour  of every mark; one colour where there are no series
    shape   of points, where lines have them, else nothing
    dash    of lines without points
    strokes names of the lines of one dash, and the dash, where lines have points: solid for the first six, so
            that the legend, which shows the points, is not dashed with them
    scale   the colours, or None without series and further names
    """

    colour: dict[str, Any]
    shape: dict[str, Any]
    dash: dict[str, Any]
    scale: alt.Scale | None
    strokes: tuple[tuple[list[Any], list[int]], ...] = ()


def series_of(
    table: pd.DataFrame,
    series: str | None,
    also: Mapping[str, str] | None = None,
    *,
    lines: bool = False,
    points: bool = False,
    names: Sequence[Any] | None = None,
) -> Series:
    """The encodings of a series; the colour scale names `also` (name -> colour) as well.

    `names` are all names of the series in order, where the table need not have each.
    """
    extra, one = dict(also or {}), {"color": alt.value(theme.LIGHT["content"])}
    if series is None:
        scale = alt.Scale(domain=list(extra), range=list(extra.values())) if extra else None
        return Series(one, {}, {}, scale)
    names = list(dict.fromkeys([*(names or []), *table[series]]))
    count = range(len(names))
    colours = [theme.PALETTE[i % len(theme.PALETTE)] for i in count]
    scale = alt.Scale(domain=[*names, *extra], range=[*colours, *extra.values()])
    told: dict[str, Any] = {"field": field(series), "type": "nominal"}
    key = legend([*names, *extra], lines=lines and not points)
    shape: dict[str, Any] = {}
    dash: dict[str, Any] = {}
    if points and len(names) > 1:
        shapes = alt.Scale(domain=names, range=[theme.SHAPES[i % len(theme.SHAPES)] for i in count])
        shape = {"shape": alt.Shape(**told, title=None, scale=shapes, legend=key)}
    strokes: tuple[tuple[list[Any], list[int]], ...] = ()
    if lines and points:
        sixes = [names[i : i + 6] for i in range(0, len(names), 6)]
        strokes = tuple((six, theme.DASHES[i % len(theme.DASHES)]) for i, six in enumerate(sixes))
    elif lines and len(names) > 1:
        turns = [theme.DASHES[(i + i // len(theme.PALETTE)) % len(theme.DASHES)] for i in count]
        dash = {
            "strokeDash": alt.StrokeDash(
                **told, title=None, scale=alt.Scale(domain=names, range=turns), legend=key
            )
        }
    colour = {"color": alt.Color(**told, title=None, scale=scale, legend=key)}
    return Series(colour, shape, dash, scale, strokes)


def legend(names: Sequence[Any], lines: bool = False) -> alt.Legend:
    """A legend above the chart, in as many columns as fit; a stroke a name for lines, else a mark."""
    each = [(48 if lines else 32) + 6.4 * len(str(name)) for name in names] or [1.0]
    some = f"max(1, floor(width / {max(each):.0f}))"
    columns = alt.ExprRef(f"width > {sum(each):.0f} ? {len(each)} : {some}")
    kind = {"symbolType": "stroke", "symbolStrokeWidth": 2.5, "symbolSize": 500} if lines else {}
    return alt.Legend(columns=columns, symbolOpacity=1, **kind)


def ramp(
    values: pd.Series, domain: tuple[float, float] | None, middle: float | None, log: bool = False
) -> alt.Scale:
    """One-sided colours, or two-sided ones centred at `middle`; `log` for one-sided ones in logarithms."""
    if middle is None:
        kind = {"type": "log"} if log else {}
        return alt.Scale(range=theme.SEQUENTIAL, **kind, **({"domain": list(domain)} if domain else {}))
    finite = values.dropna()
    least, most = domain or ((finite.min(), finite.max()) if len(finite) else (middle, middle))
    reach = max(float(most) - middle, middle - float(least)) or 1.0
    return alt.Scale(range=theme.DIVERGING, domain=[middle - reach, middle + reach])


def cell_axis() -> alt.Axis:
    """Labels that never overlap, horizontal, without ticks and lines: cells speak for themselves."""
    return alt.Axis(labelOverlap="parity", labelAngle=0, ticks=False, domain=False, labelSeparation=5)


def references(heights: Mapping[str, float] | None, vertical: bool = False) -> list[Any]:
    """Dashed lines with a name at their end: name -> value."""
    layers: list[Any] = []
    for name, value in (heights or {}).items():
        at = {"x" if vertical else "y": alt.datum(float(value))}
        base = alt.Chart(pd.DataFrame([{"name": name, "value": float(value)}]))
        line = base.mark_rule(strokeDash=[5, 4], strokeWidth=1.2, color=theme.LIGHT["soft"])
        layers.append(line.encode(**at, tooltip=[tip("name", title="reference"), tip("value", ".4g")]))
        place: dict[str, Any] = (
            {"align": "left", "dx": -3, "baseline": "bottom"}
            if vertical
            else {"align": "right", "dx": -2, "dy": -7}
        )
        label = base.mark_text(fontSize=11, color=theme.LIGHT["soft"], **place)
        far = {"y": alt.value(-2)} if vertical else {"x": alt.value("width")}
        layers.append(label.encode(**at, **far, text=alt.Text("name:N")))
    return layers
