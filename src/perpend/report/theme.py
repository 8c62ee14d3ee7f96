"""Colours and type of every chart and page: one table, for charts, notebooks and the report's style sheet.

Charts carry the light colours. The report replaces each by a CSS variable of the same role, so that a page
turns dark, or light on paper, without drawing anything again.
"""

from __future__ import annotations

from typing import Any

# role -> (light, dark). Contrast with the page is at least 4.5 for text roles and 3 for marks, in both modes.
ROLES: dict[str, tuple[str, str]] = {
    "paper": ("#fcfbf8", "#161719"),
    "panel": ("#f4f2ec", "#1f2124"),
    "ink": ("#1d1c1a", "#eceae4"),
    "soft": ("#5d5a54", "#a9a69e"),
    "rule": ("#dedad0", "#36383c"),
    "content": ("#1f6f9f", "#6fb7df"),
    "sink": ("#ad4c15", "#f0955a"),
    "third": ("#2f6b4c", "#6fd79c"),
    "fourth": ("#5e033c", "#af4f71"),
    "fifth": ("#192082", "#5e71af"),
    "sixth": ("#8b81c5", "#e4ddf6"),
    "seventh": ("#413000", "#827525"),
    "eighth": ("#da5b76", "#e46894"),
    "ninth": ("#6047b0", "#9c72de"),
    "tenth": ("#14938d", "#1f9c96"),
    "eleventh": ("#5f9205", "#b5de5f"),
    "twelfth": ("#574b59", "#b9a79c"),
}
# In the order in which series take them. They differ in lightness as well as in hue, so that any two can be
# told apart with each kind of colour blindness, in both modes; a series has its own shape or dash besides.
SERIES = (
    "content", "sink", "third", "fourth", "fifth", "sixth",
    "seventh", "eighth", "ninth", "tenth", "eleventh", "twelfth",
)  # fmt: skip
SHAPES = (
    "circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left",
)  # fmt: skip
DASHES: tuple[list[int], ...] = ([1, 0], [7, 3], [2, 2], [9, 3, 2, 3])
LIGHT = {role: pair[0] for role, pair in ROLES.items()}
PALETTE = [LIGHT[role] for role in SERIES]

# Ramps read on white and on black alike: lightness is monotone and neither end is the page's colour.
SEQUENTIAL = ["#24305e", "#24608a", "#2b8f9b", "#6bbb8f", "#c5dc86", "#fbf3b2"]
DIVERGING = ["#14507f", "#5a9bc7", "#c3d9e6", "#f0ede4", "#f3c9a8", "#d9823f", "#8c3a0b"]

SANS = '"Inter", "Helvetica Neue", "Segoe UI", Roboto, Arial, "DejaVu Sans", sans-serif'
SERIF = '"Iowan Old Style", "Charter", "Source Serif 4", Georgia, "DejaVu Serif", serif'


def config(colours: dict[str, str] | None = None, font: str = SANS) -> dict[str, Any]:
    """Vega-Lite configuration: thin axes, few grid lines, text in the page's type."""
    c = colours or LIGHT
    text = {"labelFont": font, "titleFont": font, "labelColor": c["soft"], "titleColor": c["ink"]}
    return {
        "background": "transparent",
        "font": font,
        "view": {"stroke": None, "continuousHeight": 280},
        "axis": {
            **text,
            "labelFontSize": 12,
            "titleFontSize": 12.5,
            "titleFontWeight": 500,
            "titlePadding": 10,
            "labelPadding": 5,
            "domainColor": c["soft"],
            "tickColor": c["soft"],
            "tickSize": 4,
            "gridColor": c["rule"],
            "gridWidth": 0.8,
        },
        "axisX": {"grid": False, "labelFlush": True},
        "axisY": {"domain": False, "ticks": False},
        "legend": {
            **text,
            "labelFontSize": 12,
            "titleFontSize": 12.5,
            "titleFontWeight": 500,
            "orient": "top",
            "labelLimit": 360,
            "symbolType": "circle",
            "symbolStrokeWidth": 0,
            "offset": 18,
            "gradientThickness": 10,
            "gradientLength": 180,
        },
        "title": {"color": c["ink"], "font": font, "fontSize": 13, "fontWeight": 500, "anchor": "start"},
        "range": {"category": [c[role] for role in SERIES]},
        "line": {"strokeWidth": 2, "strokeJoin": "round"},
        "rule": {"color": c["soft"]},
        "text": {"color": c["ink"], "font": font, "fontSize": 12},
        "point": {"size": 46, "filled": True},
        "header": {"labelFont": font, "labelColor": c["ink"], "labelFontSize": 12.5, "title": None},
    }
