"""Figures of `perpend compress` and `perpend compare`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

    from perpend.report.figure import Figure


def figures(run: Any) -> list[Figure]:
    """Separation, signed gain, loss against error, what the parts cost, and where."""
    layers = run.tables["layers"]
    layers = layers[layers["along"] == "update"]
    out = [_separation(layers, mode) for mode in dict.fromkeys(layers["mode"])]
    out.append(_kappa(layers))
    regimes = run.tables["regimes"]
    if regimes["regime"].nunique() > 2:
        out.append(_against_loss(regimes))
    if "surgery" in run.tables:
        out.append(_surgery(run.tables["surgery"]))
    if "sensitivity" in run.tables:
        out.append(_map(run.tables["sensitivity"]))
    return out


def _separation(layers: pd.DataFrame, mode: str) -> Figure:
    from perpend.report import charts
    from perpend.report.figure import Figure

    own = layers[layers["mode"] == mode]
    names = {
        "perpendicular": "across: norm of e⊥ over that of Δ",
        "parallel": "along: norm of e∥ over that of Δ",
    }
    drawn = {
        f"{part}: {label}": charts.profile(
            own[own["part"] == part], measure, series="regime", label=label, zero=True, points=False
        )
        for part in dict.fromkeys(own["part"])
        for measure, label in names.items()
    }
    columns = [
        "mode",
        "part",
        "layer",
        "regime",
        *names,
        "total",
        "kappa",
        "rotation",
        "energy_share",
        "isotropy",
    ]
    return Figure(
        f"Error across and along, {mode}",
        "Do the errors of the compressed models separate across the update, and along it?",
        drawn,
        own[columns],
        "Each line is one compressed model. Left what rotates the base update, right what scales it, as a "
        "share of its norm. Lines that never cross keep one order of the models at every layer.",
    )


def _kappa(layers: pd.DataFrame) -> Figure:
    from perpend.report import charts
    from perpend.report.figure import Figure

    own = layers[layers["mode"] == layers["mode"].iloc[0]]
    drawn = {
        part: charts.profile(
            own[own["part"] == part],
            "kappa",
            series="regime",
            label="κ",
            points=False,
            reference={"unchanged": 0.0},
        )
        for part in dict.fromkeys(own["part"])
    }
    return Figure(
        "Shrinking and stretching",
        "Does compression shrink what a layer adds to the stream?",
        drawn,
        own[["part", "layer", "regime", "kappa"]],
        "κ is the signed part of the error along the update: below zero the layer adds less than it did. "
        "A gain of 1/(1 + κ) would undo it.",
    )


def _against_loss(regimes: pd.DataFrame) -> Figure:
    from perpend.report import charts
    from perpend.report.figure import Figure

    own = regimes[(regimes["part"] == "block") & (regimes["mode"] == regimes["mode"].iloc[0])]
    names = {"perpendicular": "across", "parallel": "along", "total": "whole"}
    drawn = {
        f"{label} error": charts.scatter(
            own,
            measure,
            "change",
            name="regime",
            x_label=f"{label} error of blocks",
            y_label="loss change (nats)",
        )
        for measure, label in names.items()
    }
    return Figure(
        "Loss against error",
        "Which part of the error goes with the loss?",
        drawn,
        own[["regime", "change", "perplexity", *names, "kappa", "angle"]],
        "One point a model: its mean block error and what it costs in loss. Where the three panels show the "
        "same order, the part across says nothing that the whole does not.",
    )


def _surgery(table: pd.DataFrame) -> Figure:
    from perpend.report import charts
    from perpend.report.figure import Figure

    shown = table[table["component"] != "none"].copy()
    norms = {"own": "at its own norm", "error": "at the norm of e", "parallel": "at the norm of e∥"}
    names = {"both": "e", "perpendicular": "e⊥", "parallel": "e∥", "random": "random"}
    shown["part"] = [f"{names[c]}, {norms[n]}" for c, n in zip(shown["component"], shown["norm"])]
    drawn = {
        regime: charts.bars(rows, "change", by="part", low="low", high="high", label="loss change (nats)")
        for regime, rows in shown.groupby("regime", sort=False)
    }
    return Figure(
        "Error surgery",
        "What does each part of the error cost when the base model runs with that part alone?",
        drawn,
        shown[["regime", "component", "norm", "loss", "change", "low", "high"]],
        "The base model with one part of a compressed model's error added at every layer, taken at the "
        "inputs of this very run. Bars at one norm compare directions; intervals are over sequences.",
    )


def _map(table: pd.DataFrame) -> Figure:
    from perpend.report import charts
    from perpend.report.figure import Figure

    names = {"both": "e", "perpendicular": "e⊥", "parallel": "e∥"}
    drawn = {}
    for (regime, component), rows in table.groupby(["regime", "component"], sort=False):
        # one scale a model, so that its parts can be set against each other
        most = float(table.loc[table["regime"] == regime, "change"].abs().max()) or 1.0
        drawn[f"{regime}: {names.get(component, component)}"] = charts.heat(
            rows,
            "change",
            y="part",
            label="loss change (nats)",
            domain=(-most, most),
            middle=0.0,
            form=".4f",
            tooltip=["se"],
        )
    return Figure(
        "Sensitivity map",
        "Which layers and parts does the loss forgive?",
        drawn,
        table[["regime", "layer", "part", "component", "match", "change", "se"]],
        "Loss change when a single part of a single layer errs and all else is exact. Cells near zero can be "
        "compressed harder.",
    )
