"""Figures of a survey's further readings: windows, conventions, weights, whole rows and single rows."""

from __future__ import annotations

from typing import Any

import pandas as pd

from perpend.report import charts
from perpend.report.figure import Figure

METRICS = {
    "cosine": "cosine",
    "jensen_shannon": "Jensen–Shannon",
    "euclidean": "Euclidean",
    "hellinger": "Hellinger",
    "content": "content d_A⊥",
    "aitchison": "full d_A against d_A⊥",
}
PAIRS = {
    "keep_drop": "keep and drop",
    "keep_drop_both": "keep and drop-both",
    "drop_drop_both": "drop and drop-both",
}
WEIGHTS = {"plain": "plain", "value": "by ‖v_j‖", "output": "by ‖W_O v_j‖"}


def figures(run: Any) -> list[Figure]:
    """One for each reading that the run has."""
    made = {
        "windows": _windows,
        "conventions": _conventions,
        "weights": _weights,
        "whole_rows": _whole_rows,
        "row_audit": _row_audit,
    }
    return [figure for name, make in made.items() if run.results.get(name) for figure in make(run)]


def _ends(table: pd.DataFrame, name: str) -> dict[str, str]:
    """The interval's columns, where there is one."""
    low, high = f"{name}_low", f"{name}_high"
    return {"low": low, "high": high} if low in table and table[low].notna().all() else {}


def _number(name: str, number: Any) -> dict[str, float | None]:
    return {name: number["value"], f"{name}_low": number.get("low"), f"{name}_high": number.get("high")}


def _windows(run: Any) -> list[Figure]:
    table = run.tables["windows"]
    shown = table.assign(metric=table["metric"].map(METRICS), window="W = " + table["window"].astype(str))
    kept = shown.drop_duplicates("window")
    between = run.tables["windows_between"]
    pairs = between  # of one window alone there is none
    if len(between):
        names = [f"{a} and {b}" for a, b in zip(between["first"], between["second"])]
        pairs = between.assign(windows=names)
    rates = Figure(
        "Windows",
        "Does it matter how many keys a row is re-closed on?",
        charts.bars(
            shown,
            "reversal",
            by="metric",
            series="window",
            **_ends(shown, "reversal"),
            label="verdicts that reverse",
            percent=True,
        ),
        table,
        f"Rows on the first W keys, from {run.results['windows']['queries']}: share of triples of heads "
        "whose verdict reverses when the sink is dropped, with intervals over sequences.",
    )
    panels = {
        "Mass of a whole row that a window holds": charts.bars(
            kept, "retained", by="window", **_ends(kept, "retained"), label="share of the row", percent=True
        )
    }
    if len(pairs):
        panels["Content distances of two windows"] = charts.bars(
            pairs,
            "spearman",
            by="windows",
            **_ends(pairs, "spearman"),
            label="Spearman ρ over pairs of heads",
        )
    return [
        rates,
        Figure(
            "Between windows",
            "How much of a row does a window hold, and do windows agree on which heads are alike?",
            panels,
            between if len(between) else kept,
            "The mass is what the window's keys hold of the row before re-closing, from the log-sum-exp of "
            "the whole row. The rank correlation is of d_A⊥ over all pairs of heads.",
        ),
    ]


def _conventions(run: Any) -> list[Figure]:
    table = run.tables["conventions"]
    shown = table.assign(metric=table["metric"].map(METRICS), between=table["between"].map(PAIRS))
    figure = Figure(
        "Three conventions",
        "Does it matter whether a dropped sink also leaves as a query?",
        charts.bars(
            shown,
            "reversal",
            by="metric",
            series="between",
            **_ends(shown, "reversal"),
            label="verdicts that reverse",
            percent=True,
        ),
        table,
        "Keep compares whole rows; drop removes the sink's column; drop-both its row as well, so that means "
        "are over other rows. Intervals over sequences.",
    )
    return [figure]


def _weights(run: Any) -> list[Figure]:
    table, layers = run.tables["weights"], run.tables["weights_layers"]
    named = table.assign(weight=table["weight"].map(WEIGHTS))
    rates = named[named["quantity"].str.startswith("reversal_")]
    rates = rates.assign(metric=rates["quantity"].str.removeprefix("reversal_").map(METRICS))
    by_layer = layers.assign(weight=layers["weight"].map(WEIGHTS))
    figure = Figure(
        "Value-weighted rows",
        "Do rows tell the same story once each key counts by the size of its value?",
        {
            "Sink share of a row": charts.profile(
                by_layer, "sink_mass", series="weight", label="share", zero=True
            ),
            "Row entropy": charts.profile(by_layer, "total", series="weight", label="H (nats)", zero=True),
            "Content entropy": charts.profile(
                by_layer, "content", series="weight", label="H(π) (nats)", zero=True
            ),
            "Verdicts that reverse": charts.bars(
                rates,
                "value",
                by="metric",
                series="weight",
                **_ends(rates, "value"),
                label="share of triples",
                percent=True,
            ),
        },
        table,
        "The same rows with each key's share multiplied by the size of its value (or of what it adds to the "
        "stream) and closed again. A sink of small values shrinks.",
    )
    return [figure]


def _whole_rows(run: Any) -> list[Figure]:
    layers, places = run.tables["whole_rows_layers"], run.tables["whole_rows"]
    found = run.results["whole_rows"]
    names = ("total", "binary", "weighted_content", "uniform")
    filled = places[places["rows"] > 0]
    over = filled.groupby("first")[[*names, "content", "sink_mass"]].mean().reset_index()
    over = over[over["first"] > 0]
    log_x = {"log_x": True} if len(over) > 1 else {}
    figure = Figure(
        "Whole rows",
        "What would an entropy monitor read, and does the fixed support say the same?",
        {
            "Row entropy by layer, same queries": charts.profile(
                layers,
                {"whole_total": "whole rows", "fixed_total": "fixed support"},
                label="H (nats)",
                zero=True,
            ),
            "Content entropy by layer, same queries": charts.profile(
                layers,
                {"whole_content": "whole rows", "fixed_content": "fixed support"},
                label="H(π) (nats)",
                zero=True,
            ),
            "Split of whole rows by position": charts.profile(
                over,
                {
                    "uniform": "equal weights",
                    "total": "H",
                    "weighted_content": "(1−s)·H(π)",
                    "binary": "H_b(s)",
                },
                x="first",
                x_label="first query of the bin",
                label="entropy (nats)",
                zero=True,
                **log_x,
            ),
            "Sink share by position": charts.profile(
                over,
                "sink_mass",
                x="first",
                x_label="first query of the bin",
                label="share of the whole row",
                zero=True,
                **log_x,
            ),
        },
        places,
        f"Whole rows hold every key a query sees, so their entropy grows with position; by layer both kinds "
        f"are on queries from {found['same_queries']['first']} on. Means over heads (and layers).",
    )
    return [figure]


def _row_audit(run: Any) -> list[Figure]:
    found = run.results["row_audit"]
    kinds = {"agrees_keep": "sink kept", "agrees_drop": "sink dropped"}
    table = pd.DataFrame(
        [
            {
                "metric": METRICS[metric],
                **_number("reversal", numbers["reversal"]),
                "signatures": numbers["signatures"],
            }
            for metric, numbers in found["metrics"].items()
        ]
    )
    agreement = pd.DataFrame(
        [
            {"metric": METRICS[metric], "convention": name, **_number("agreement", numbers[kind])}
            for metric, numbers in found["metrics"].items()
            for kind, name in kinds.items()
        ]
    )
    figure = Figure(
        "Single rows",
        "Do verdicts reverse on rows as they do on signatures?",
        {
            "Verdicts that reverse": charts.bars(
                table,
                "reversal",
                by="metric",
                **_ends(table, "reversal"),
                label="share of triples",
                percent=True,
                ticks={"signatures": "on signatures"},
            ),
            "Row verdicts that are the signatures'": charts.bars(
                agreement,
                "agreement",
                by="metric",
                series="convention",
                **_ends(agreement, "agreement"),
                label="share of triples",
                percent=True,
                reference={"chance": 0.5},
            ),
        },
        table,
        f"{found['places']} places in {found['sequences']} sequences, {found['triples']} triples of heads at "
        "each; rows of one place only are compared. Intervals over sequences.",
    )
    return [figure]
