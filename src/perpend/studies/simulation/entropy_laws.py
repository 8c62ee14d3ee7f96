"""Proposition 1 for every D and its sharpness; Corollary 1: what the sink alone does to the entropy.

H(p) = H_b(s) + (1−s)H(π) falls in s from θ_π = 1/(1 + e^H(π)) < ½ on, whatever the content; C_A⊥ stays.
"""

from __future__ import annotations

import math

import numpy as np

from perpend.geometry import closure, content_dispersion, entropy, split_entropy
from perpend.studies.simulation.checks import Check, Part, Settings, holds

ORDER = 40


def part(settings: Settings) -> Part:
    """Inversions of H against H(π), the maximizer, the monotone fall, and curves for the figure."""
    import pandas as pd

    generator = np.random.default_rng(settings.generator_seed(ORDER))
    found = Part(checks=_inversions(generator) + _corollary_1(generator))
    s = np.linspace(0.001, 0.999, 200)
    frames = []
    for name, pi in (
        ("uniform content", np.full(63, 1 / 63)),
        ("peaked content", closure(np.exp(-np.arange(63) / 4))),
    ):
        family = np.concatenate([s[:, None], (1 - s)[:, None] * pi], axis=1)
        theta = 1 / (1 + math.exp(float(entropy(pi))))
        frames.append(
            pd.DataFrame(
                {
                    "sink": s,
                    "content": name,
                    "entropy": entropy(family),
                    "content_entropy": float(entropy(pi)),
                    "dispersion": content_dispersion(family),
                    "theta": theta,
                }
            )
        )
    found.tables["entropy_against_sink"] = pd.concat(frames, ignore_index=True)
    return found


def _inversions(generator: np.random.Generator) -> list[Check]:
    """Proposition 1: inversions at every D ≥ 3 (Appendix B's family), none at equal sinks, none at D = 2."""
    least = math.inf
    for parts in range(3, 129):
        m, epsilon, s = parts - 1, 1e-3 / parts, 1 - 0.1 / math.log(parts)
        p = np.append(s, np.full(m, (1 - s) / m))
        q = np.append(0.5, 0.5 * np.append(1 - (m - 1) * epsilon, np.full(m - 1, epsilon)))
        first, second = split_entropy(p), split_entropy(q)
        least = min(least, float(second.total - first.total), float(first.content - second.content))
    residual, inverted = 0.0, 0
    for parts in (3, 4, 8, 64):
        pi, eta = generator.dirichlet(np.ones(parts - 1), (2, 500))
        s = generator.uniform(0.01, 0.99, (500, 1))
        high, low = (split_entropy(np.concatenate([s, (1 - s) * x], axis=1)) for x in (pi, eta))
        gap, inner = high.total - low.total, high.content - low.content
        residual = max(residual, float(np.abs(gap - (1 - s[:, 0]) * inner).max()))
        inverted += int((gap * inner < -1e-18).sum())
    two = split_entropy(generator.dirichlet(np.ones(2), 500)).content
    item = "Proposition 1"
    return [
        holds(
            item,
            "D = 3 … 128: least gap of H and of H(π), opposite ways",
            "> 0 at every D ≥ 3",
            least,
            least=1e-6,
        ),
        holds(item, "equal sinks: H(p)−H(q) − (1−s)(H(p')−H(q'))", "0", residual, most=1e-13),
        holds(item, "equal sinks: inversions among 2,000 pairs", "0 (sharp)", inverted, most=0),
        holds(item, "D = 2: largest content entropy", "0, so no inversion", float(np.abs(two).max()), most=0),
    ]


def _corollary_1(generator: np.random.Generator) -> list[Check]:
    from scipy.optimize import minimize_scalar

    worst, rises, moved, largest_theta = 0.0, 0, 0.0, 0.0
    grid = np.linspace(0.5, 0.9999, 300)
    for parts in (3, 4, 8, 16, 64):
        for pi in generator.dirichlet(np.full(parts - 1, 0.7), 20):
            pi = closure(np.clip(pi, 1e-9, None))
            theta = 1 / (1 + math.exp(float(entropy(pi))))
            peak = minimize_scalar(
                lambda s, pi=pi: -float(entropy(np.append(s, (1 - s) * pi))),
                bounds=(1e-6, 1 - 1e-6),
                method="bounded",
                options={"xatol": 1e-11},
            )
            worst, largest_theta = max(worst, abs(float(peak.x) - theta)), max(largest_theta, theta)
            line = np.concatenate([grid[:, None], (1 - grid)[:, None] * pi], axis=1)
            rises += int((np.diff(entropy(line)) >= 0).sum())
            dispersion = content_dispersion(line)
            moved = max(moved, float(np.ptp(dispersion) / dispersion.mean()))
    reached, uniform_theta = 1.0, 0.0
    for parts in (3, 8, 64):
        pi = np.full(parts - 1, 1 / (parts - 1))
        start, end = np.append(1 / parts, (1 - 1 / parts) * pi), np.append(1 - 1e-9, 1e-9 * pi)
        reached = min(reached, float(entropy(start) - entropy(end)) / math.log(parts))
        uniform_theta = max(uniform_theta, abs(1 / (1 + math.exp(float(entropy(pi)))) - 1 / parts))
    item = "Corollary 1"
    return [
        # A maximum is flat: its place is found to the root of the rounding of its value.
        holds(
            item, "found maximizer of s ↦ H(s, (1−s)π) against θ_π = 1/(1+e^H(π))", "θ_π", worst, most=1e-6
        ),
        holds(item, "largest θ_π", "< 1/2", largest_theta, most=0.5),
        holds(item, "steps on [½, 1) on which H does not fall", "0, strictly decreasing", rises, most=0),
        holds(item, "relative change of C_A⊥ on the way", "0, constant", moved, most=1e-12),
        holds(item, "uniform content: θ against 1/D", "0", uniform_theta, most=1e-15),
        holds(item, "uniform content: collapse over log D, at C_A⊥ ≡ 0", "→ 1", reached, least=1 - 1e-6),
    ]
