"""Bootstrap over sequences: the weights that make one resample a mean, and intervals from resamples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

FRACTION, CORRELATION, SIZE = (0.0, 1.0), (-1.0, 1.0), (0.0, np.inf)  # what an interval is clipped to


def draws(count: int, resamples: int, seed: int = 0) -> np.ndarray:
    """Bootstrap weights [resamples, count] that average `count` sequences; the same seed, the same draws."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(count, np.full(count, 1 / count), size=resamples) / count


def basic_interval(
    value: float,
    estimate: float,
    replicates: np.ndarray,
    bounds: tuple[float, float] = (-np.inf, np.inf),
    confidence: float = 0.95,
) -> tuple[float, float] | None:
    """The basic (reflected) interval around `value`; None without two replicates that exist.

    Replicates (n,) are of `estimate`, which may be a sampled stand-in for `value`: their distances from it
    are what is carried over. Resampling moves every replicate the same way by its own noise; reflecting
    takes that shift out. Ends are clipped to `bounds`.
    """
    kept = np.asarray(replicates, np.float64)
    kept = kept[np.isfinite(kept)]
    if len(kept) < 2 or not np.isfinite(value):
        return None
    tail = (1 - confidence) / 2
    upper, lower = np.quantile(kept, [tail, 1 - tail])
    low, high = value + estimate - lower, value + estimate - upper
    return float(np.clip(low, *bounds)), float(np.clip(high, *bounds))


def intervals(
    values: Mapping[str, float],
    estimates: Mapping[str, float],
    replicates: Iterable[Mapping[str, float]],
    bounds: Callable[[str], tuple[float, float]] = lambda name: FRACTION,
) -> dict[str, dict[str, float]]:
    """name → `value`, and `low` and `high` where replicates give them, for many numbers at once.

    `estimates` and each replicate hold the same names as far as they are resampled; names that only `values`
    has get no interval. `bounds` of each by its name: those of fractions unless told.
    """
    rows = [dict(row) for row in replicates]
    found: dict[str, dict[str, float]] = {}
    for name, value in values.items():
        found[name] = {"value": float(value)}
        if name in estimates and rows:
            ends = basic_interval(
                float(value), float(estimates[name]), np.array([row[name] for row in rows]), bounds(name)
            )
            if ends is not None:
                found[name] |= {"low": ends[0], "high": ends[1]}
    return found


def said(number: Mapping[str, float | None], form: str = ".1%") -> str:
    """A number with its interval in words: `33.9% (95 % interval 33.1% to 34.8%)`."""
    value = number.get("value")
    if value is None:
        return "undefined"
    if number.get("low") is None:
        return format(value, form)
    return f"{value:{form}} (95 % interval {number['low']:{form}} to {number['high']:{form}})"
