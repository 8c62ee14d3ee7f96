"""Theorem 1: the threshold s* of the sink mass beyond which all classical verdicts reverse, and s_A.

For content π and s' fixed, p_s = (s, (1−s)π), q = (s', (1−s')π), r = (s, (1−s)τπ). s* is the supremum of the
s at which some classical verdict fails to reverse for some permutation τ with τπ ≠ π; with t = 1−s, u = 1−s':
    Euclid  ‖p−r‖ = t√(2Δ), ‖p−q‖ = (u−t)√(1+a)            a = ‖π‖², Δ = a − ⟨π, τπ⟩
    JS      JS(p, r) = t·JS(π, τπ), JS(p, q) = that of the two-part rows (s, t), (s', u)
    cosine  1 − c(p, r) = Δt²/((1−t)² + at²)
Full d_A turns at s_A: odds(s_A) = odds(s')·exp(B/α_D), B = d_A(π, τπ), α_D = √((D−1)/D).
"""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np

from perpend.geometry import aitchison_distance, dissimilarity
from perpend.studies.simulation.checks import TITLE, Check, Part, Settings, holds
from perpend.studies.simulation.witness import CLASSICAL

ORDER = 20
_GRID = 800  # points of t = 1−s, evenly spread in log t, in which the last failure is looked for
_DEEPEST = 1e-9


def rearrangements(content: np.ndarray) -> np.ndarray:
    """All distinct permutations τπ ≠ π, (n, parts)."""
    orders = {tuple(content[list(order)]) for order in permutations(range(len(content)))}
    orders.discard(tuple(content))
    return np.array(sorted(orders))


def margins(t: np.ndarray, content: np.ndarray, other_sink: float, metric: str) -> np.ndarray:
    """Worst over τ of d(p_s, r_τ) − d(p_s, q), for t = 1−s (n,): negative where all verdicts are reversed."""
    p = _row(1 - t, t, content)
    to_q = dissimilarity(p, _row(np.array([other_sink]), np.array([1 - other_sink]), content), metric)
    turned = np.stack([_row(1 - t, t, one) for one in rearrangements(content)])
    return dissimilarity(p, turned, metric).max(0) - to_q


def threshold(content: np.ndarray, other_sink: float, metric: str) -> float:
    """The last s at which this metric's verdict fails for some τ; beyond it all are reversed.

    The last failure on a fine grid of log t, then bisection between it and the point after.
    """
    t = np.geomspace(_DEEPEST, 1 - other_sink, _GRID)
    fails = margins(t, content, other_sink, metric) >= 0
    first = int(fails.argmax())
    if first == 0:
        raise ArithmeticError(f"no reversal up to s = 1 − {_DEEPEST}: {TITLE[metric]} at {content}")
    good, bad = t[first - 1], t[first]
    for _ in range(60):
        middle = (good + bad) / 2
        if margins(np.array([middle]), content, other_sink, metric)[0] >= 0:
            bad = middle
        else:
            good = middle
    return 1 - bad


def euclidean_threshold(content: np.ndarray, other_sink: float) -> float:
    """Its closed form: t√(2Δ) = (u−t)√(1+a) at the τ with the largest Δ."""
    a, u = float(content @ content), 1 - other_sink
    delta = a - float((rearrangements(content) @ content).min())
    return 1 - u * math.sqrt(1 + a) / (math.sqrt(2 * delta) + math.sqrt(1 + a))


def aitchison_cutoff(content: np.ndarray, turned: np.ndarray, other_sink: float) -> float:
    """s_A, below which full d_A ranks q closer."""
    alpha = math.sqrt(len(content) / (len(content) + 1))
    odds = other_sink / (1 - other_sink) * math.exp(float(aitchison_distance(content, turned)) / alpha)
    return odds / (1 + odds)


def part(settings: Settings) -> Part:
    """s* and s_A for the witness and for random contents of up to five parts (D ≤ 6); flips at both."""
    import pandas as pd

    found, lines = Part(), []
    generator = np.random.default_rng(settings.generator_seed(ORDER))
    cases = [("witness", np.array([0.8, 0.2]), 0.7)]
    cases += [
        (f"random, D = {parts + 1}", generator.dirichlet(np.ones(parts)), float(generator.uniform(0.1, 0.9)))
        for parts in (2, 3, 4, 5)
    ]
    for name, content, other in cases:
        by_metric = {metric: threshold(content, other, metric) for metric in CLASSICAL}
        s_star = max(by_metric.values())
        beyond = np.geomspace(_DEEPEST, (1 - s_star) * (1 - 1e-7), 200)
        worst_beyond = max(float(margins(beyond, content, other, metric).max()) for metric in CLASSICAL)
        at = np.array([(1 - s_star) * (1 + 1e-7)])
        worst_before = max(float(margins(at, content, other, metric)[0]) for metric in CLASSICAL)
        item = "Theorem 1"
        found.checks += [
            holds(
                item,
                f"{name}: worst margin beyond s* = {s_star:.6f}",
                "< 0, all reversed",
                worst_beyond,
                most=-1e-300,
            ),
            holds(
                item,
                f"{name}: worst margin just before s*",
                "≥ 0, some not reversed",
                worst_before,
                least=0.0,
            ),
            holds(
                item,
                f"{name}: s* of Euclid − closed form",
                "0",
                abs(by_metric["euclidean"] - euclidean_threshold(content, other)),
                most=1e-9,
            ),
        ]
        turned = rearrangements(content)[0]
        cutoff = aitchison_cutoff(content, turned, other)
        found.checks += _turns_at(name, content, turned, other, cutoff)
        lines.append((name, len(content) + 1, other, *by_metric.values(), s_star, cutoff))
    found.checks.append(
        holds(
            "Theorem 1",
            "Table 1's s = 0.9 lies beyond s* and below s_A",
            "holds",
            float(lines[0][6] < 0.9 < lines[0][7]),
            least=1,
        )
    )
    columns = [
        "case",
        "parts",
        "other_sink",
        *(f"s_{metric}" for metric in CLASSICAL),
        "s_star",
        "s_aitchison",
    ]
    found.tables["thresholds"] = pd.DataFrame(lines, columns=columns)
    found.results = {"witness": dict(zip(columns[2:], lines[0][2:]))}
    found.findings.append(
        f"For Table 1's content all three classical verdicts reverse from s* = {lines[0][6]:.4f} on; full "
        f"d_A keeps its verdict up to s_A = {lines[0][7]:.4f}."
    )
    found.tables["margins"] = _curves(np.array([0.8, 0.2]), 0.7)
    return found


def _turns_at(name: str, content: np.ndarray, turned: np.ndarray, other: float, cutoff: float) -> list[Check]:
    q = _row(np.array([other]), np.array([1 - other]), content)
    gaps = []
    for t in ((1 - cutoff) * (1 + 1e-6), (1 - cutoff) * (1 - 1e-6)):
        s = np.array([1 - t])
        p, r = _row(s, np.array([t]), content), _row(s, np.array([t]), turned)
        gaps.append(float((aitchison_distance(p, r) - aitchison_distance(p, q))[0]))
    return [
        holds(
            "Theorem 1",
            f"{name}: d_A ranks q closer just below s_A = {cutoff:.6f}",
            "> 0",
            gaps[0],
            least=1e-300,
        ),
        holds("Theorem 1", f"{name}: and r closer just above", "< 0", gaps[1], most=-1e-300),
    ]


def _curves(content: np.ndarray, other: float):
    """d(p, q) and d(p, r) along s for the figure."""
    import pandas as pd

    s = np.linspace(other + 0.001, 0.995, 120)
    p, r = _row(s, 1 - s, content), _row(s, 1 - s, content[::-1])
    q = _row(np.array([other]), np.array([1 - other]), content)
    frames = [
        pd.DataFrame(
            {
                "sink": s,
                "metric": metric,
                "to_q": dissimilarity(p, q, metric),
                "to_r": dissimilarity(p, r, metric),
            }
        )
        for metric in (*CLASSICAL, "aitchison")
    ]
    table = pd.concat(frames, ignore_index=True)
    table["margin"] = (table["to_r"] - table["to_q"]) / (table["to_r"] + table["to_q"])
    return table


def _row(s: np.ndarray, t: np.ndarray, content: np.ndarray) -> np.ndarray:
    return np.concatenate([s[:, None], t[:, None] * content], axis=1)
