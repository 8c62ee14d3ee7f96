"""The recurring kinds of chart, as altair charts that resize, show their numbers on hover and need no styling.

Every helper takes a tidy DataFrame and column names. Colours come from the theme; axis titles default to the
column names. Text is drawn as text: nothing in a table can become markup or an expression.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from perpend.errors import InputError
from perpend.report import theme

PICKED, CHOSEN = "picked", "chosen"  # data sets that the page fills: the marked cell, the chosen row's arrays
_CELL, _LARGEST = 22, 340


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
) -> alt.LayerChart:
    """A map of cells, layers × heads by default, with hover and a frame around the chosen cell.

    `middle` switches to a diverging ramp centred there. Cells without a value stay empty.
    """
    _need(table, value, x, y, *tooltip)
    title = label or _words(value)
    scale = _ramp(table[value], domain, middle)
    rows = max(1, table[y].nunique())
    base = alt.Chart(table).encode(x=_cells(x, table[x]), y=_cells(y, table[y], grid=False))
    cells = base.mark_rect(cursor="pointer").encode(
        color=alt.Color(_field(value), type="quantitative", scale=scale, title=title),
        tooltip=[_tip(x), _tip(y), _tip(value, form, title), *_tips(table, tooltip, form)],
    )
    frame = (
        alt.Chart(alt.InlineData(values=[], name=PICKED))
        .mark_rect(fill=None, stroke=theme.LIGHT["ink"], strokeWidth=2.5)
        .encode(x=alt.X(_field(x), type="ordinal"), y=alt.Y(_field(y), type="ordinal"))
    )
    height = max(90, min(_LARGEST, rows * _CELL))
    return alt.layer(cells, frame).properties(width="container", height=height)


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

    `value` is a column, or a mapping column -> name for several columns drawn as series. `marks` is a boolean
    column: rows where it holds get an open ring. `reference` draws horizontal lines, name -> height.
    """
    if isinstance(value, Mapping):
        table = table.melt(
            id_vars=[name for name in table.columns if name not in value],
            value_vars=list(value),
            var_name="series",
            value_name="value",
        )
        table["series"] = table["series"].map(dict(value))
        value, series, label = "value", "series", label or "value"
    _need(table, value, x, *(name for name in (series, low, high, marks) if name))
    title = label or _words(value)
    discrete = table[x].dtype.kind not in "fiu"
    along = alt.X(
        _field(x),
        type="ordinal" if discrete else "quantitative",
        title=x_label or _words(x),
        scale=alt.Undefined
        if discrete
        else alt.Scale(type="log" if log_x else "linear", nice=False, zero=False),
        axis=alt.Axis(tickMinStep=1) if table[x].dtype.kind in "iu" else alt.Axis(),
        sort=None if discrete else alt.Undefined,
    )
    up = alt.Y(
        _field(value),
        type="quantitative",
        title=title,
        scale=alt.Scale(type="log" if log_y else "linear", zero=zero and not log_y),
    )
    colour = _series(table, series)
    tips = [_tip(x), *([_tip(series)] if series else []), _tip(value, form, title)]
    base = alt.Chart(table).encode(x=along, **colour)
    layers: list[Any] = []
    if low and high:
        band = base.mark_area(opacity=0.18, line=False).encode(
            y=alt.Y(_field(low), type="quantitative", title=title), y2=alt.Y2(_field(high))
        )
        layers.append(band)
        tips += [_tip(low, form), _tip(high, form)]
    layers.append(base.mark_line(clip=True).encode(y=up))
    if points:
        layers.append(base.mark_point(size=40, opacity=1).encode(y=up, tooltip=tips))
    if marks:
        rings = base.transform_filter(alt.FieldEqualPredicate(field=_field(marks), equal=True))
        layers.append(rings.mark_point(size=190, filled=False, strokeWidth=1.8).encode(y=up, tooltip=tips))
    layers += _references(reference)
    return alt.layer(*layers).properties(width="container", height=300)


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
) -> alt.LayerChart:
    """Horizontal bars in the table's order, with intervals; `ticks` (column -> name) adds marks beside them."""
    _need(table, value, by, *(name for name in (low, high, series) if name), *(ticks or {}))
    title, form = label or _words(value), ".1%" if percent else form
    order = list(dict.fromkeys(table[by]))
    place: dict[str, Any] = {"y": alt.Y(_field(by), type="nominal", sort=order, title=None)}
    if series:
        place["yOffset"] = alt.YOffset(
            _field(series), type="nominal", sort=list(dict.fromkeys(table[series]))
        )
    axis = alt.Axis(format="%", grid=True, domain=False) if percent else alt.Axis(grid=True, domain=False)
    across = alt.X(_field(value), type="quantitative", title=title, axis=axis)
    tips = [_tip(by), *([_tip(series)] if series else []), _tip(value, form, title)]
    tips += [_tip(name, form) for name in (low, high) if name] + [
        _tip(k, form, v) for k, v in (ticks or {}).items()
    ]
    base = alt.Chart(table).encode(**place, tooltip=tips)
    layers: list[Any] = [
        base.mark_bar(cornerRadiusEnd=2, height={"band": 0.72}).encode(x=across, **_series(table, series))
    ]
    if low and high:
        ends = {"x": alt.X(_field(low), type="quantitative", title=title), "x2": alt.X2(_field(high))}
        layers.append(base.mark_rule(strokeWidth=1.6, color=theme.LIGHT["ink"]).encode(**ends))
    for (column, name), role in zip((ticks or {}).items(), ("ink", "fifth", "third")):
        tick = base.mark_tick(thickness=2.5, size=18, color=theme.LIGHT[role])
        layers.append(tick.encode(x=alt.X(_field(column), type="quantitative"), description=alt.value(name)))
    layers += _references(reference, vertical=True)
    rows = len(order) * (table[series].nunique() if series else 1)
    return alt.layer(*layers).properties(width="container", height=max(80, min(700, 26 * rows + 14)))


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
) -> alt.LayerChart:
    """Points, named where `name` says so, over a curve (a table with the same two columns) and its band."""
    _need(table, x, y, *(column for column in (name, series, size) if column), *tooltip)
    across = alt.X(_field(x), type="quantitative", title=x_label or _words(x), scale=alt.Scale(zero=False))
    up = alt.Y(_field(y), type="quantitative", title=y_label or _words(y), scale=alt.Scale(zero=False))
    layers: list[Any] = []
    if curve is not None:
        _need(curve, x, y)
        under = alt.Chart(curve).encode(x=across)
        if curve_low and curve_high:
            band = under.mark_area(color=theme.LIGHT["sixth"], opacity=0.2)
            layers.append(
                band.encode(y=alt.Y(_field(curve_low), type="quantitative"), y2=alt.Y2(_field(curve_high)))
            )
        layers.append(under.mark_line(color=theme.LIGHT["sixth"], strokeWidth=1.6).encode(y=up))
    if diagonal:
        least = float(min(table[x].min(), table[y].min()))
        most = float(max(table[x].max(), table[y].max()))
        ends = alt.Chart(pd.DataFrame({x: [least, most], y: [least, most]}))
        layers.append(
            ends.mark_line(strokeDash=[4, 4], strokeWidth=1, color=theme.LIGHT["soft"]).encode(across, up)
        )
    tips = [_tip(c) for c in (name, series) if c] + [_tip(x, form), _tip(y, form)]
    tips += _tips(table, [*([size] if size else []), *tooltip], form)
    extra = {"size": alt.Size(_field(size), type="quantitative", title=_words(size))} if size else {}
    base = alt.Chart(table).encode(x=across, y=up, **_series(table, series))
    layers.append(
        base.mark_point(size=alt.Undefined if size else 58, opacity=0.85).encode(tooltip=tips, **extra)
    )
    if name:
        words = base.mark_text(align="left", dx=8, dy=-6, fontSize=11).encode(text=alt.Text(_field(name)))
        layers.append(words)
    return alt.layer(*layers).properties(width="container", height=340)


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
    mark: Mapping[str, float] | None = None,
) -> alt.LayerChart:
    """A value over a grid of two numbers; `mark` ({x: …, y: …}) rings one cell, such as the unedited model."""
    chart = heat(table, value, x=x, y=y, label=label, domain=domain, middle=middle, form=form)
    if mark:
        _need(pd.DataFrame([mark]), x, y)
        ring = alt.Chart(pd.DataFrame([mark])).mark_point(
            size=150, filled=False, strokeWidth=2, color=theme.LIGHT["ink"]
        )
        place = {
            "x": alt.X(_field(x), type="ordinal"),
            "y": alt.Y(_field(y), type="ordinal", sort="descending"),
        }
        chart = alt.layer(*chart.layer, ring.encode(**place))
    for layer in chart.layer:
        layer.encoding.y.sort = "descending"
    rows = max(1, table[y].nunique())
    return chart.properties(width="container", height=max(160, min(420, 30 * rows)))


def dendrogram(
    merges: Any,
    names: Sequence[str],
    *,
    groups: Sequence[Any] | None = None,
    keys: Mapping[str, Sequence[Any]] | None = None,
    label: str = "distance",
    group_label: str = "layer",
    form: str = ".3f",
) -> alt.LayerChart:
    """A tree from a scipy linkage matrix (n − 1, 4); leaves are dots, coloured by `groups` where given.

    `keys` gives each leaf the columns by which a click finds its `Detail`, such as layer and head.
    """
    segments, leaves = tree(merges, names, groups, keys)
    up = alt.Y("height", type="quantitative", title=label)
    lines = alt.Chart(segments).mark_rule(strokeWidth=1, color=theme.LIGHT["soft"])
    lines = lines.encode(
        x=alt.X("left:Q", axis=None, scale=alt.Scale(domain=[-1, len(leaves)], nice=False)),
        x2="right:Q",
        y=up,
        y2="top:Q",
        tooltip=[_tip("top", form, "merge at")],
    )
    numeric = leaves["group"].map(lambda group: isinstance(group, (int, float))).all()
    colour = alt.Color(
        "group",
        type="quantitative" if numeric else "nominal",
        title=group_label,
        scale=alt.Scale(range=theme.SEQUENTIAL) if numeric else alt.Scale(range=theme.PALETTE),
    )
    size = 34 if len(leaves) <= 400 else 12
    dots = alt.Chart(leaves).mark_point(size=size, opacity=1, cursor="pointer")
    tips = [_tip("name", title="head"), *([_tip("group", title=group_label)] if groups is not None else [])]
    dots = dots.encode(x=alt.X("at:Q", axis=None), y=alt.datum(0), tooltip=tips)
    dots = dots.encode(color=colour) if groups is not None else dots
    return alt.layer(lines, dots).properties(width="container", height=280)


def tree(
    merges: Any,
    names: Sequence[str],
    groups: Sequence[Any] | None = None,
    keys: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Segments (left, right, height, top) and leaves (name, group, at) of a linkage matrix, drawn upright."""
    count = len(names)
    if len(merges) != count - 1:
        raise InputError(f"a tree of {count} leaves has {count - 1} merges, not {len(merges)}")
    order = _leaf_order(merges, count)
    at = {leaf: float(place) for place, leaf in enumerate(order)}
    top = dict.fromkeys(range(count), 0.0)
    rows = []
    for number, (a, b, height, _) in enumerate(merges):
        a, b, height = int(a), int(b), float(height)
        rows += [
            (at[a], at[a], top[a], height),
            (at[b], at[b], top[b], height),
            (at[a], at[b], height, height),
        ]
        at[count + number], top[count + number] = (at[a] + at[b]) / 2, height
    segments = pd.DataFrame(rows, columns=["left", "right", "height", "top"])
    chosen = list(groups) if groups is not None else [0] * count
    columns = {"name": names, "group": chosen, **(keys or {})}
    leaves = pd.DataFrame({name: [values[i] for i in order] for name, values in columns.items()})
    leaves["at"] = range(count)
    return segments, leaves


def chosen() -> alt.InlineData:
    """The data of a detail chart: the chosen row's lists, as columns beside `index`."""
    return alt.InlineData(values=[], name=CHOSEN)


def chosen_profile(
    value: str | Mapping[str, str], *, label: str | None = None, x_label: str = "key", form: str = ".4f"
) -> Any:
    """A bar (one list) or lines (several) over the position in the list, for a `Detail`."""
    across = alt.X("index:Q", title=x_label, scale=alt.Scale(nice=False), axis=alt.Axis(tickMinStep=1))
    if isinstance(value, str):
        up = alt.Y(_field(value), type="quantitative", title=label or _words(value))
        tips = [_tip("index", title=x_label), _tip(value, form, label)]
        bars = alt.Chart(chosen()).mark_bar(width={"band": 0.8}, color=theme.LIGHT["content"])
        return bars.encode(x=alt.X("index:O", title=x_label, axis=_sparse()), y=up, tooltip=tips).properties(
            width="container", height=200
        )
    folded = alt.Chart(chosen()).transform_fold(list(value), as_=["series", "value"])
    names = alt.Color(
        "series:N", title=None, scale=alt.Scale(domain=list(value), range=theme.PALETTE[: len(value)])
    )
    tips = [_tip("index", title=x_label), _tip("series"), _tip("value", form, label)]
    up = alt.Y("value:Q", title=label or "value")
    return (
        folded.mark_line(point=True)
        .encode(x=across, y=up, color=names, tooltip=tips)
        .properties(width="container", height=200)
    )


def themed(chart: Any) -> Any:
    """The chart with perpend's type and colours, for notebooks and files; 'container' widths become fixed."""
    if getattr(chart, "width", None) == "container":
        chart = chart.properties(width=640)
    return chart.configure(**theme.config())


def _leaf_order(merges: Any, count: int) -> list[int]:
    """Leaves from left to right, without recursion: a chain of a thousand merges is no deeper than a stack."""
    stack, order = [2 * count - 2], []
    while stack:
        node = stack.pop()
        if node < count:
            order.append(node)
        else:
            a, b = int(merges[node - count][0]), int(merges[node - count][1])
            stack += [b, a]
    return order


def _references(reference: Mapping[str, float] | None, vertical: bool = False) -> list[Any]:
    layers: list[Any] = []
    for name, value in (reference or {}).items():
        at = {"x" if vertical else "y": alt.datum(float(value))}
        rule = alt.Chart(pd.DataFrame([{"name": name, "value": float(value)}]))
        layers.append(
            rule.mark_rule(strokeDash=[5, 4], strokeWidth=1.2, color=theme.LIGHT["soft"]).encode(
                **at, tooltip=[_tip("name", title="reference"), _tip("value", ".4g")]
            )
        )
        words = rule.mark_text(
            align="left" if vertical else "right", dx=4 if vertical else -2, dy=0 if vertical else -7, fontSize=11,
            color=theme.LIGHT["soft"],
        )  # fmt: skip
        far = {"y": alt.value(6)} if vertical else {"x": alt.value("width")}
        layers.append(words.encode(**at, **far, text=alt.Text("name:N")))
    return layers


def _series(table: pd.DataFrame, series: str | None) -> dict[str, Any]:
    if series is None:
        return {"color": alt.value(theme.LIGHT["content"])}
    names = list(dict.fromkeys(table[series]))
    if len(names) > len(theme.PALETTE):
        scale = alt.Scale(domain=names, scheme="tableau20")
    else:
        scale = alt.Scale(domain=names, range=theme.PALETTE[: len(names)])
    return {"color": alt.Color(_field(series), type="nominal", title=None, scale=scale)}


def _ramp(values: pd.Series, domain: tuple[float, float] | None, middle: float | None) -> alt.Scale:
    if middle is None:
        return alt.Scale(range=theme.SEQUENTIAL, **({"domain": list(domain)} if domain else {}))
    finite = values.dropna()
    least, most = domain or ((finite.min(), finite.max()) if len(finite) else (middle, middle))
    reach = max(float(most) - middle, middle - float(least)) or 1.0
    return alt.Scale(range=theme.DIVERGING, domain=[middle - reach, middle + reach])


def _cells(name: str, values: pd.Series, grid: bool = True) -> Any:
    kind = alt.X if grid else alt.Y
    return kind(
        _field(name), type="ordinal", title=_words(name), axis=_sparse(), scale=alt.Scale(padding=0.04)
    )


def _sparse() -> alt.Axis:
    """Labels that never overlap, horizontal, without ticks and lines: cells speak for themselves."""
    return alt.Axis(labelOverlap="greedy", labelAngle=0, ticks=False, domain=False, labelSeparation=4)


def _tip(name: str, form: str | None = None, title: str | None = None) -> alt.Tooltip:
    settings = {"format": form, "type": "quantitative"} if form else {"type": "nominal"}
    return alt.Tooltip(_field(name), title=title or _words(name), **settings)


def _tips(table: pd.DataFrame, names: Sequence[str], form: str) -> list[alt.Tooltip]:
    return [_tip(name, form if table[name].dtype.kind == "f" else None) for name in names]


def _field(name: str) -> str:
    """A column's name where Vega-Lite expects a path: dots, brackets and colons in it stay part of the name."""
    return name.translate({ord(c): f"\\{c}" for c in "\\.[]:'\""})


def _words(name: str) -> str:
    return str(name).replace("_", " ")


def _need(table: pd.DataFrame, *names: str) -> None:
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise InputError(
            f"the table has no column {missing[0]!r}; it has {', '.join(map(str, table.columns))}"
        )
