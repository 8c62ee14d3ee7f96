"""A line chart as a small SVG of text, the same bytes on every machine: results.md and README.

Reports draw with altair; a page that is checked byte for byte must not depend on a renderer's version.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 720, 320
LEFT, RIGHT, TOP, BOTTOM = 64, 130, 34, 46
COLOURS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
TEXT = 'font-family="sans-serif" font-size="12" fill="#333"'


def log_lines(
    series: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    x: str,
    y: str,
    reference: tuple[str, float] | None = None,
) -> str:
    """Series of positive numbers over 0, 1, 2 …, the y axis logarithmic; a missing number is a gap."""
    return lines(series, title=title, x=x, y=y, reference=reference)


def lines(
    series: Mapping[str, Sequence[float | None]],
    *,
    title: str,
    x: str,
    y: str,
    reference: tuple[str, float] | None = None,
    logarithmic: bool = True,
) -> str:
    """Series of positive numbers over 0, 1, 2 …; the y axis is logarithmic, or linear from zero."""
    values = [v for line in series.values() for v in line if v] + ([reference[1]] if reference else [])
    height = math.log10 if logarithmic else float
    low, high = (height(min(values)) if logarithmic else 0.0), height(max(values))
    margin = 0.05 * (high - low + 0.1)
    low, high = low - margin if logarithmic else 0.0, high + margin
    count = max(len(line) for line in series.values())

    def at(i: float, value: float) -> tuple[float, float]:
        across = LEFT + (WIDTH - LEFT - RIGHT) * (i / max(1, count - 1))
        down = TOP + (HEIGHT - TOP - BOTTOM) * (high - height(value)) / (high - low)
        return across, down

    end = WIDTH - RIGHT
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" {TEXT} font-weight="bold">{escape(title)}</text>',
    ]
    for value in _ticks(low, high) if logarithmic else _even(high):
        _, down = at(0, value)
        out.append(f'<line x1="{LEFT}" x2="{end}" y1="{down:.1f}" y2="{down:.1f}" stroke="#e3e3e3"/>')
        out.append(f'<text x="{LEFT - 8}" y="{down + 4:.1f}" {TEXT} text-anchor="end">{value:g}</text>')
    step = next(s for s in (1, 2, 5, 10, 20, 50, 100) if count / s <= 12)
    for i in range(0, count, step):
        across, _ = at(i, values[0])
        out.append(
            f'<text x="{across:.1f}" y="{HEIGHT - BOTTOM + 18}" {TEXT} text-anchor="middle">{i}</text>'
        )
    middle = (LEFT + end) / 2
    out.append(f'<text x="{middle:g}" y="{HEIGHT - 8}" {TEXT} text-anchor="middle">{escape(x)}</text>')
    out.append(
        f'<text transform="translate(14 {HEIGHT / 2:g}) rotate(-90)" {TEXT} '
        f'text-anchor="middle">{escape(y)}</text>'
    )
    if reference:
        _, down = at(0, reference[1])
        out.append(
            f'<line x1="{LEFT}" x2="{end}" y1="{down:.1f}" y2="{down:.1f}" stroke="#777" '
            'stroke-dasharray="5 4"/>'
        )
        out.append(f'<text x="{end + 8}" y="{down + 4:.1f}" {TEXT}>{escape(reference[0])}</text>')
    beside = TOP + 14  # the legend, or below the reference's name where that would lie in it
    if reference and beside - 20 < at(0, reference[1])[1] < beside + 18 * len(series):
        beside = at(0, reference[1])[1] + 26
    for number, (name, line) in enumerate(series.items()):
        colour = COLOURS[number % len(COLOURS)]
        points = [at(i, v) if v else None for i, v in enumerate(line)]
        path, pen = [], "M"
        for point in points:
            if point is None:
                pen = "M"
                continue
            path.append(f"{pen}{point[0]:.1f} {point[1]:.1f}")
            pen = "L"
        out.append(f'<path d="{" ".join(path)}" fill="none" stroke="{colour}" stroke-width="2"/>')
        out += [f'<circle cx="{p[0]:.1f}" cy="{p[1]:.1f}" r="2.5" fill="{colour}"/>' for p in points if p]
        down = beside + 18 * number
        out.append(f'<rect x="{end + 8}" y="{down - 9:g}" width="12" height="4" fill="{colour}"/>')
        out.append(f'<text x="{end + 26}" y="{down - 2:g}" {TEXT}>{escape(name)}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def _ticks(low: float, high: float) -> list[float]:
    """1, 2 and 5 times powers of ten inside the range."""
    found = [m * 10.0**e for e in range(math.floor(low), math.ceil(high) + 1) for m in (1, 2, 5)]
    inside = [v for v in found if low <= math.log10(v) <= high]
    return (
        inside
        if len(inside) <= 8
        else [v for v in inside if math.isclose(math.log10(v) % 1, 0, abs_tol=1e-9)]
    )


def _even(high: float) -> list[float]:
    """Four to eight even steps from zero."""
    step = next(m * 10.0**e for e in range(-9, 10) for m in (1, 2, 5) if high / (m * 10.0**e) <= 8)
    return [step * i for i in range(int(high / step) + 1)]
