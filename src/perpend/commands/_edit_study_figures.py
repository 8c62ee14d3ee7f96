"""The figures of the audit, the gradient map and the head sensitivity of `perpend edit`."""

from __future__ import annotations

from typing import Any

import pandas as pd

from perpend.report import charts
from perpend.report.figure import Figure


def figures(run: Any) -> list[Figure]:
    """The figures of whichever of the three studies a run holds."""
    found: list[Figure] = []
    tables = run.tables
    if "diagonal" in tables:
        found += _diagonal(tables)
    if "linear" in tables:
        found += _gradient(tables)
    if "heads" in tables:
        found += _heads(tables)
    return found


def _by_layer(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of single layers; the row without a layer is all of them together."""
    return table[table["layer"].notna()].astype({"layer": int})


def _diagonal(tables: Any) -> list[Figure]:
    table = tables["diagonal"]
    layers = _by_layer(table)
    found = [
        Figure(
            "Change of the diagonal",
            "What would the edit have to do to A_tt, if it acted on the attention map?",
            charts.profile(
                layers,
                "median",
                series="form",
                low="q05",
                high="q95",
                label="change of A_tt",
                reference={"none": 0.0},
            ),
            table,
            "Median and the middle 90 % over tokens and heads. A value form realises the edit exactly; the "
            "residual forms are what comes nearest. Diagonals pushed below 0 or above 1 are in the table.",
        )
    ]
    if "audit" in tables:
        audit = tables["audit"]
        found.append(
            Figure(
                "Output after W_O",
                "How far does each edit move what attention adds to the stream?",
                charts.profile(
                    _by_layer(audit),
                    "norm_change",
                    series="site",
                    label="‖ỹ − y‖ / ‖y‖",
                    zero=True,
                ),
                audit,
                "Mean over tokens, each layer on the unedited stream. An edit can move the output far and "
                "cost little: size here is no measure of harm.",
            )
        )
    return found


def _gradient(tables: Any) -> list[Figure]:
    linear = tables["linear"]
    layers = _by_layer(linear)
    found = [
        Figure(
            "Linear reading and finite edit",
            "Where does the gradient say what an edit costs, and where does that break?",
            charts.scatter(
                layers,
                "linear",
                "finite",
                series="site",
                diagonal=True,
                x_label="read off the gradient (nats)",
                y_label="measured (nats)",
                tooltip=["layer", "low", "high"],
                form=".4f",
            ),
            linear,
            "A point is one layer's whole site, edited alone. On the dashed line the gradient "
            "is right; above it the edit costs more than its slope says.",
        )
    ]
    slopes = tables["slopes"]
    slopes = slopes[(slopes["scale"] == "parallel") & slopes["head"].notna()].copy()
    if len(slopes):
        slopes["head"] = slopes["head"].astype(int)
        found.append(
            Figure(
                "Slopes by head",
                "Which heads would the loss like to see scaled up, which down?",
                {
                    str(site): charts.heat(part, "slope", middle=0.0, label="∂loss/∂s∥", form=".4f")
                    for site, part in slopes.groupby("site")
                },
                slopes,
                "Derivative of the loss with respect to s∥ of one head, nats per token. Negative: the "
                "parallel part helps. Opposite signs within a layer cancel when all heads are edited.",
            )
        )
    return found


def _heads(tables: Any) -> list[Figure]:
    heads, layers = tables["heads"], tables["layers"]
    lines = pd.concat(
        [
            layers.assign(series="all heads together", change=layers["joint"], low=layers["joint_low"],
                          high=layers["joint_high"]),
            layers.assign(series="single heads, signed sum", change=layers["signed_sum"],
                          low=layers["smallest"], high=layers["largest"]),
        ]
    )  # fmt: skip
    return [
        Figure(
            "Heads alone and together",
            "Do the changes of single heads add up, or cancel?",
            charts.profile(
                lines[["layer", "series", "change", "low", "high"]],
                "change",
                series="series",
                low="low",
                high="high",
                label="change of the loss (nats)",
                reference={"unedited": 0.0},
            ),
            layers,
            "Band of the joint edit: its interval. Band of the single heads: from the smallest to the "
            "largest of them. Their distance from the joint line is the interaction.",
        ),
        Figure(
            "Single heads",
            "Which heads does the loss feel?",
            charts.heat(heads, "change", middle=0.0, label="change of the loss (nats)", form=".4f"),
            heads,
            "Each cell is one head edited alone. Both colours in one layer: heads that pull opposite ways.",
        ),
    ]
