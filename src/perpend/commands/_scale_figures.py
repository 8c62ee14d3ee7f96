"""The figures of a study of scale, from its run folder."""

from __future__ import annotations

from typing import Any

import pandas as pd

from perpend.commands._attention_figures import over_curve
from perpend.report import charts
from perpend.report.figure import Figure

NAMES = {"cosine": "cosine", "jensen_shannon": "Jensen–Shannon", "euclidean": "Euclidean"}


def figures(run: Any) -> list[Figure]:
    """Sink against size, reversals over the calibration curve, taxonomies against the sink, predictions."""
    models = run.tables["models"]
    found = [_size(models), _reversals(run)]
    shown = models.dropna(subset=["classical_ari"])
    if len(shown):
        found.append(_taxonomies(shown))
    if run.results.get("predictions"):
        found.append(_predictions(run.results["predictions"]))
    return found


def _size(models: pd.DataFrame) -> Figure:
    names = {"row_mass": "rows", "signature_mass": "signatures"}
    panels = {
        f"Sink mass of {said}": charts.scatter(
            models,
            "parameters",
            column,
            name="model",
            series="family",
            x_label="parameters",
            y_label="sink mass",
            log_x=True,
        )
        for column, said in names.items()
    }
    ends = [f"{column}_{end}" for column in names for end in ("low", "high") if f"{column}_{end}" in models]
    return Figure(
        "Sink mass and size",
        "Does the sink grow with the number of parameters?",
        panels,
        models[["model", "family", "parameters", *names, *ends]],
        "One point a model, coloured by family; parameters on a logarithmic axis. Sizes are to be compared "
        "within a family: between families much else differs.",
    )


def _reversals(run: Any) -> Figure:
    points, curve = run.tables["calibration"], run.tables["calibration_curve"]
    return Figure(
        "Reversals and sink mass",
        "Do verdicts reverse as often as the sink mass alone would make them?",
        {
            said: over_curve(points, curve, metric, x_label="sink mass of signatures")
            for metric, said in NAMES.items()
        },
        points,
        "The curve is sampled from random heads with the sink mass on the horizontal axis and peaked content "
        "(α = 0.1); no model enters it. A model off the curve has heads that differ from random ones.",
    )


def _taxonomies(models: pd.DataFrame) -> Figure:
    return Figure(
        "Taxonomies and sink mass",
        "The more sink, the less do clusters of heads agree between conventions?",
        charts.scatter(
            models,
            "signature_mass",
            "classical_ari",
            name="model",
            series="family",
            x_label="sink mass of signatures",
            y_label="adjusted Rand index",
        ),
        models[["model", "signature_mass", "classical_ari", *(f"ari_{metric}" for metric in NAMES)]],
        "Agreement of the clusters kept with those dropped, mean of cosine, JS and Euclidean and over K of "
        "4, 6 and 8: 1 is the same partition, 0 what chance gives.",
    )


def _predictions(scored: Any) -> Figure:
    table = pd.DataFrame(
        [
            {
                "prediction": one["name"].replace("-", " "),
                "tau": one["numbers"].get("tau"),
                "outcome": one["outcome"],
                "statement": one["statement"],
                "rule": one["rule"],
                "why": one["why"],
            }
            for one in scored["scored"]
        ]
    )
    drawn = table.dropna(subset=["tau"])
    return Figure(
        "Predictions",
        f"What was predicted on {scored['written']}, before measuring, and did it come?",
        charts.bars(
            drawn.assign(tau=drawn["tau"].astype(float)),
            "tau",
            by="prediction",
            series="outcome",
            label="Kendall's τ",
            reference={"no order": 0.0},
        ),
        table,
        "Rank agreement over the pairs the rule names; for the taxonomies the prediction is −1, for the "
        "others +1. Statements, rules and outcomes stand in the table.",
    )
