"""Theorem 3: under a sink of at least s₀ the classical dissimilarities live in vanishing bands, content not.

    1 − c(p, q) < (1−s₀)²/(s₀² + (1−s₀)²)  ≤ ((1−s₀)/s₀)²
    ‖p − q‖     < √2 (1−s₀)                ≤ √5 (1−s₀)
    JS(p, q)    < (1−s₀) log 2             ≤ 3/2 (1−s₀)
The first bounds are suprema: p*, q* with sink s₀ and the rest on two different parts approach them.
"""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np

from perpend.geometry import content_dispersion, content_distance, dissimilarity
from perpend.papers import published
from perpend.studies.simulation.checks import TITLE, Check, Part, Settings, bound, holds
from perpend.studies.simulation.sampler import rows
from perpend.studies.simulation.witness import CLASSICAL

ORDER = 30
SINKS = (0.3, 0.5, 0.7, 0.8, 0.84, 0.9, 0.95, 0.99, 0.999)


def bounds(s0: float) -> dict[str, tuple[float, float]]:
    """metric → (supremum, the looser bound of the chain)."""
    rest = 1 - s0
    return {
        "cosine": (rest**2 / (s0**2 + rest**2), (rest / s0) ** 2),
        "euclidean": (math.sqrt(2) * rest, math.sqrt(5) * rest),
        "jensen_shannon": (rest * math.log(2), 1.5 * rest),
    }


def extremal_pair(s0: float, parts: int, delta: float) -> tuple[np.ndarray, np.ndarray]:
    """Rows with sink s₀ whose content is δ everywhere but on one part, a different one each."""
    content = np.full((2, parts - 1), delta)
    content[0, 0] = content[1, 1] = 1 - (parts - 2) * delta
    return tuple(np.append(s0, (1 - s0) * one) for one in content)


def part(settings: Settings) -> Part:
    """The bands at several s₀: random pairs inside, extremal pairs approaching, content unaffected."""
    import pandas as pd

    found, lines = Part(), []
    count = max(200, settings.samples // 4)
    generator = np.random.default_rng(settings.generator_seed(ORDER))
    for s0 in SINKS:
        p, q = (rows(generator, count, 0.5, 0.1, parts=8) for _ in range(2))
        # The same contents with sinks spread over [s₀, 1), most just above s₀, where the band is widest.
        for side in (p, q):
            mass = s0 + (1 - s0) * generator.beta(0.3, 3, count)
            side[:, 1:] *= ((1 - mass) / (1 - side[:, 0]))[:, None]
            side[:, 0] = mass
        for metric, (supremum, loose) in bounds(s0).items():
            seen = float(dissimilarity(p, q, metric).max())
            near = {
                delta: float(dissimilarity(*extremal_pair(s0, 8, delta), metric))
                for delta in (1e-3, 1e-6, 1e-12)
            }
            lines.append((s0, metric, supremum, loose, seen, *near.values()))
    columns = ["sink", "metric", "supremum", "loose", "random_max", "extremal_3", "extremal_6", "extremal_12"]
    table = pd.DataFrame(lines, columns=columns)
    found.tables["bands"] = table
    item = "Theorem 3"
    for metric in CLASSICAL:
        mine = table[table["metric"] == metric]
        extremal = mine[["extremal_3", "extremal_6", "extremal_12"]].to_numpy()
        ratio = float((mine["random_max"] / mine["supremum"]).max())
        found.checks += [
            holds(
                item, f"{TITLE[metric]}: largest random value over the bound", "< 1", ratio, most=1 - 1e-15
            ),
            holds(
                item,
                f"{TITLE[metric]}: extremal pairs over the bound",
                "< 1",
                float((extremal / mine[["supremum"]].to_numpy()).max()),
                most=1.0,
            ),
            holds(
                item,
                f"{TITLE[metric]}: their least ratio at δ = 1e-12",
                "→ 1",
                float((mine["extremal_12"] / mine["supremum"]).min()),
                least=1 - 1e-9,
            ),
            holds(
                item,
                f"{TITLE[metric]}: bound over the looser bound",
                "≤ 1",
                float((mine["supremum"] / mine["loose"]).max()),
                most=1.0,
            ),
        ]
    prose = published("attention", "prose")
    at = bounds(0.8)
    for metric, value in (
        ("cosine", 1 - at["cosine"][0]),
        ("euclidean", at["euclidean"][0]),
        ("jensen_shannon", at["jensen_shannon"][0]),
    ):
        found.checks.append(
            bound(item, f"{TITLE[metric]} band at s₀ = 0.8", prose[f"theorem-3/{metric}"], value)
        )
    found.checks += _content_unaffected(generator)
    return found


def _content_unaffected(generator: np.random.Generator) -> list[Check]:
    """d_A⊥ and C_A⊥ of the same contents while the sinks rise to 1, and unbounded at any fixed sink."""
    pi, eta = generator.dirichlet(np.ones(7), 2)
    distances, dispersions = [], []
    for s in (0.1, 0.5, 0.9, 0.999, 1 - 1e-9):
        p, q = np.append(s, (1 - s) * pi), np.append(s, (1 - s) * eta)
        distances.append(float(content_distance(p, q)))
        dispersions.append(float(content_dispersion(p)))
    reach = [float(content_distance(*extremal_pair(0.999, 8, delta))) for delta in (1e-3, 1e-6, 1e-12)]
    growth = min(b - a for a, b in pairwise(reach))
    item = "Theorem 3"
    return [
        holds(
            item,
            "d_A⊥ while s → 1: spread",
            "unaffected",
            max(distances) - min(distances),
            most=1e-12 * max(distances) * 10,
        ),
        holds(
            item,
            "C_A⊥ while s → 1: spread",
            "unaffected",
            max(dispersions) - min(dispersions),
            most=1e-12 * max(dispersions) * 10,
        ),
        holds(
            item,
            "d_A⊥ of the extremal pairs at s₀ = 0.999: least growth per decade pair",
            "unbounded",
            growth,
            least=1.0,
        ),
    ]
