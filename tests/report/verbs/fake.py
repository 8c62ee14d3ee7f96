"""A command that exists for tests only: a made-up survey with every kind of figure a report can hold.

It is added to perpend.commands as one file, as a user's own verb would be.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from perpend.options import run_options, verb

HOSTILE = "</script><img src=x onerror=alert(1)>{{7*7}}\"'<!--"


@verb("perpend fake --out runs/fake")
@run_options
def command(**options):
    """How much of each attention row is sink, and what the rest says.

    A second paragraph that is not the question.
    """


def make(run, layers: int = 12, heads: int = 8, keys: int = 64, seed: int = 0, hostile: bool = False) -> None:
    """Fills an open run with plausible numbers."""
    rng = np.random.default_rng(seed)
    grid = [(layer, head) for layer in range(layers) for head in range(heads)]
    depth = np.linspace(0, 1, layers)
    mass = 1 / (1 + np.exp(-(8 * depth[:, None] - 3 + rng.normal(0, 1.2, (layers, heads)))))
    rows = pd.DataFrame(grid, columns=["layer", "head"])
    rows["sink_mass"] = mass.ravel()
    rows["dispersion"] = rng.gamma(4, 2.5, layers * heads)
    rows.loc[3, "sink_mass"] = np.nan
    run.table("heads", rows)
    run.table(
        "layers",
        pd.DataFrame(
            {
                "layer": range(layers),
                "total": 3 - 1.8 * depth + rng.normal(0, 0.15, layers),
                "binary": 0.6 * np.sin(3 * depth) + 0.05,
                "weighted_content": 2.6 - 2 * depth,
                "low": 2.8 - 1.8 * depth,
                "high": 3.2 - 1.8 * depth,
                "disagree": rng.random(layers) > 0.75,
            }
        ),
    )
    metric = ["cosine", "jensen_shannon", "euclidean", "hellinger", "fisher_rao", "content", "aitchison"]
    rate = np.array([0.21, 0.17, 0.24, 0.16, 0.155, 0.0, 0.062])
    run.table(
        "reversal",
        pd.DataFrame(
            {
                "metric": [HOSTILE if hostile else metric[0], *metric[1:]],
                "mean": rate,
                "low": rate * 0.93,
                "high": rate * 1.07,
                "floor": rate * 0.3,
                "paper": rate * 1.1,
            }
        ),
    )
    signatures = np.log(rng.dirichlet(np.full(keys, 0.3), layers * heads) + 1e-9)
    run.array("signatures", signatures.reshape(layers, heads, keys))
    name = HOSTILE if hostile else "SmolLM2-135M-Instruct"
    run.finish(
        results={"sink": {"row_mass": float(np.nanmean(mass))}},
        conventions={
            "support": f"keys 0–{keys - 1}, queries from {keys}, rows re-closed",
            "sink": "first (key 0, no BOS)",
            "means": "Aitchison, weighted by rows",
            "entropy": "nats",
            "text": name,
        },
        findings=[
            f"The sink holds {np.nanmean(mass):.1%} of a row on average, from {mass[0].mean():.1%} in the "
            f"first layer to {mass[-1].mean():.1%} in the last (95 % interval of the mean 0.61–0.66).",
            "Dropping the sink changes 17.1 % of Jensen–Shannon verdicts (16.4–17.8 %); the split-half "
            "floor under one convention is 5.2 %.",
            "H and H(π) move in opposite directions on 27 % of layer steps: what looks like entropy collapse "
            f"in {name} is sink growth.",
        ],
        undefined={"layer 3, head 0": "the sink lies outside the window that this layer sees"},
    )


def figures(run):
    from scipy.cluster.hierarchy import linkage

    from perpend.report import Detail, Figure, charts

    heads, layers, reversal = run.tables["heads"], run.tables["layers"], run.tables["reversal"]
    signatures = run.arrays["signatures"]
    _, per_layer, keys = signatures.shape
    flat = np.exp(signatures.reshape(-1, keys))
    far = ((flat[:200, None] - flat[None, :200]) ** 2).sum(-1) ** 0.5
    np.fill_diagonal(far, np.inf)
    nearest = [
        [f"L{i // per_layer} H{i % per_layer} ({row[i]:.3f})" for i in np.argsort(row)[:3]]
        for row in (far[k % len(far)] for k in range(len(flat)))
    ]
    detail = heads.assign(
        signature=[row.round(5).tolist() for row in flat],
        content=[(row[1:] / row[1:].sum()).round(5).tolist() for row in flat],
        nearest_with_the_sink=nearest,
        nearest_without_it=nearest[::-1],
    )
    names = [f"L{layer} H{head}" for layer, head in zip(heads["layer"], heads["head"])]
    leaves = min(len(names), 300)
    trees = {
        policy: charts.dendrogram(
            linkage(data[:leaves], "average"),
            names[:leaves],
            groups=heads["layer"].tolist()[:leaves],
            keys={"layer": heads["layer"].tolist()[:leaves], "head": heads["head"].tolist()[:leaves]},
        )
        for policy, data in (("with the sink", flat), ("without it", flat[:, 1:]))
    }
    grid = pd.DataFrame(
        [(a, b) for a in np.linspace(-0.5, 2, 11).round(2) for b in np.linspace(0, 2, 9).round(2)]
    )
    grid.columns = ["parallel", "perpendicular"]
    grid["loss_rise"] = (grid["parallel"] - 1) ** 2 * 0.05 + (grid["perpendicular"] - 1) ** 2 * 2
    points = pd.DataFrame({"sink_mass": [0.2, 0.45, 0.7], "rate": [0.08, 0.15, 0.22]})
    points["model"] = ["a", "b", "this run"]
    points["source"] = ["paper", "paper", "this run"]
    curve = pd.DataFrame({"sink_mass": np.linspace(0, 1, 40)})
    curve["rate"] = curve["sink_mass"] * 0.32
    curve["low"], curve["high"] = curve["rate"] * 0.8, curve["rate"] * 1.2
    return [
        Figure(
            "Sink mass by head",
            "Which heads park their attention on the sink?",
            charts.heat(heads, "sink_mass", domain=(0, 1), tooltip=["dispersion"]),
            heads,
            "Each cell is a query head; depth runs to the right. Bright cells give most of a row to it. A "
            "column that is bright throughout is a layer that mostly idles.",
            detail=Detail(
                ("layer", "head"),
                detail,
                {
                    "Signature": charts.chosen_profile("signature", label="share of the row"),
                    "With and without the sink": charts.chosen_profile({"signature": "s", "content": "c"}),
                },
            ),
        ),
        Figure(
            "Entropy, split",
            "Where entropy falls, does the content narrow or does the sink grow?",
            charts.profile(
                layers, {"total": "H", "binary": "H_b(s)", "weighted_content": "(1−s) H(π)"}, label="nats"
            ),
            layers,
            "The two lower curves add up to the upper one exactly.",
            overlay=lambda t: charts.profile(t, "total", series="run", label="H in nats"),
        ),
        Figure(
            "Entropy with its interval",
            "How sure is the curve?",
            charts.profile(
                layers, "total", low="low", high="high", marks="disagree", reference={"log D": 4.16}
            ),
            layers,
            "The band is a bootstrap over blocks; rings mark steps on which H and H(π) disagree.",
        ),
        Figure(
            "Reversals by metric",
            "How often does dropping the sink change which of two heads is nearer?",
            charts.bars(
                reversal,
                "mean",
                by="metric",
                low="low",
                high="high",
                percent=True,
                ticks={"floor": "split-half floor", "paper": "the paper"},
                reference={"chance": 0.5},
            ),
            reversal,
            "Bars are shares of 50,000 triples; lines are 95 % intervals.",
        ),
        Figure(
            "On the calibration curve",
            "Is this model's rate what its sink mass predicts?",
            charts.scatter(
                points,
                "sink_mass",
                "rate",
                curve=curve,
                curve_low="low",
                curve_high="high",
                name="model",
                series="source",
            ),
            points,
            "Points on the band are explained by sink mass alone.",
        ),
        Figure(
            "Families of heads",
            "Which heads look alike, and does that depend on the sink?",
            trees,
            heads,
            "Dots are heads, coloured by layer; where branches meet is their distance.",
        ),
        Figure(
            "Edit surface",
            "How much loss does scaling each part cost?",
            charts.surface(
                grid,
                "loss_rise",
                x="parallel",
                y="perpendicular",
                mark={"parallel": 1.0, "perpendicular": 1.0},
            ),
            grid,
            "The ring is the unedited model.",
        ),
    ]
