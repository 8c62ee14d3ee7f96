"""Figure 2: two scenarios of twelve layers in which the entropy H says "collapse" for opposite reasons.

    (a) only the sink grows: s_ℓ = 0.05 + 0.80·ς(1.1(ℓ − 5)), content Dirichlet(0.15) throughout
    (b) the content collapses while the sink recedes: s_ℓ linear 0.70 → 0.05, α_ℓ geometric 1.0 → 0.02
4,000 rows a layer, noise 0.03 on s. Source: Appendix E.4.
"""

from __future__ import annotations

import numpy as np

from perpend.geometry import content_dispersion, split_entropy
from perpend.papers import published
from perpend.studies.simulation.checks import Part, Settings, holds, sampled
from perpend.studies.simulation.sampler import rows

ORDER = 80
LAYERS = 12
NOISE = 0.03


def scenario(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean sink mass and content α by layer, each (12,), of scenario "a" or "b"."""
    layer = np.arange(LAYERS)
    if name == "a":
        return 0.05 + 0.80 / (1 + np.exp(-1.1 * (layer - 5))), np.full(LAYERS, 0.15)
    return np.linspace(0.70, 0.05, LAYERS), np.geomspace(1.0, 0.02, LAYERS)


def part(settings: Settings) -> Part:
    """Both scenarios by layer, and their ends beside the printed ones."""
    import pandas as pd

    found, lines = Part(), []
    count = max(50, settings.samples // 5)
    for which, name in enumerate("ab"):
        for layer, (sink, alpha) in enumerate(zip(*scenario(name))):
            generator = np.random.default_rng(settings.generator_seed(ORDER, which, layer))
            x = rows(generator, count, sink, alpha, spread=NOISE)
            split, dispersion = split_entropy(x), content_dispersion(x)
            stats = [(v.mean(), v.std() / np.sqrt(count)) for v in (split.total, split.content, dispersion)]
            lines.append(
                (
                    name,
                    layer,
                    sink,
                    float(split.sink_mass.mean()),
                    alpha,
                    *(float(x) for pair in stats for x in pair),
                )
            )
    columns = ["scenario", "layer", "sink", "sink_mass", "alpha"]
    columns += [f"{q}{e}" for q in ("total", "content", "dispersion") for e in ("", "_se")]
    table = pd.DataFrame(lines, columns=columns)
    found.tables["scenarios"] = table
    paper = published("attention", "figure-2")
    for entry in paper.entries.values():
        mine = table[table["scenario"] == entry.more["scenario"]]
        if entry.more["quantity"] == "collapse":
            continue
        line = mine.iloc[0 if entry.more["layer"] == "first" else -1]
        quantity, se = entry.more["quantity"], float(line[f"{entry.more['quantity']}_se"])
        shown = "H" if quantity == "total" else "C_A⊥"
        # The paper's side has the same spread, over its own number of rows.
        paper_se = se * np.sqrt(count / (entry.trials or count))
        found.checks.append(
            sampled(
                "Figure 2",
                f"({entry.more['scenario']}) {shown}, {entry.more['layer']} layer",
                entry,
                float(line[quantity]),
                se,
                paper_se,
            )
        )
    a, b = (table[table["scenario"] == name] for name in "ab")
    fall = 100 * (1 - a["total"].iloc[-1] / a["total"].iloc[0])
    slack = 100 * float(a["total_se"].iloc[-1] / a["total"].iloc[0])
    found.checks.append(
        sampled("Figure 2", "(a) fall of H, %", paper["a/collapse"], float(fall), slack, slack)
    )
    # Twelve means of equal expectation lie within about five standard errors of one another.
    wander, room = float(np.ptp(a["dispersion"])), 5 * float(a["dispersion_se"].max())
    rise = float(b["dispersion"].iloc[-1] - b["dispersion"].iloc[0])
    found.checks += [
        holds("Figure 2", "(a) C_A⊥: range over the layers", "flat", wander, most=room),
        holds("Figure 2", "(b) C_A⊥: last − first layer", "rises", rise, least=0.0),
    ]
    top = b.loc[b["dispersion"].idxmax()]
    if top["layer"] < LAYERS - 1:
        found.findings.append(
            f"In scenario (b) C_A⊥ does not rise all the way: it peaks at {top['dispersion']:.1f} in layer "
            f"{top['layer']:.0f} and ends at {b['dispersion'].iloc[-1]:.1f}: parts below 1e-12 are clipped."
        )
    return found
