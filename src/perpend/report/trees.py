"""Dendrograms: a tree of heads from a linkage matrix, drawn upright."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd

from perpend.errors import InputError
from perpend.report import theme
from perpend.report.encodings import tip


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

    `keys` gives each leaf the columns by which a click finds its `Detail`, such as layer and head. The axis
    starts a little below the lowest merge, where the leaves hang.
    """
    segments, leaves = tree(merges, names, groups, keys)
    thin = 1.0 if len(leaves) <= 120 else 0.6
    lines = alt.Chart(segments).mark_rule(strokeWidth=thin, color=theme.LIGHT["soft"])
    floor, top = float(leaves["height"].iloc[0]), float(segments["top"].max())
    up = alt.Y(
        "height:Q", title=label, scale=alt.Scale(domain=[floor, top], nice=False), axis=alt.Axis(tickCount=6)
    )
    side = alt.X("left:Q", axis=None, scale=alt.Scale(domain=[-1, len(leaves)], nice=False))
    lines = lines.encode(x=side, x2="right:Q", y=up, y2="top:Q", tooltip=[tip("top", form, "merge at")])
    dots = alt.Chart(leaves).mark_point(size=40 if len(leaves) <= 400 else 14, opacity=1, cursor="pointer")
    dots = dots.encode(x=alt.X("at:Q", axis=None), y=alt.Y("height:Q", title=label))
    if groups is None:
        dots = dots.encode(tooltip=[tip("name")], color=alt.value(theme.LIGHT["content"]))
    else:
        numeric = all(isinstance(group, (int, float)) for group in groups)
        scale = alt.Scale(range=theme.SEQUENTIAL if numeric else theme.PALETTE)
        kind = "quantitative" if numeric else "nominal"
        colour = alt.Color("group", type=kind, title=group_label, scale=scale)
        dots = dots.encode(tooltip=[tip("name"), tip("group", title=group_label)], color=colour)
    return alt.layer(lines, dots).properties(width="container", height=300)


def tree(
    merges: Any,
    names: Sequence[str],
    groups: Sequence[Any] | None = None,
    keys: Mapping[str, Sequence[Any]] | None = None,
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Segments (left, right, height, top) and leaves (name, group, at, height) of a linkage matrix."""
    count = len(names)
    if count < 2 or len(merges) != count - 1:
        raise InputError(
            f"a tree of {count} leaves has {count - 1} merges, not {len(merges)}, and two leaves or more"
        )
    heights = [float(height) for _, _, height, _ in merges]
    floor = max(0.0, min(heights) - 0.08 * (max(heights) - min(heights)))
    order = leaf_order(merges, count)
    at = {leaf: float(place) for place, leaf in enumerate(order)}
    top = dict.fromkeys(range(count), floor)
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
    columns = {"name": names, "group": groups if groups is not None else [0] * count, **(keys or {})}
    leaves = pd.DataFrame({name: [values[i] for i in order] for name, values in columns.items()})
    leaves["at"], leaves["height"] = range(count), floor
    return segments, leaves


def leaf_order(merges: Any, count: int) -> list[int]:
    """Leaves from left to right, without recursion, which a chain of a thousand merges would exhaust."""
    stack, order = [2 * count - 2], []
    while stack:
        node = stack.pop()
        if node < count:
            order.append(node)
        else:
            a, b = int(merges[node - count][0]), int(merges[node - count][1])
            stack += [b, a]
    return order
