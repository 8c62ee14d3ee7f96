"""Machine precision of Lemma 1 and Proposition 2 over random rows, and what must not vanish.

Residuals of distances are relative to the rows' own size, ‖clr p‖ + ‖clr q‖ (squared for Lemma 1).
"""

from __future__ import annotations

import numpy as np

from perpend.geometry import (
    aitchison_distance,
    aitchison_mean,
    aitchison_variance,
    closure,
    clr,
    content,
    content_dispersion,
    content_distance,
    dissimilarity,
    ilr,
    ilr_cosine,
    perturb,
    power,
    sink_balance,
    split_entropy,
)
from perpend.studies.simulation.checks import Check, Part, Settings, holds
from perpend.studies.simulation.sampler import rows, with_sink

ORDER = 50
TOLERANCE = 1e-12


def part(settings: Settings) -> Part:
    """The identities on rows of ordinary, nearly equal and sink-dominated kind, and the invariances."""
    import pandas as pd

    found = Part()
    count = max(500, settings.samples // 4)
    generator = np.random.default_rng(settings.generator_seed(ORDER))
    lines = []
    for kind, (p, q) in _kinds(generator, count).items():
        for name, worst in _lemma_1(p, q).items():
            lines.append((kind, name, worst))
    table = pd.DataFrame(lines, columns=["rows", "identity", "residual"])
    found.tables["residuals"] = table
    for name, group in table.groupby("identity", sort=False):
        worst = group.loc[group["residual"].idxmax()]
        found.checks.append(
            holds(
                "Lemma 1",
                f"{name}: largest residual",
                "0",
                float(worst["residual"]),
                most=TOLERANCE,
                note=f"on rows that are {worst['rows']}",
            )
        )
    found.checks += _proposition_2(generator, count)
    found.checks += _what_moves(generator)
    return found


def _kinds(generator: np.random.Generator, count: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    p, q = (rows(generator, count, 0.5, 0.1) for _ in range(2))
    near = closure(p * np.exp(1e-9 * generator.standard_normal(p.shape)))
    tiny = 10.0 ** generator.uniform(-15, -8, (2, count))
    heavy = [with_sink(1 - t, content(x)) for t, x in zip(tiny, (p, q))]
    flat = [closure(1 + 1e-9 * generator.standard_normal(p.shape)) for _ in range(2)]
    return {
        "ordinary": (p, q),
        "nearly equal": (p, near),
        "all sink (s → 1)": tuple(heavy),
        "nearly uniform": tuple(flat),
    }


def _lemma_1(p: np.ndarray, q: np.ndarray) -> dict[str, float]:
    size = (clr(p) ** 2).sum(-1) + (clr(q) ** 2).sum(-1)
    whole = aitchison_distance(p, q) ** 2
    inner, block = content_distance(p, q) ** 2, [0, 1, 2]
    one = np.abs(whole - inner - (sink_balance(p) - sink_balance(q)) ** 2) / size
    parts = content_distance(p, q, block) ** 2 + (sink_balance(p, block) - sink_balance(q, block)) ** 2
    several = np.abs(whole - parts - aitchison_distance(p[:, block], q[:, block]) ** 2) / size
    split = split_entropy(p)
    chain = np.abs(split.total - split.binary - split.weighted_content) / np.maximum(1, split.total)
    coordinates = ilr(p)
    first = np.abs(coordinates[:, 0] - sink_balance(p)) / np.sqrt(size)
    rest = np.abs(np.linalg.norm(coordinates[:, 1:], axis=-1) - content_dispersion(p)) / np.sqrt(size)
    return {
        "d_A² = d_A⊥² + (Δb)²": float(one.max()),
        "the same with a sink block of 3": float(several.max()),
        "H = H_b(s) + (1−s)H(π)": float(chain.max()),
        "first ilr coordinate = b": float(first.max()),
        "‖other ilr coordinates‖ = C_A⊥": float(rest.max()),
    }


def _proposition_2(generator: np.random.Generator, count: int) -> list[Check]:
    p, q = (rows(generator, count, 0.5, 0.5, parts=16) for _ in range(2))
    bias = generator.normal(0, 3, p.shape)
    tau = float(generator.uniform(0.3, 3))
    size = np.linalg.norm(clr(p), axis=-1) + np.linalg.norm(clr(q), axis=-1)
    logits = np.log(np.stack([p, q]))

    def worst(a: np.ndarray, b: np.ndarray) -> float:
        return float((np.abs(a - b) / size).max())

    whole, inner, dispersion = aitchison_distance(p, q), content_distance(p, q), content_dispersion(p)
    biased, hot = logits + bias, logits / tau
    softmax_is_perturbation = np.abs(
        np.log(perturb(p, closure(np.exp(bias)))) - np.log(closure(np.exp(biased[0])))
    ).max()
    sinks = generator.uniform(0.01, 0.99, (2, count))
    moved = [with_sink(s, content(x)) for s, x in zip(sinks, (p, q))]
    kept = generator.permutation(16)[:6]
    projection = np.zeros((16, 16))
    projection[np.ix_(kept, kept)] = np.eye(6) - 1 / 6
    projected = np.linalg.norm((clr(p) - clr(q)) @ projection, axis=-1)
    variance = aitchison_variance(p)
    heads = power(np.stack([p, q]), np.array([[0.4], [2.5]]) * np.ones((2, count)))
    centers, hot_centers = aitchison_mean(np.stack([p, q])), aitchison_mean(heads)
    item = "Proposition 2"
    return [
        holds(
            item,
            "(i) C(e^{ℓ+u}) against p ⊕ C(e^u): log-probabilities",
            "0",
            float(softmax_is_perturbation),
            most=1e-11,
        ),
        holds(
            item,
            "(i) d_A under a shared bias",
            "invariant",
            worst(aitchison_distance(*biased, log=True), whole),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(i) d_A⊥ under a shared bias",
            "invariant",
            worst(content_distance(*biased, log=True), inner),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(ii) d_A under a temperature, times τ",
            "scales by 1/τ",
            worst(tau * aitchison_distance(*hot, log=True), whole),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(ii) d_A⊥ under a temperature, times τ",
            "scales by 1/τ",
            worst(tau * content_distance(*hot, log=True), inner),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(ii) C_A⊥ under a temperature, times τ",
            "scales by 1/τ",
            worst(tau * content_dispersion(hot[0], log=True), dispersion),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(ii) total variance under a temperature, times τ²",
            "scales by 1/τ²",
            abs(float(tau**2 * aitchison_variance(hot[0], log=True) / variance) - 1),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(ii) ρ_A under a temperature per head",
            "invariant",
            abs(float(ilr_cosine(*hot_centers) - ilr_cosine(*centers))),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(iii) d_A⊥ when both sinks change",
            "unchanged",
            worst(content_distance(*moved), inner),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(iii) C_A⊥ when the sink changes",
            "unchanged",
            worst(content_dispersion(moved[0]), dispersion),
            most=TOLERANCE,
        ),
        holds(
            item,
            "(iii) d_A when both sinks change",
            "changes",
            worst(aitchison_distance(*moved), whole),
            least=1e-3,
        ),
        holds(
            item,
            "(iv) d_A of a subcomposition against the projection in clr space",
            "0",
            worst(aitchison_distance(closure(p[:, kept]), closure(q[:, kept])), projected),
            most=TOLERANCE,
        ),
        holds(
            item, "(iv) and its excess over the whole", "≤ 0", float((projected - whole).max()), most=1e-12
        ),
    ]


def _what_moves(generator: np.random.Generator) -> list[Check]:
    """The qualifications of Proposition 2: what a bias moves, what row-wise temperatures move, ε-padding."""
    v = np.array([1.0, -2.0, 0.5, 0.5])
    p, q, c = (closure(np.exp(x)) for x in (v, -v, 2 * v))
    turn = float(ilr_cosine(perturb(c, p), perturb(c, q)) - ilr_cosine(p, q))
    dispersion = abs(float(content_dispersion(perturb(c, p)) - content_dispersion(p)))
    two = float(np.abs(content_dispersion(generator.dirichlet(np.ones(2), 200))).max())
    # A shared bias that favours one part sends every row to that corner: classical values vanish, d_A stays.
    push = closure(np.exp(np.array([40.0, 0, 0, 0])))
    vanish = max(
        float(dissimilarity(perturb(push, p), perturb(push, q), m))
        for m in ("cosine", "jensen_shannon", "euclidean")
    )
    heads = closure(np.exp(generator.normal(size=(2, 50, 8))))
    by_row = aitchison_mean(power(heads, generator.uniform(0.2, 5, (2, 50))))
    shift = abs(float(ilr_cosine(*by_row) - ilr_cosine(*aitchison_mean(heads))))
    witness_p, witness_r = np.array([0.9, 0.08, 0.02]), np.array([0.9, 0.02, 0.08])
    least = np.inf
    for k in (1, 2, 10, 61):
        epsilon = 1e-4 / k
        padded = [np.append((1 - k * epsilon) * x, np.full(k, epsilon)) for x in (witness_p, witness_r)]
        for metric in ("cosine", "jensen_shannon", "euclidean"):
            part_value = dissimilarity(*(closure(x[1:3]) for x in padded), metric)
            least = min(least, float(part_value - dissimilarity(*padded, metric)))
    item = "Proposition 2"
    return [
        holds(
            item,
            "(i) ρ_A of p = C(e^v), q = C(e^−v) after ⊕ C(e^2v), minus before",
            "from −1 to +1",
            turn,
            least=2 - 1e-12,
        ),
        holds(item, "(i) C_A⊥ under a shared bias, D = 4", "changes", dispersion, least=1e-3),
        holds(item, "(i) C_A⊥ at D = 2", "≡ 0", two, most=0),
        holds(
            item,
            "(i) largest classical value after a bias of 40 on one part",
            "→ 0, not invariant",
            vanish,
            most=1e-12,
        ),
        holds(item, "(ii) ρ_A of means under row-dependent temperatures", "changes", shift, least=1e-3),
        holds(
            item,
            "(v) ε-padded witness, D = 4 … 64: least excess of the subcomposition",
            "> 0, not dominant",
            float(least),
            least=1e-3,
        ),
    ]
