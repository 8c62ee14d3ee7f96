"""The figures of `perpend simulate`, from its run folder: Figures 1, 2, 3 and 6 and the theorems'."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from perpend.report import charts
from perpend.report.figure import Figure

NAMES = {
    "cosine": "cosine",
    "jensen_shannon": "JS",
    "euclidean": "Euclid",
    "hellinger": "Hellinger",
    "aitchison": "d_A",
    "content": "d_A⊥",
}


def figures(run: Any) -> list[Figure]:
    """Comparison first, then the paper's figures in its order, then the laws and the residuals."""
    return [
        _comparison(run.tables["comparison"]),
        _witness(run.tables["witness"]),
        _margins(run.tables["margins"], run.results),
        _scenarios(run.tables["scenarios"]),
        *_calibration(run.tables["calibration"], run.tables["models"]),
        _wedge(run.tables["wedge"]),
        _bands(run.tables["bands"]),
        _entropy(run.tables["entropy_against_sink"]),
        _laws(run.tables["laws"]),
        _residuals(run.tables["residuals"]),
    ]


def _comparison(checks: pd.DataFrame) -> Figure:
    drawn = checks[checks["kind"] == "sampled"].copy()
    paper = drawn["paper"].astype(float)
    drawn["distance"] = (paper - drawn["measured"]) / ((drawn["high"] - drawn["low"]) / 2)
    drawn["number"] = drawn["item"] + ": " + drawn["quantity"]
    return Figure(
        "Printed numbers against recomputed ones",
        "Do the paper's sampled numbers lie within the sampling error of both sides?",
        charts.bars(
            drawn,
            "distance",
            by="number",
            label="(printed − measured) / half the 99 % interval",
            reference={"+1": 1.0, "−1": -1.0},
        ),
        checks,
        "One bar a printed number; within ±1 it is reproduced. Exact numbers and statements are in "
        "the table.",
    )


def _witness(witness: pd.DataFrame) -> Figure:
    table = witness.copy()
    table["metric"] = table["metric"].map(NAMES)
    table["pair"] = table["pair"].map({"pq": "p to q", "pr": "p to r"})

    def side(policy: str) -> Any:
        part = table[table["policy"] == policy]
        # Each metric on its own scale: what is compared is q against r.
        largest = table.groupby("metric")["value"].transform("max")
        part = part.assign(share=part["value"] / largest[part.index])
        return charts.bars(part, "share", by="metric", series="pair", label="over the metric's largest")

    return Figure(
        "The witness (Table 1, Figure 1)",
        "Which of q and r is closer to p, with the sink and without?",
        {"sink kept": side("keep"), "sink dropped": side("drop")},
        witness,
        "p and q divide their content identically, r the other way round, and p and r share a large sink. "
        "The shorter bar is the closer row: it changes for the three classical metrics and stays for d_A.",
    )


def _margins(margins: pd.DataFrame, results: Any) -> Figure:
    table = margins.copy()
    table["metric"] = table["metric"].map(NAMES)
    found = results["threshold"]["witness"]
    return Figure(
        "From which sink mass on verdicts reverse (Theorem 1)",
        "How does the verdict between q and r move as the shared sink grows?",
        charts.profile(
            table,
            "margin",
            x="sink",
            series="metric",
            label="(d(p, r) − d(p, q)) / sum",
            x_label="sink mass s of p and r",
            reference={"neither": 0.0},
            points=False,
        ),
        margins,
        f"Above 0 q is closer, as it is without the sink; below 0 the verdict is reversed. All classical "
        f"ones are from s* = {found['s_star']:.4f} on; full d_A turns at s_A = {found['s_aitchison']:.4f}.",
    )


def _scenarios(scenarios: pd.DataFrame) -> Figure:
    def side(name: str) -> Any:
        part = scenarios[scenarios["scenario"] == name].copy()
        # Each curve over its own largest value, so that the three can be seen together.
        shown = {"total": "H", "content": "H(π)", "dispersion": "C_A⊥"}
        for column in shown:
            part[column] = part[column] / scenarios[column].max()
        part["s"] = part["sink_mass"]
        return charts.profile(part, {**shown, "s": "sink mass"}, label="over the largest of both scenarios")

    return Figure(
        "Two collapses (Figure 2)",
        "Does a falling entropy mean that the content collapses?",
        {"(a) only the sink grows": side("a"), "(b) the content collapses, the sink recedes": side("b")},
        scenarios,
        "In (a) H falls by about 70 % while H(π) and C_A⊥ do not move. In (b) H hardly moves while the "
        "content collapses: H(π) falls and C_A⊥ rises.",
    )


def _calibration(curve: pd.DataFrame, models: pd.DataFrame) -> list[Figure]:
    table = curve.copy()
    table["metric"] = table["metric"].map(NAMES)

    def side(alpha: float) -> Any:
        part = table[(table["alpha"] - alpha).abs() < 1e-9]
        return charts.profile(
            part,
            "rate",
            x="sink",
            series="metric",
            low="low",
            high="high",
            label="share of verdicts that reverse",
            x_label="mean sink mass",
            zero=True,
        )

    def on_curve(metric: str) -> Any:
        points = models[models["metric"] == metric].rename(columns={"sink_signature": "sink"})
        under = curve[(curve["metric"] == metric) & ((curve["alpha"] - 0.1).abs() < 1e-9)]
        return charts.scatter(
            points,
            "sink",
            "rate",
            curve=under[["sink", "rate", "low", "high"]],
            curve_low="low",
            curve_high="high",
            name="title",
            x_label="sink mass of the signatures",
            y_label="share of verdicts that reverse",
            tooltip=["expected", "deviation"],
        )

    shown = ("cosine", "jensen_shannon", "euclidean", "hellinger")
    return [
        Figure(
            "Calibration curves (Figure 3)",
            "How often do closer-head verdicts reverse on synthetic rows of a given sink mass?",
            {"peaked content, α = 0.1": side(0.1), "diffuse content, α = 1": side(1.0)},
            curve,
            "Sampled triples of synthetic rows with the 99 % Monte Carlo band. 0.5 would be chance; d_A⊥ "
            "never reverses; d_A means full d_A against d_A⊥.",
        ),
        Figure(
            "The paper's models on the curve (Table 2)",
            "Do measured models reverse as often as synthetic rows of their sink mass?",
            {NAMES[metric]: on_curve(metric) for metric in shown},
            models,
            "Points are the printed rates at the sink mass of each model's signatures; the curve is for "
            "peaked content. Beyond its ends the deviation is taken from the curve's last value.",
        ),
    ]


def _wedge(wedge: pd.DataFrame) -> Figure:
    table = wedge.copy()
    table["across"] = table["second"] + table["sink"] / 2
    table["up"] = table["sink"] * math.sqrt(3) / 2

    def side(metric: str) -> Any:
        part = table.assign(verdict=table[metric].map({True: "reverses", False: "stands"}))
        return charts.scatter(
            part,
            "across",
            "up",
            series="verdict",
            x_label="first content part ← → second content part",
            y_label="sink ↑",
            tooltip=["sink", "first", "second"],
        )

    return Figure(
        "The reversal wedge (Figure 6)",
        "For which third row q does the verdict of the witness pair reverse?",
        {NAMES[metric]: side(metric) for metric in ("cosine", "jensen_shannon", "euclidean")},
        wedge,
        "The triangle of rows with three parts, sink on top; each point is a q. The verdict 'is q or r "
        "closer to p' differs between conventions at the points that reverse.",
    )


def _bands(bands: pd.DataFrame) -> Figure:
    def side(metric: str) -> Any:
        part = bands[bands["metric"] == metric]
        lines = {
            "supremum": "bound",
            "loose": "looser bound",
            "random_max": "largest of random pairs",
            "extremal_6": "extremal pair, δ = 1e-6",
        }
        return charts.profile(
            part, lines, x="sink", label=NAMES[metric], x_label="least sink mass s₀", log_y=True
        )

    return Figure(
        "Vanishing bands (Theorem 3)",
        "How far apart can two rows be once both have a sink of at least s₀?",
        {NAMES[metric]: side(metric) for metric in ("cosine", "jensen_shannon", "euclidean")},
        bands,
        "All pairs lie below the bound, which extremal pairs approach; it goes to zero with 1 − s₀. The "
        "content distance has no such bound.",
    )


def _entropy(table: pd.DataFrame) -> Figure:
    return Figure(
        "What the sink alone does to the entropy (Corollary 1)",
        "How does H move when only the sink grows?",
        charts.profile(
            table,
            "entropy",
            x="sink",
            series="content",
            label="H (nats)",
            x_label="sink mass",
            points=False,
            zero=True,
        ),
        table,
        "The content is the same all along each curve, so H(π) and C_A⊥ are constant; H peaks at "
        "θ = 1/(1 + e^H(π)) and then falls towards 0.",
    )


def _laws(laws: pd.DataFrame) -> Figure:
    table = laws.copy()
    kept = table["kept"].astype(str).map({"True": 1.0, "False": 0.0})
    table["keeps it"] = kept
    table["measure"] = table["title"]
    table["counter_example"] = table["counter_example"].fillna("none")
    return Figure(
        "Who keeps which law",
        "Which of the axioms and invariances does each measure have?",
        charts.heat(
            table,
            "keeps it",
            x="law",
            y="measure",
            domain=(0, 1),
            form=".0f",
            tooltip=["statement", "counter_example"],
        ),
        laws,
        "1: kept on all rational draws; 0: broken, with the counter-example on hover as whole numbers over "
        "their sum; grey: undefined. Part one is the sink.",
    )


def _residuals(residuals: pd.DataFrame) -> Figure:
    shown = residuals.assign(units=residuals["residual"] / 1e-15)
    return Figure(
        "Identities to machine precision",
        "How exactly do Lemma 1 and the chain rule hold in float64?",
        charts.bars(
            shown, "units", by="identity", series="rows", label="largest residual / 1e-15", form=".2f"
        ),
        residuals,
        "The largest residual over random rows of each kind, relative to the rows' own size. The tolerance "
        "is 1e-12, a thousand of the units shown.",
    )
