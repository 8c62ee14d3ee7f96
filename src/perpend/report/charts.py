"""The recurring kinds of chart, as altair charts that resize, show numbers on hover and need no styling.

    charts.heat(heads, "sink_mass")                        layers × heads
    charts.profile(layers, "total", low="low", high="high") a line along layers or steps, with its band
    charts.bars(rates, "mean", by="metric", low=…, high=…)  bars with intervals
    charts.scatter(models, "sink_mass", "rate", curve=…)    points over a curve
    charts.surface(grid, "loss", x="parallel", y="perpendicular")
    charts.dendrogram(linkage, names, groups=layers)

Every helper takes a tidy DataFrame and column names. Colours come from the theme; axis titles default to the
column names.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from perpend.report import theme
from perpend.report.encodings import (
    cell_axis,
    field,
    legend,
    need,
    ramp,
    references,
    series_of,
    tip,
    tips_of,
    words,
)
from perpend.report.labels import LABEL, named
from perpend.report.trees import dendrogram, tree

__all__ = [
    "CHOSEN", "PICKED", "bars", "chosen", "chosen_profile", "dendrogram", "heat", "one_scale", "profile",
    "scatter", "surface", "themed", "tree",
]  # fmt: skip

FEW = 12  # places on a line up to which each is marked, asked for or not
PICKED, CHOSEN = "picked", "chosen"  # data sets that the page fills: the marked cell, the chosen row's arrays


def heat(
    table: pd.DataFrame,
    value: str,
    *,
    x: str = "layer",
    y: str = "head",
    label: str | None = None,
    domain: tuple[float, float] | None = None,
    middle: float | None = None,
    form: str = ".3f",
    tooltip: Sequence[str] = (),
    log: bool = False,
) -> alt.LayerChart:
    """A map of cells, layers × heads by default, with hover and a frame around the chosen cell.

    `middle` switches to a two-sided ramp centred there, `log` to logarithms of values above 0. Cells without
    a value are left grey.
    """
    style: dict[str, Any] = {"descending": False, "row": 22, "most": 360, "log": log}
    return _map(table, value, x, y, label, domain, middle, form, tooltip, **style)


def surface(
    table: pd.DataFrame,
    value: str,
    *,
    x: str,
    y: str,
    label: str | None = None,
    domain: tuple[float, float] | None = None,
    middle: float | None = None,
    form: str = ".3f",
    tooltip: Sequence[str] = (),
    mark: Mapping[str, float] | None = None,
) -> alt.LayerChart:
    """A value over a grid of two numbers; `mark` ({x: …, y: …}) rings one cell, as the unedited model."""
    chart = _map(table, value, x, y, label, domain, middle, form, tooltip, descending=True, row=30, most=430)
    if mark is None:
        return chart
    need(pd.DataFrame([mark]), x, y)
    at = alt.Chart(pd.DataFrame([mark])).encode(**_place(x, y, descending=True))
    halo = at.mark_point(size=170, filled=False, strokeWidth=5, opacity=1, color=theme.LIGHT["paper"])
    ring = at.mark_point(size=170, filled=False, strokeWidth=2, opacity=1, color=theme.LIGHT["ink"])
    return alt.layer(*chart.layer, halo, ring).properties(width="container", height=chart.height)


def profile(
    table: pd.DataFrame,
    value: str | Mapping[str, str],
    *,
    x: str = "layer",
    series: str | None = None,
    low: str | None = None,
    high: str | None = None,
    label: str | None = None,
    x_label: str | None = None,
    marks: str | None = None,
    reference: Mapping[str, float] | None = None,
    form: str = ".3f",
    log_x: bool = False,
    log_y: bool = False,
    zero: bool = False,
    points: bool = True,
) -> alt.LayerChart:
    """Lines over layers (or steps), one a series, with a band from `low` to `high`.

    `value` is a column, or a mapping column -> name for several columns drawn as series. `marks` is a
    boolean column: rows where it holds get an open ring. `reference` draws lines, name -> height.
    """
    if isinstance(value, Mapping):
        need(table, x, low, high, marks, *value)
        shared = table[[name for name in dict.fromkeys((x, low, high, marks)) if name]]
        parts = [shared.assign(series=name, value=table[column]) for column, name in value.items()]
        table = pd.concat(parts, ignore_index=True)
        value, series, label = "value", "series", label or "value"
    need(table, value, x, series, low, high, marks)
    title = label or words(value)
    named = f"{title} (log scale)" if log_y else title
    up = alt.Y(
        field(value),
        type="quantitative",
        title=named,
        scale=alt.Scale(type="log", nice=False, padding=6) if log_y else alt.Scale(zero=zero),
        axis=alt.Axis(tickCount=6),
    )
    told = series_of(table, series, lines=True, points=points)
    base = alt.Chart(table).encode(x=_along(table[x], x, x_label, log_x), **told.colour)
    tips = [*tips_of(table, [x, series], form), tip(value, form, title), *tips_of(table, [low, high], form)]
    layers: list[Any] = []
    if low and high:
        edges = {"y": alt.Y(field(low), type="quantitative", title=named), "y2": alt.Y2(field(high))}
        layers.append(base.mark_area(opacity=0.18, line=False).encode(**edges))
    if len(told.strokes) < 2:
        layers.append(base.mark_line(clip=True).encode(y=up, **told.dash))
    else:
        for names, dash in told.strokes:
            some = base.transform_filter(alt.FieldOneOfPredicate(field=field(str(series)), oneOf=names))
            layers.append(some.mark_line(clip=True, strokeDash=dash).encode(y=up))
    if points:
        layers.append(base.mark_point(size=36, opacity=1).encode(y=up, tooltip=tips, **told.shape))
    elif (table.groupby(series).size().max() if series else len(table)) <= FEW:
        # a line of one point has no length, and would not be there at all
        layers.append(base.mark_point(size=36, opacity=1).encode(y=up, tooltip=tips))
    if marks and table[marks].any():
        rings = base.transform_filter(alt.FieldEqualPredicate(field=field(marks), equal=True))
        layers.append(rings.mark_point(size=190, filled=False, strokeWidth=1.8).encode(y=up, tooltip=tips))
    return alt.layer(*layers, *references(reference)).properties(width="container", height=300)


def bars(
    table: pd.DataFrame,
    value: str,
    *,
    by: str,
    low: str | None = None,
    high: str | None = None,
    series: str | None = None,
    label: str | None = None,
    ticks: Mapping[str, str] | None = None,
    reference: Mapping[str, float] | None = None,
    form: str = ".3f",
    percent: bool = False,
    grouped: bool = True,
    kinds: Sequence[Any] | None = None,
) -> alt.LayerChart:
    """Horizontal bars in the table's order, with intervals; `ticks` (column -> name) adds marks to them.

    The bars of a `series` lie side by side in each row; without `grouped` a row has one bar, and the series
    is its colour alone. `kinds` are all names of the series, where charts beside one another share them.
    """
    ticks = dict(ticks or {})
    need(table, value, by, low, high, series, *ticks)
    title, form = label or words(value), ".1%" if percent else form
    order = list(dict.fromkeys(table[by]))
    names = alt.Axis(labelLimit=260)
    place: dict[str, Any] = {"y": alt.Y(field(by), type="nominal", sort=order, title=None, axis=names)}
    beside = series is not None and grouped
    if beside:
        # the gap between bars is the scale's: a bar narrower than its band would not lie in the middle of it
        gaps = alt.Scale(paddingInner=0.25, paddingOuter=0.1)
        sides = list(dict.fromkeys(table[series]))
        place["yOffset"] = alt.YOffset(field(series), type="nominal", sort=sides, scale=gaps)
    axis = alt.Axis(grid=True, domain=False, ticks=False, tickCount=6, **({"format": "%"} if percent else {}))
    # not the ink of the intervals, which they often lie on
    roles = ("sink", "third", "ninth") if series is None else ("eighth", "ninth", "tenth")
    marks = dict(zip(ticks.values(), (theme.LIGHT[role] for role in roles)))
    told = series_of(table, series, marks, names=kinds)
    tips = [*tips_of(table, [by, series], form), tip(value, form, title)]
    tips += [*tips_of(table, [low, high], form), *(tip(column, form, name) for column, name in ticks.items())]
    base = alt.Chart(table).encode(**place, tooltip=tips)
    across = alt.X(field(value), type="quantitative", title=title, axis=axis)
    solid = base.mark_bar(cornerRadiusEnd=2, height={"band": 1 if beside else 0.7})
    layers: list[Any] = [solid.encode(x=across, **told.colour)]
    if low and high:
        ends: dict[str, Any] = {"x": alt.X(field(low), type="quantitative", title=title)}
        ends["x2"] = alt.X2(field(high))
        if beside:
            ends["yOffset"] = place["yOffset"].copy()
            ends["yOffset"].bandPosition = 0.5
        span = base.mark_rule(strokeWidth=1.6, color=theme.LIGHT["ink"])
        layers.append(span.encode(**ends))
    if ticks:
        kept = [name for name in (by, series) if name]
        long = table.melt(id_vars=kept, value_vars=list(ticks), var_name="mark", value_name="at")
        long["mark"] = long["mark"].map(ticks)
        tick = alt.Chart(long).mark_tick(thickness=3, size=20, opacity=1)
        named = alt.Color(
            "mark:N", scale=told.scale, title=None, legend=legend([*table.get(series, []), *marks])
        )
        lines = [*tips_of(long, [by, series, "mark"], form), tip("at", form, title)]
        layers.append(tick.encode(**place, x=alt.X("at:Q", title=title), color=named, tooltip=lines))
    rows = len(order) * (table[series].nunique() if beside else 1)
    height = max(80, min(900, 27 * rows + 14))
    return alt.layer(*layers, *references(reference, vertical=True)).properties(
        width="container", height=height
    )


def scatter(
    table: pd.DataFrame,
    x: str,
    y: str,
    *,
    curve: pd.DataFrame | None = None,
    curve_low: str | None = None,
    curve_high: str | None = None,
    name: str | None = None,
    series: str | None = None,
    size: str | None = None,
    x_label: str | None = None,
    y_label: str | None = None,
    form: str = ".3f",
    tooltip: Sequence[str] = (),
    diagonal: bool = False,
    log_x: bool = False,
    log_y: bool = False,
) -> alt.LayerChart:
    """Points, named where `name` says so, over a curve (a table with the same two columns) and its band.

    Names that would cross a point, the curve or one another are left to the tooltip; the rarer series keeps
    its names first.
    """
    need(table, x, y, name, series, size, *tooltip)

    def axis(kind: Any, column: str, title: str | None, log: bool) -> Any:
        scale = alt.Scale(type="log") if log else alt.Scale(zero=False)
        ticks = alt.Axis(tickCount=7)
        return kind(field(column), type="quantitative", title=title or words(column), scale=scale, axis=ticks)

    across, up = axis(alt.X, x, x_label, log_x), axis(alt.Y, y, y_label, log_y)
    layers: list[Any] = []
    if curve is not None:
        need(curve, x, y, curve_low, curve_high)
        under = alt.Chart(curve).encode(x=across)
        if curve_low and curve_high:
            edges = {"y": alt.Y(field(curve_low), type="quantitative"), "y2": alt.Y2(field(curve_high))}
            layers.append(under.mark_area(color=theme.LIGHT["soft"], opacity=0.2).encode(**edges))
        layers.append(under.mark_line(color=theme.LIGHT["soft"], strokeWidth=1.6).encode(y=up))
    if diagonal:
        ends = [float(min(table[x].min(), table[y].min())), float(max(table[x].max(), table[y].max()))]
        line = alt.Chart(pd.DataFrame({x: ends, y: ends})).encode(x=across, y=up)
        layers.append(line.mark_line(strokeDash=[4, 4], strokeWidth=1, color=theme.LIGHT["soft"]))
    tips = tips_of(table, [name, series, x, y, size, *tooltip], form)
    sizes = {"size": alt.Size(field(size), type="quantitative", title=words(size))} if size else {}
    told = series_of(table, series, points=True)
    base = alt.Chart(table).encode(x=across, y=up, **told.colour, **told.shape)
    dots = base.mark_point(size=alt.Undefined if size else 58, opacity=0.85)
    layers.append(dots.encode(tooltip=tips, **sizes))
    if name:
        shown = named(table, x, y, name, series, curve, [c for c, log in ((x, log_x), (y, log_y)) if log])
        words_of = alt.Chart(shown).encode(x=across, y=up, text=alt.Text(field(name), type="nominal"))
        align, dx, dy = (alt.ExprRef(f"datum.{column}") for column in LABEL)
        layers.append(words_of.mark_text(align=align, dx=dx, dy=dy, fontSize=11, color=theme.LIGHT["soft"]))
    return alt.layer(*layers).properties(width="container", height=340)


def chosen() -> alt.InlineData:
    """The data of a detail chart: the chosen row's lists, as columns beside `index`."""
    return alt.InlineData(values=[], name=CHOSEN)


def chosen_profile(
    value: str | Mapping[str, str], *, label: str | None = None, x_label: str = "key", form: str = ".4f"
) -> Any:
    """Bars of one list, or lines of several (column -> name), over the place in the list; for a `Detail`."""
    size: dict[str, Any] = {"width": "container", "height": 200}
    if isinstance(value, str):
        tips = [tip("index", title=x_label), tip(value, form, label)]
        columns = alt.Chart(chosen()).mark_bar(width={"band": 0.8}, color=theme.LIGHT["content"])
        up = alt.Y(field(value), type="quantitative", title=label or words(value))
        across = alt.X("index:O", title=x_label, axis=cell_axis())
        return columns.encode(x=across, y=up, tooltip=tips).properties(**size)
    folded = alt.Chart(chosen()).transform_fold([field(name) for name in value], as_=["series", "value"])
    scale = alt.Scale(domain=list(value), range=theme.PALETTE[: len(value)])
    names = legend(list(value.values()), lines=True)
    names.labelExpr = f"{json.dumps(dict(value))}[datum.label]"
    colour = alt.Color("series:N", scale=scale, title=None, legend=names)
    up = alt.Y("value:Q", title=label or "value")
    tips = [tip("index", title=x_label), tip("series"), tip("value", form, label)]
    across = alt.X("index:Q", title=x_label, scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1))
    line = folded.mark_line(point={"size": 22}, strokeWidth=1.4)
    return line.encode(x=across, y=up, color=colour, tooltip=tips).properties(**size)


def themed(chart: Any) -> Any:
    """The chart with perpend's type and colours, for notebooks and files; 'container' widths become fixed."""
    if getattr(chart, "width", None) == "container":
        chart = chart.properties(width=640)
    return chart.configure(**{**theme.config(), "background": theme.LIGHT["paper"]})


def one_scale(maps: Sequence[Any]) -> list[Any]:
    """The same charts, with one scale of colours for the maps of one quantity among them: the widest."""
    found = [chart.copy(deep=["layer"]) if isinstance(chart, alt.LayerChart) else chart for chart in maps]
    alike: dict[tuple[str, Any], list[tuple[alt.Color, list[float]]]] = {}
    for chart in found:
        for layer in chart.layer if isinstance(chart, alt.LayerChart) else ():
            colour = getattr(layer.encoding, "color", alt.Undefined)
            given = colour.to_dict() if isinstance(colour, alt.Color) else {}
            if given.get("type") != "quantitative" or not isinstance(layer.data, pd.DataFrame):
                continue
            values = layer.data[given["field"]] if given["field"] in layer.data else pd.Series(dtype=float)
            ends = given["scale"].get("domain") or [values.min(), values.max()]
            if ends[0] == ends[0]:  # a map without a value has no ends
                key = (str(given.get("title")), str(given["scale"]["range"]))
                alike.setdefault(key, []).append((colour, [float(end) for end in ends]))
    for same in alike.values():
        low, high = min(ends[0] for _, ends in same), max(ends[1] for _, ends in same)
        for colour, _ in same:
            colour["scale"] = colour["scale"].copy()
            colour["scale"]["domain"] = [low, high]
    return found


def _map(
    table: pd.DataFrame,
    value: str,
    x: str,
    y: str,
    label: str | None,
    domain: tuple[float, float] | None,
    middle: float | None,
    form: str,
    tooltip: Sequence[str],
    *,
    descending: bool,
    row: int,
    most: int,
    log: bool = False,
) -> alt.LayerChart:
    need(table, value, x, y, *tooltip)
    title = label or words(value)
    place, paper = _place(x, y, descending), theme.LIGHT["paper"]
    tips = [tip(x), tip(y), tip(value, form, title), *tips_of(table, tooltip, form)]
    base = alt.Chart(table).encode(**place, tooltip=tips)
    empty = base.mark_rect(color=theme.LIGHT["rule"], stroke=paper, strokeWidth=1)
    cells = base.transform_filter(alt.FieldValidPredicate(field=field(value), valid=True)).mark_rect(
        cursor="pointer", stroke=paper, strokeWidth=1
    )
    scale = ramp(table[value], domain, middle, log)
    key = alt.Legend(format=".3~g") if log else alt.Undefined
    colour = alt.Color(field(value), type="quantitative", scale=scale, title=title, legend=key)
    picked = alt.Chart(alt.InlineData(values=[], name=PICKED)).encode(**place)
    halo = picked.mark_rect(fill=None, stroke=paper, strokeWidth=5)
    frame = picked.mark_rect(fill=None, stroke=theme.LIGHT["ink"], strokeWidth=2)
    height = max(90, min(most, max(1, table[y].nunique()) * row))
    layers = alt.layer(empty, cells.encode(color=colour), halo, frame)
    return layers.properties(width="container", height=height)


def _place(x: str, y: str, descending: bool) -> dict[str, Any]:
    """A grid of cells that touch; numbers grow upwards where `descending`, else downwards as in a list."""
    tight = alt.Scale(padding=0)
    return {
        "x": alt.X(field(x), type="ordinal", title=words(x), axis=cell_axis(), scale=tight),
        "y": alt.Y(
            field(y),
            type="ordinal",
            title=words(y),
            axis=cell_axis(),
            scale=tight,
            sort="descending" if descending else "ascending",
        ),
    }


def _along(values: pd.Series, name: str, label: str | None, log: bool) -> alt.X:
    """The axis along a profile: numbers as numbers, names in the table's order."""
    title = label or words(name)
    if values.dtype.kind not in "fiu":
        names = alt.Axis(labelAngle=0, labelOverlap="parity", labelSeparation=6)
        return alt.X(field(name), type="ordinal", title=title, sort=None, axis=names)
    whole = values.dtype.kind in "iu" and not log
    scale = alt.Scale(type="log") if log else alt.Scale(nice=False, zero=False)
    large = len(values) > 0 and values.max() >= 10_000
    axis = alt.Axis(tickMinStep=1, format="~s" if large else "d") if whole else alt.Axis()
    few = sorted(set(values.dropna().tolist())) if whole else []
    if 0 < len(few) <= 12:  # every whole number there is: a count of ticks would put some between them
        axis.values = few
    else:
        axis.tickCount = alt.ExprRef("max(2, ceil(width / 80))")
    return alt.X(field(name), type="quantitative", title=title, scale=scale, axis=axis)
