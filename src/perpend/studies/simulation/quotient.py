"""Lemma 2 (d_A⊥ is the quotient minimum), Corollary 2, the mean as a minimiser, Proposition 3(i).

Whatever the paper calls a minimum is looked for by an optimiser that knows nothing of the closed form.
"""

from __future__ import annotations

import math

import numpy as np

from perpend.geometry import (
    aitchison_distance,
    aitchison_mean,
    closure,
    clr,
    content,
    content_distance,
    pairwise,
    perturb,
    power,
    sink_balance,
)
from perpend.studies.simulation.checks import Check, Part, Settings, holds

ORDER = 45


def part(settings: Settings) -> Part:
    """All statements of this module."""
    generator = np.random.default_rng(settings.generator_seed(ORDER))
    return Part(
        checks=_lemma_2(generator)
        + _corollary_2(generator, max(200, settings.samples // 10))
        + _mean_minimises(generator)
        + _same_matrices(generator)
    )


def _lemma_2(generator: np.random.Generator) -> list[Check]:
    from scipy.optimize import minimize

    gap, beaten, attained = 0.0, 0.0, 0.0
    for parts in (3, 5, 16):
        for _ in range(10):
            p, q = np.log(generator.dirichlet(np.ones(parts), 2))

            def squared(sinks: np.ndarray, p: np.ndarray = p, q: np.ndarray = q) -> float:
                rows = (np.append(sink, x[1:]) for sink, x in zip(sinks, (p, q)))
                return float(aitchison_distance(*rows, log=True)) ** 2

            found = math.sqrt(
                minimize(
                    squared, [0.0, 1.0], method="Nelder-Mead", options={"xatol": 1e-10, "fatol": 1e-16}
                ).fun
            )
            closed = float(content_distance(p, q, log=True))
            gap, beaten = max(gap, abs(found - closed) / closed), max(beaten, (closed - found) / closed)
            # Attained where the sinks' logits give equal balances.
            attained = max(attained, abs(math.sqrt(squared([p[1:].mean(), q[1:].mean()])) - closed) / closed)
    return [
        holds("Lemma 2", "optimised min d_A over all sinks against d_A⊥, relative", "0", gap, most=1e-6),
        holds("Lemma 2", "amount by which the search goes below it", "0, a minimum", beaten, most=1e-12),
        holds("Lemma 2", "d_A at equal balances against d_A⊥, relative", "0, attained", attained, most=1e-12),
    ]


def _corollary_2(generator: np.random.Generator, count: int) -> list[Check]:
    parts = 8
    p, q = generator.dirichlet(np.full(parts, 0.5), (2, count)) + 1e-9
    a, b = generator.uniform(0.01, 100, (2, count, 1))
    whole = aitchison_distance(p, q)
    scale = float((np.abs(aitchison_distance(a * p, b * q) - whole) / whole).max())
    excess, broken = -math.inf, 0
    for size in range(2, parts):
        kept = generator.permutation(parts)[:size]
        inner = aitchison_distance(closure(p[:, kept]), closure(q[:, kept]))
        excess = max(excess, float(((inner - whole) / whole).max()))
        broken += int((1.5 * inner > whole).sum())  # κ_m = 1.5 κ_D: no common constant, no dominance
    kappa = 2.5
    squares = (
        (kappa * whole) ** 2
        - (kappa * content_distance(p, q)) ** 2
        - (kappa * (sink_balance(p) - sink_balance(q))) ** 2
    )
    split = float((np.abs(squares) / (kappa * whole) ** 2).max())
    bias, tau = generator.dirichlet(np.ones(parts), count), 0.37
    shifted = aitchison_distance(perturb(p, bias), perturb(q, bias))
    heated = aitchison_distance(power(p, 1 / tau), power(q, 1 / tau))
    item = "Corollary 2"
    return [
        holds(item, "scale invariance: relative residual", "0", scale, most=1e-10),
        holds(item, "dominance with a common constant: largest relative excess", "≤ 0", excess, most=1e-12),
        holds(item, "dominance with κ_m = 1.5 κ_D: violations", "> 0", broken, least=1),
        holds(item, "sink decomposition with κ = 2.5: relative residual", "0", split, most=1e-12),
        holds(
            item,
            "shared bias: relative residual",
            "0",
            float((np.abs(shifted - whole) / whole).max()),
            most=1e-10,
        ),
        holds(
            item,
            "temperature: relative residual of d/τ",
            "0",
            float((np.abs(heated - whole / tau) / whole).max()),
            most=1e-10,
        ),
    ]


def _mean_minimises(generator: np.random.Generator) -> list[Check]:
    """The closed-form mean against a general-purpose minimiser of Σ d_A² in clr coordinates."""
    from scipy.optimize import minimize

    worst, better = 0.0, 0.0
    for parts in (3, 8, 20):
        x = generator.dirichlet(np.ones(parts), 12) + 1e-12
        points = clr(x)
        center = aitchison_mean(x)

        def cost(z: np.ndarray, points: np.ndarray = points) -> float:
            return float((aitchison_distance(np.exp(points), np.exp(z)) ** 2).sum())

        found = minimize(cost, np.zeros(parts), method="BFGS", options={"gtol": 1e-9})
        worst = max(worst, float(aitchison_distance(np.exp(found.x), center)))
        better = max(better, (cost(clr(center)) - found.fun) / found.fun)
    return [
        holds("Definition 1(a)", "d_A of the found minimiser of Σ d_A² to the mean", "0", worst, most=1e-4),
        holds("Definition 1(a)", "amount by which it beats the mean", "0", better, most=1e-12),
    ]


def _same_matrices(generator: np.random.Generator) -> list[Check]:
    """Proposition 3(i): content matrices are equal entrywise whether the sink is kept or dropped first."""
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import squareform

    x = generator.dirichlet(np.full(12, 0.5), 40) + 1e-9
    x /= x.sum(-1, keepdims=True)
    kept, dropped = pairwise(x, "content", sink=0), pairwise(x, "aitchison", sink=0, policy="drop")
    first = pairwise(content(x), "aitchison")
    trees = [
        linkage(squareform(kept), m) - linkage(squareform(dropped), m)
        for m in ("single", "average", "complete")
    ]
    item = "Proposition 3"
    return [
        holds(
            item,
            "(i) d_A⊥ with the sink kept − d_A after the drop, entrywise",
            "0",
            float(np.abs(kept - dropped).max()),
            most=0,
        ),
        holds(
            item,
            "(i) the same when rows are re-closed in between",
            "0",
            float(np.abs(kept - first).max()),
            most=1e-12,
        ),
        holds(
            item,
            "(i) the trees of three linkages",
            "identical",
            max(float(np.abs(t).max()) for t in trees),
            most=0,
        ),
    ]
