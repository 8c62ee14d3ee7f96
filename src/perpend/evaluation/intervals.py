"""Intervals of scores and of paired differences, verdicts against a margin, and how many items they take."""

from __future__ import annotations

import math

import numpy as np

# two-sided 95 % and 90 % intervals; power 80 %, and 80 % for two one-sided tests both
Z95, Z90, Z80, Z_BOTH80 = 1.959963984540054, 1.6448536269514722, 0.8416212335729143, 1.2815515655446004


def wilson(successes: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Wilson interval of a proportion; a score that is a mean of fractions enters as its sum."""
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    # at 0 and n the bounds are exactly 0 and 1, up to rounding
    return (centre - half if successes > 0 else 0.0), (centre + half if successes < n else 1.0)


def newcombe(base: np.ndarray, other: np.ndarray, z: float) -> tuple[float, float]:
    """Interval of the difference other - base of two paired proportions (Newcombe 1998, method 10).

    From the two Wilson intervals and the correlation φ of the pairs (continuity-corrected), so it neither
    leaves [-1, 1] nor shrinks to nothing when no answer has changed. base, other: 0/1 per item.
    """
    n = len(base)
    both, only_other = float((base * other).sum()), float(((1 - base) * other).sum())
    only_base, none = float((base * (1 - other)).sum()), float(((1 - base) * (1 - other)).sum())
    p, q = other.mean(), base.mean()
    (low_p, high_p), (low_q, high_q) = wilson(other.sum(), n, z), wilson(base.sum(), n, z)
    margins = (both + only_other) * (only_base + none) * (both + only_base) * (only_other + none)
    phi = 0.0
    if margins > 0:
        cross = both * none - only_other * only_base
        phi = (max(cross - n / 2, 0.0) if cross > 0 else cross) / math.sqrt(margins)
    below = (p - low_p) ** 2 - 2 * phi * (p - low_p) * (high_q - q) + (high_q - q) ** 2
    above = (high_p - p) ** 2 - 2 * phi * (high_p - p) * (q - low_q) + (q - low_q) ** 2
    gap = p - q
    return max(-1.0, gap - math.sqrt(max(below, 0.0))), min(1.0, gap + math.sqrt(max(above, 0.0)))


def bootstrap(gap: np.ndarray, levels: tuple[float, ...], *, seed: int = 0, draws: int = 4000) -> list[tuple]:
    """Percentile intervals of the mean of per-item differences, items drawn with replacement."""
    rng = np.random.default_rng(seed)
    n = len(gap)
    means = np.concatenate(
        [gap[rng.integers(0, n, (min(200, draws - at), n))].mean(1) for at in range(0, draws, 200)]
    )
    return [tuple(np.quantile(means, [(1 - level) / 2, (1 + level) / 2])) for level in levels]


def items_for(variance: float, distance: float, z: float) -> float:
    """Items at which a difference with this per-item variance is resolved to `distance` with 80 % power."""
    if not distance > 0 or not math.isfinite(variance):
        return math.inf
    return math.ceil(variance * (z / distance) ** 2)


def verdict(narrow: tuple[float, float], wide: tuple[float, float], margin: float) -> str:
    """`narrow`: the 90 % interval, `wide`: the 95 % one."""
    if -margin < narrow[0] and narrow[1] < margin:
        return "equivalent"
    return "different" if wide[0] > 0 or wide[1] < 0 else "undecided"
