"""Figure 6: where on the triangle a third row q makes the cosine verdict of Table 1's (p, r) flip.

20,000 points q ~ Dirichlet(1, 1, 1) with all parts above 0.004; beside the sampled share, its quadrature.
"""

from __future__ import annotations

import numpy as np

from perpend.geometry import dissimilarity
from perpend.papers import published
from perpend.studies.simulation.checks import Part, Settings, holds, share
from perpend.studies.simulation.witness import CLASSICAL, P, R

ORDER = 90
LEAST = 0.004
SHOWN = 1500  # points in the figure


def flips(q: np.ndarray, metric: str) -> np.ndarray:
    """Whether "is q or r closer to p" differs between conventions, (n,) of bool."""
    kept, dropped = (
        np.sign(dissimilarity(P, q, metric, 0, policy) - dissimilarity(P, R, metric, 0, policy))
        for policy in ("keep", "drop")
    )
    return kept * dropped < 0


def quadrature(metric: str, side: int = 700) -> float:
    """The share of the trimmed triangle on which the verdict flips, by midpoints of a triangular grid."""
    i, j = np.meshgrid(np.arange(side), np.arange(side), indexing="ij")
    inside = i + j < side
    i, j = i[inside], j[inside]
    # Two kinds of small triangles, pointing up and down; their centroids.
    up = np.stack([i + 1 / 3, j + 1 / 3], axis=1)
    down = np.stack([i + 2 / 3, j + 2 / 3], axis=1)[i + j < side - 1]
    points = np.concatenate([up, down]) / side
    points = np.column_stack([points, 1 - points.sum(1)])
    return float(flips(LEAST + (1 - 3 * LEAST) * points, metric).mean())


def part(settings: Settings) -> Part:
    """The share for cosine beside the printed one, for JS and Euclid without, and points for the figure."""
    import pandas as pd

    generator = np.random.default_rng(settings.generator_seed(ORDER))
    q = np.empty((0, 3))
    while len(q) < settings.samples:
        drawn = generator.dirichlet(np.ones(3), settings.samples)
        q = np.concatenate([q, drawn[(drawn > LEAST).all(axis=1)]])
    q = q[: settings.samples]
    entry = published("attention", "figure-6")["cosine"]
    flipped = {metric: flips(q, metric) for metric in CLASSICAL}
    rates = {metric: float(found.mean()) for metric, found in flipped.items()}
    exact = {metric: quadrature(metric) for metric in CLASSICAL}
    found = Part(results={"sampled": rates, "quadrature": exact})
    found.checks = [
        share("Figure 6", "share of q whose cosine verdict flips, %", entry, rates["cosine"], len(q)),
        # By quadrature our side has no sampling error worth the name.
        share("Figure 6", "the same by quadrature, %", entry, exact["cosine"], 10**12),
    ]
    half = 2.58 * np.sqrt(exact["cosine"] * (1 - exact["cosine"]) / len(q))
    found.checks.append(
        holds(
            "Figure 6", "sampled − quadrature", "0", rates["cosine"] - exact["cosine"], least=-half, most=half
        )
    )
    shown = pd.DataFrame(q[:SHOWN], columns=["sink", "first", "second"])
    for metric, flag in flipped.items():
        shown[metric] = flag[:SHOWN]
    found.tables["wedge"] = shown
    return found
