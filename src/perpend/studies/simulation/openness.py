"""Theorem 1 (iii): how far around the witness all six classical verdicts stand.

The radius is that of the sup norm on the nine coordinates of a triple that stays on the simplex. A lower
bound is *proved* in outward-rounded interval arithmetic, in mean-value form: the margin at the witness minus
the radius times a bound of the gradient over the box. The steps of a row sum to zero, so its gradient may be
shifted by a constant. An upper bound is a triple found by search on which a verdict fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import numpy as np

from perpend.geometry import closure, content, dissimilarity
from perpend.studies.simulation.checks import Part, Settings, holds
from perpend.studies.simulation.witness import CLASSICAL

ORDER = 21
WITNESS = (
    (Fraction(9, 10), Fraction(2, 25), Fraction(1, 50)),
    (Fraction(7, 10), Fraction(6, 25), Fraction(3, 50)),
    (Fraction(9, 10), Fraction(1, 50), Fraction(2, 25)),
)


def certified(radius: Fraction) -> bool:
    """Whether interval arithmetic proves all six verdicts on every triple within `radius` of the witness."""
    from mpmath import iv

    boxes = [[_interval(iv, value, radius) for value in row] for row in WITNESS]
    centre = [[_interval(iv, value, Fraction(0)) for value in row] for row in WITNESS]
    if any(float(x.a) <= 0 for row in boxes for x in row):
        return False
    for name in CLASSICAL:
        distance, gradient = _FORMULAS[name]
        at = distance(iv, centre[0], centre[1]) - distance(iv, centre[0], centre[2])
        to_q, to_r = gradient(iv, boxes[0], boxes[1]), gradient(iv, boxes[0], boxes[2])
        rows = [[a - b for a, b in zip(to_q[0], to_r[0])], to_q[1], to_r[1]]
        slack = sum(_variation(row) for row in rows) * float(radius)
        if not float(at.a) > slack * (1 + 1e-12):
            return False
    # Content of two parts is one number, the share v of the first, and each dissimilarity of two contents
    # grows as one share moves away from the other: end points of the intervals decide.
    p, q, r = (1 / (1 + row[2] / row[1]) for row in boxes)
    return all(float(_between(iv, name, p, r).a) > float(_between(iv, name, p, q).b) for name in CLASSICAL)


def certified_radius(steps: int = 30) -> float:
    """The largest radius that `certified` proves, by bisection."""
    low, high = Fraction(0), Fraction(1, 50)
    for _ in range(steps):
        middle = (low + high) / 2
        low, high = (middle, high) if certified(middle) else (low, middle)
    return float(low)


def failing_radius(seed: Sequence[int], tries: int = 3) -> float:
    """The smallest radius at which a search finds a triple whose verdicts do not all reverse."""
    from scipy.optimize import minimize

    centre = np.array(WITNESS, dtype=float)
    generator = np.random.default_rng(list(seed))

    def lowest(margin: Callable[[np.ndarray], float], radius: float) -> float:
        bounds = [(-radius, radius)] * 9
        sums = [{"type": "eq", "fun": lambda x, k=k: x.reshape(3, 3)[k].sum()} for k in range(3)]
        best = np.inf
        for _ in range(tries):
            start = generator.uniform(-radius, radius, (3, 3))
            start -= start.mean(-1, keepdims=True)
            found = minimize(
                lambda x: margin(centre + x.reshape(3, 3)),
                start.ravel(),
                bounds=bounds,
                constraints=sums,
                method="SLSQP",
            )
            inside = found.x.reshape(3, 3)
            inside = inside - inside.mean(-1, keepdims=True)
            if np.abs(inside).max() <= radius * (1 + 1e-9):
                best = min(best, margin(centre + inside))
        return best

    smallest = 0.0199
    for margin in _margins():
        low, high = 0.0, smallest
        if lowest(margin, high) > 0:
            continue
        for _ in range(14):
            middle = (low + high) / 2
            low, high = (low, middle) if lowest(margin, middle) <= 0 else (middle, high)
        smallest = high
    return smallest


def part(settings: Settings) -> Part:
    """Both bounds of the radius."""
    proved = certified_radius()
    failing = failing_radius(settings.generator_seed(ORDER))
    found = Part(results={"radius_proved": proved, "radius_failing": failing})
    found.checks = [
        holds("Theorem 1 (iii)", "radius proved around the witness", "> 0, an open set", proved, least=1e-6),
        holds(
            "Theorem 1 (iii)", "a failing triple lies beyond it", "consistent", failing - proved, least=0.0
        ),
    ]
    found.findings.append(
        f"All six classical verdicts of Table 1 stand for every triple within {proved:.5f} (sup norm) of the "
        f"witness, proved in interval arithmetic; the nearest failing triple found is {failing:.5f} away."
    )
    return found


def _margins() -> list[Callable[[np.ndarray], float]]:
    """The six margins of a triple (3, parts): positive while the verdict is the witness's own."""

    def kept(triple: np.ndarray, name: str) -> float:
        p, q, r = closure(np.clip(triple, 1e-9, None))
        return float(dissimilarity(p, q, name) - dissimilarity(p, r, name))

    def dropped(triple: np.ndarray, name: str) -> float:
        p, q, r = content(np.clip(triple, 1e-9, None))
        return float(dissimilarity(p, r, name) - dissimilarity(p, q, name))

    return [partial(margin, name=name) for name in CLASSICAL for margin in (kept, dropped)]


def _interval(iv: Any, value: Fraction, radius: Fraction) -> Any:
    low, high = value - radius, value + radius
    return iv.mpf(
        [(iv.mpf(low.numerator) / low.denominator).a, (iv.mpf(high.numerator) / high.denominator).b]
    )


def _size(x: Any) -> float:
    return max(abs(float(x.a)), abs(float(x.b)))


def _variation(gradient: list[Any]) -> float:
    """min over λ of Σ sup|gᵢ − λ|: the most a step of sup norm one that sums to zero can change."""
    middles = sorted((float(g.a) + float(g.b)) / 2 for g in gradient)
    shift = middles[len(middles) // 2]
    return sum(_size(g - shift) for g in gradient)


def _between(iv: Any, name: str, v: Any, w: Any) -> Any:
    """The dissimilarity of the contents (v, 1−v) and (w, 1−w) over intervals of v and w."""
    if float(v.b) < float(w.a) or float(w.b) < float(v.a):
        low, high = (v, w) if float(v.b) < float(w.a) else (w, v)
        least = _two(iv, name, iv.mpf(low.b), iv.mpf(high.a))
        most = _two(iv, name, iv.mpf(low.a), iv.mpf(high.b))
        return iv.mpf([least.a, most.b])
    ends = [_two(iv, name, iv.mpf(a), iv.mpf(b)) for a, b in ((v.a, w.b), (v.b, w.a))]
    return iv.mpf([0, max(end.b for end in ends)])


def _two(iv: Any, name: str, v: Any, w: Any) -> Any:
    return _FORMULAS[name][0](iv, [v, 1 - v], [w, 1 - w])


def _square(iv: Any, x: list[Any], y: list[Any]) -> Any:
    return sum((a - b) ** 2 for a, b in zip(x, y))


def _square_gradient(iv: Any, x: list[Any], y: list[Any]) -> tuple[list[Any], list[Any]]:
    return [2 * (a - b) for a, b in zip(x, y)], [2 * (b - a) for a, b in zip(x, y)]


def _cosine(iv: Any, x: list[Any], y: list[Any]) -> Any:
    dot = sum(a * b for a, b in zip(x, y))
    return 1 - dot / iv.sqrt(sum(a**2 for a in x) * sum(b**2 for b in y))


def _cosine_gradient(iv: Any, x: list[Any], y: list[Any]) -> tuple[list[Any], list[Any]]:
    xx, yy, dot = sum(a**2 for a in x), sum(b**2 for b in y), sum(a * b for a, b in zip(x, y))
    root = iv.sqrt(xx * yy)
    return [dot * a / (xx * root) - b / root for a, b in zip(x, y)], [
        dot * b / (yy * root) - a / root for a, b in zip(x, y)
    ]


def _js(iv: Any, x: list[Any], y: list[Any]) -> Any:
    return sum(a * iv.log(2 * a / (a + b)) + b * iv.log(2 * b / (a + b)) for a, b in zip(x, y)) / 2


def _js_gradient(iv: Any, x: list[Any], y: list[Any]) -> tuple[list[Any], list[Any]]:
    # 2a/(a+b) = 2/(1 + b/a): written so, the interval does not lose that a stands twice.
    return [iv.log(2 / (1 + b / a)) / 2 for a, b in zip(x, y)], [
        iv.log(2 / (1 + a / b)) / 2 for a, b in zip(x, y)
    ]


_FORMULAS = {
    "cosine": (_cosine, _cosine_gradient),
    "jensen_shannon": (_js, _js_gradient),
    "euclidean": (_square, _square_gradient),
}
