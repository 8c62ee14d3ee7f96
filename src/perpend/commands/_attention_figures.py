"""The figures of an attention survey, from its run folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from perpend.report import charts
from perpend.report.figure import Detail, Figure


def figures(run: Any) -> list[Figure]:
    """Maps of heads, the entropy split, the two curves that disagree, reversals and where they fall."""
    layers, heads, rates = run.tables["layers"], run.tables["heads"], run.tables["reversal"]
    detail = _detail(heads, run.arrays["signatures"], run.results)
    found = [
        Figure(
            "Sink mass by head",
            "Which heads give their attention to the sink?",
            charts.heat(heads, "signature_mass", label="sink share of the signature", domain=(0, 1)),
            heads[["layer", "head", "signature_mass", "sink_mass"]],
            "One cell a head; the share of its signature (the Aitchison mean of its rows) that lies on the "
            "sink. Choose a head to see where its content goes and which heads are nearest.",
            detail=detail,
        ),
        Figure(
            "Content dispersion by head",
            "How unevenly does each head divide what it does not give to the sink?",
            charts.heat(
                heads, "dispersion", label="C_A⊥ of rows", domain=(0, float(heads["dispersion"].max()))
            ),
            heads[["layer", "head", "dispersion", "content"]],
            "C_A⊥, the spread of log-ratios among content keys, averaged over rows: 0 is uniform content. "
            "The size of the sink does not touch it.",
            detail=detail,
        ),
        _entropy_split(layers),
        _collapse(layers, run.results),
        _reversals(rates),
    ]
    calibration = _calibration(run)
    return [*found, calibration] if calibration else found


def _detail(heads: pd.DataFrame, signatures: np.ndarray, results: Any) -> Detail:
    """What a click on a head opens: its signature, its neighbours with and without the sink."""
    from perpend.geometry import pairwise

    index = heads[["layer", "head"]].to_numpy(int)
    order = {int(layer): i for i, layer in enumerate(sorted(set(range(len(signatures)))))}
    rows = np.stack([signatures[order[layer], head] for layer, head in index])
    sinks = list(results["sink"]["columns"])
    names = [f"L{layer} H{head}" for layer, head in index]
    table = heads[
        [
            "layer",
            "head",
            "signature_mass",
            "sink_mass",
            "total",
            "content",
            "dispersion",
            "reversal_jensen_shannon",
        ]
    ].copy()
    nearest = {
        "nearest, sink kept (JS)": pairwise(rows, "jensen_shannon", sink=sinks, log=True),
        "nearest, sink dropped (JS)": pairwise(rows, "jensen_shannon", sink=sinks, policy="drop", log=True),
        "nearest by content (d_A⊥)": pairwise(rows, "content", sink=sinks, log=True),
    }
    for title, distances in nearest.items():
        away = distances + np.where(np.eye(len(distances), dtype=bool), np.inf, 0)
        three = np.argsort(away, axis=1, kind="stable")[:, :3]
        table[title] = [", ".join(names[other] for other in chosen) for chosen in three]
    kept = np.exp(rows)
    dropped = np.delete(kept, sinks, axis=1)
    dropped = dropped / dropped.sum(1, keepdims=True)
    table["kept"] = [[float(f"{v:.4g}") for v in row] for row in kept]
    # None where the sink stood: a bar keeps the number of its key in the window
    content = [k for k in range(rows.shape[1]) if k not in sinks]
    table["content_row"] = [_at(content, row, rows.shape[1]) for row in dropped]
    return Detail(
        ("layer", "head"),
        table,
        {
            "Signature, sink kept": charts.chosen_profile("kept", label="share", x_label="key"),
            "Content alone, sink dropped": charts.chosen_profile(
                "content_row", label="share of content", x_label="key"
            ),
        },
    )


def _at(places: list[int], values: np.ndarray, length: int) -> list[float | None]:
    """A list of `length` with values (n,) at n places and None elsewhere."""
    row: list[float | None] = [None] * length
    for place, value in zip(places, values):
        row[place] = float(f"{value:.4g}")
    return row


def _entropy_split(layers: pd.DataFrame) -> Figure:
    parts = {"binary": "H_b(s): sink or content", "weighted_content": "(1−s)·H(π): within content"}
    if (layers.get("within_sink", pd.Series(0.0)) > 0).any():
        parts["within_sink"] = "within the sink block"
    return Figure(
        "Entropy split",
        "How much of each layer's row entropy is about the sink, and how much about content?",
        charts.profile(layers, {"total": "H: whole row", **parts}, label="entropy (nats)", zero=True),
        layers[["layer", "total", *parts, "content", "row_sink_mass"]],
        "H = H_b(s) + (1−s)·H(π), exactly, as means over rows and heads. Where the whole falls and the "
        "content line does not, attention has not sharpened: the sink has grown.",
    )


def _collapse(layers: pd.DataFrame, results: Any) -> Figure:
    disagreement = results["collapse"]["disagreement"]
    said = "no step is defined" if disagreement is None else f"{disagreement:.1%} of steps"
    return Figure(
        "Row entropy and content entropy",
        "Do the two entropies tell the same story from layer to layer?",
        charts.profile(
            layers,
            {"total": "H: whole row", "content": "H(π): content"},
            label="entropy (nats)",
            marks="disagrees_with_next",
        ),
        layers[["layer", "total", "content", "disagrees_with_next"]],
        f"A ring marks a layer from which the two curves move in opposite directions to the next: {said}.",
    )


def _reversals(rates: pd.DataFrame) -> Figure:
    has_interval = "low" in rates
    shown = rates[~rates["metric"].isin(["content"])].reset_index(drop=True)
    ticks = {
        "rate_among_significant": "among significant verdicts",
        "noise_floor_keep": "floor: two halves of the text",
    }
    return Figure(
        "Verdicts that reverse",
        "How often does dropping the sink change which of two heads is more similar to a third?",
        charts.bars(
            shown,
            "exact",
            by="metric",
            low="low" if has_interval else None,
            high="high" if has_interval else None,
            label="share of closer-head verdicts",
            percent=True,
            ticks=ticks if has_interval else None,
            reference={"chance": 0.5},
        ),
        rates,
        "Share over all triples of heads, with a bootstrap interval over the text. The floor is what two "
        "halves of the text disagree by under one convention; significant verdicts keep their sign in 95 % "
        "of resamples. The content distance cannot reverse; "
        "'aitchison' is full d_A against d_A⊥.",
    )


def _calibration(run: Any) -> Figure | None:
    """Where this model falls on the curve computed without any model, with the paper's ten models."""
    if "calibration" not in run.tables:
        return None
    points, curve = run.tables["calibration"], run.tables["calibration_curve"]
    panels = {}
    for metric in dict.fromkeys(points["metric"]):
        panels[metric.replace("_", "-")] = over_curve(
            points, curve, metric, series="source", x_label="signature sink mass"
        )
    return Figure(
        "Calibration",
        "Is this model's reversal rate what its sink mass alone would give?",
        panels,
        points,
        "The curve is sampled from random heads with the sink mass on the horizontal axis and peaked content "
        "(α = 0.1); no model enters it. Points are measured models; hover over one for its name. A point "
        "above the curve reverses more often than its sink mass alone would make it, one below it less: "
        f"something else in its rows decides{_gaps(run)}.",
    )


def _gaps(run: Any) -> str:
    """How far this model lies from the curve, in points."""
    placed = (run.results.get("calibration") or {}).get("by_metric") or {}
    told = [
        f"{metric.replace('_', '-')} {100 * one['deviation']:+.1f}"
        for metric, one in placed.items()
        if one.get("deviation") is not None
    ]
    return f" (this model, in points: {', '.join(told)})" if told else ""


def over_curve(points: pd.DataFrame, curve: pd.DataFrame, metric: str, **drawn: Any) -> Any:
    """Models' reversal rates against their sink mass, over the curve that no model enters."""
    return charts.scatter(
        points[points["metric"] == metric],
        "sink_mass",
        "rate",
        curve=curve[curve["metric"] == metric],
        curve_low="low",
        curve_high="high",
        name="model",
        y_label="reversal rate",
        **drawn,
    )
