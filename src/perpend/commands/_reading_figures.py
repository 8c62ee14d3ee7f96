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
WEIGHTS = {"plain": "plain rows", "value": "weighted by ‖v_j‖", "output": "weighted by ‖W_O v_j‖"}


def figures(run: Any) -> list[Figure]:
    """One for each reading that the run has."""
    made = {
        "windows": _windows,
        "conventions": _conventions,
        "weights": _weights,
        "whole_rows": _whole_rows,
        "row_audit": _row_audit,
    }
    return [make(run) for name, make in made.items() if run.results.get(name)]


def _ends(table: pd.DataFrame, name: str) -> dict[str, str]:
    """The interval's columns, where there is one."""
    low, high = f"{name}_low", f"{name}_high"
    return {"low": low, "high": high} if low in table and table[low].notna().all() else {}


def _windows(run: Any) -> Figure:
    table = run.tables["windows"]
    shown = table.assign(metric=table["metric"].map(METRICS), window=table["window"].astype(str) + " keys")
    kept = shown.drop_duplicates("window")
    between = run.tables["windows_between"]
    pairs = between.assign(windows=[f"{a} and {b}" for a, b in zip(between["first"], between["second"])])
    panels = {
        "Verdicts that reverse": charts.bars(
            shown,
            "reversal",
            by="metric",
            series="window",
            **_ends(shown, "reversal"),
            label="share of triples",
            percent=True,
        ),
        "Mass of a whole row that the window holds": charts.bars(
            kept, "retained", by="window", **_ends(kept, "retained"), label="share of the row", percent=True
        ),
    }
    if len(pairs):
        panels["Content distances of two windows"] = charts.bars(
            pairs,
            "spearman",
            by="windows",
            **_ends(pairs, "spearman"),
            label="Spearman ρ over pairs of heads",
        )
    return Figure(
        "Windows",
        "Does it matter how many keys a row is re-closed on?",
        panels,
        table,
        f"Rows on the first W keys for several W, from {run.results['windows']['queries']}, with intervals "
        "over sequences. The rank correlation is of d_A⊥ over all pairs of heads.",
    )


def _conventions(run: Any) -> Figure:
    table = run.tables["conventions"]
    shown = table.assign(metric=table["metric"].map(METRICS), between=table["between"].map(PAIRS))
    return Figure(
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


def _weights(run: Any) -> Figure:
    table, layers = run.tables["weights"], run.tables["weights_layers"]
    named = table.assign(weight=table["weight"].map(WEIGHTS))
    rates = named[named["quantity"].str.startswith("reversal_")]
    rates = rates.assign(metric=rates["quantity"].str.removeprefix("reversal_").map(METRICS))
    by_layer = layers.assign(weight=layers["weight"].map(WEIGHTS))
    return Figure(
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


def _whole_rows(run: Any) -> Figure:
    layers, places = run.tables["whole_rows_layers"], run.tables["whole_rows"]
    found = run.results["whole_rows"]
    names = ("total", "binary", "weighted_content", "uniform")
    filled = places[places["rows"] > 0]
    over = filled.groupby("first")[[*names, "content", "sink_mass"]].mean().reset_index()
    over = over[over["first"] > 0]
    log_x = {"log_x": True} if len(over) > 1 else {}
    return Figure(
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
                    "total": "H: whole row",
                    "weighted_content": "(1−s)·H(π): within content",
                    "binary": "H_b(s): sink or content",
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


def _row_audit(run: Any) -> Figure:
    found = run.results["row_audit"]
    rows = []
    for metric, numbers in found["metrics"].items():
        rate = numbers["reversal"]
        rows.append(
            {
                "metric": METRICS[metric],
                "reversal": rate["value"],
                "reversal_low": rate.get("low"),
                "reversal_high": rate.get("high"),
                "signatures": numbers["signatures"],
                "agrees_keep": numbers["agrees_keep"]["value"],
                "agrees_drop": numbers["agrees_drop"]["value"],
            }
        )
    table = pd.DataFrame(rows)
    agreement = table.melt("metric", ["agrees_keep", "agrees_drop"], "convention", "agreement")
    agreement["convention"] = agreement["convention"].map(
        {"agrees_keep": "sink kept", "agrees_drop": "sink dropped"}
    )
    return Figure(
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
                label="share of triples",
                percent=True,
                reference={"chance": 0.5},
            ),
        },
        table,
        f"{found['places']} places in {found['sequences']} sequences, {found['triples']} triples of heads at "
        "each; rows of one place only are compared. Intervals over sequences.",
    )
