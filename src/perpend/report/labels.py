"""Where the names of points stand in a chart, so that they can be read: across nothing else that is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

LABEL = ("label_align", "label_dx", "label_dy")  # columns that `named` adds: a text mark's own settings
_DOT, _LETTER, _LINE = 5.0, 6.4, 13.0  # pixels: a dot's radius, a letter's width, a line's height
_ASIDE = (("left", 8, -6), ("right", -8, -6), ("left", 8, 7), ("right", -8, 7))
_OVER = (("center", 0, -13), ("center", 0, 13))


def named(
    table: pd.DataFrame,
    x: str,
    y: str,
    name: str,
    series: str | None,
    curve: pd.DataFrame | None = None,
    logs: Sequence[str] = (),
) -> pd.DataFrame:
    """The rows whose names fit beside their points, with their places, on a plot as small as a phone's.

    A name stands right or left of its point, above or below it: wherever it crosses no other name, no point
    and not the `curve`. Of points that run into one another one is named; rows of the rarest series come
    first. `logs` are the columns on a logarithmic axis.
    """
    width, height = 200.0, 220.0
    shown = pd.concat([table[[x, y]], curve[[x, y]]]) if curve is not None else table[[x, y]]
    shown = shown.assign(**{column: np.log(shown[column]) for column in logs})
    low, span = shown.min(), (shown.max() - shown.min()).replace(0, 1.0)
    spots = ((shown - low) / span).to_numpy(float) * (width, height)
    dots = {row: spot for row, spot in zip(table.index, spots) if np.isfinite(spot).all()}
    taken = [_box(spot, _DOT, _DOT) for spot in dots.values()]
    taken += [_box(spot, 1.0, 1.0) for spot in _along_line(spots[len(table) :])]
    order = table.index
    if series is not None:
        order = table[series].map(table[series].value_counts()).sort_values(kind="stable").index
    places: dict[Any, tuple[str, int, int]] = {}
    for row in order:
        if row not in dots or any(np.hypot(*(dots[row] - dots[one])) < 2 * _DOT for one in places):
            continue
        long = _LETTER * len(str(table.at[row, name])) / 2
        aside = _ASIDE if dots[row][0] <= width / 2 else tuple(_ASIDE[i] for i in (1, 0, 3, 2))
        for align, dx, dy in (*aside, *_OVER):
            centre = dots[row] + (dx + {"left": long, "right": -long, "center": 0.0}[align], -dy)
            box = _box(centre, long, _LINE / 2)
            inside = box[0] >= -2 * _DOT and box[1] <= width + 2 * _DOT
            if inside and not any(_cross(box, other) for other in taken):
                places[row] = (align, dx, dy)
                taken.append(box)
                break
    rows = [row for row in table.index if row in places]
    added = {column: [places[row][i] for row in rows] for i, column in enumerate(LABEL)}
    return table.loc[rows].assign(**added)


def _box(centre: np.ndarray, across: float, up: float) -> tuple[float, float, float, float]:
    return centre[0] - across, centre[0] + across, centre[1] - up, centre[1] + up


def _cross(a: tuple[float, ...], b: tuple[float, ...]) -> bool:
    return a[0] < b[1] and b[0] < a[1] and a[2] < b[3] and b[2] < a[3]


def _along_line(ends: np.ndarray, step: float = 3.0) -> list[np.ndarray]:
    """Points on a line through `ends`, at most a few pixels apart."""
    pairs = [(a, b) for a, b in pairwise(ends) if np.isfinite([a, b]).all()]
    return [
        a + (b - a) * share
        for a, b in pairs
        for share in np.linspace(0, 1, 2 + int(np.hypot(*(b - a)) / step))
    ]
