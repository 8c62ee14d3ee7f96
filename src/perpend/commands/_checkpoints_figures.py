"""The figures of a training curve, from its run folder."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from perpend.report import charts, theme
from perpend.report.encodings import field
from perpend.report.figure import Figure

TERMS = {
    "total": "ΔH",
    "binary": "ΔH_b(s)",
    "sink_growth": "Δ(1−s)·mean H(π)",
    "content_change": "mean(1−s)·ΔH(π)",
    "covariance": "Δ covariance",
    "within_sink": "Δ within the sink block",
}
CURVES = {"total": "H: whole row", "content": "H(π): content alone", "binary": "H_b(s): sink or content"}


def figures(run: Any) -> list[Figure]:
    """Entropies, dispersion and sink by checkpoint with disagreements shaded; the split; layers."""
    table = run.tables["checkpoints"]
    table = table[~table["duplicate"].astype(bool)].reset_index(drop=True)
    # a step of 0, an unknown or a repeated one has no place on an axis of logarithms: names in order do
    numbers = table["step"]
    by_step = bool(numbers.notna().all() and (numbers > 0).all() and numbers.is_monotonic_increasing)
    x = "step" if by_step else "checkpoint"
    found = [_curves(table, x, run.results), _sink(table, x)]
    if len(run.tables["split"]):
        found.append(_split(run))
    layers = run.tables["layers"]
    for column, title, question in (
        ("sink_mass", "Sink by layer and checkpoint", "When does the sink appear, and in which layers?"),
        ("content", "Content entropy by layer and checkpoint", "Which layers' content narrows, and when?"),
    ):
        found.append(
            Figure(
                title,
                question,
                charts.heat(
                    layers.dropna(subset=[column]),
                    column,
                    x="step" if by_step else "checkpoint",
                    y="layer",
                    label="sink share of a row" if column == "sink_mass" else "H(π), nats",
                ),
                layers[["checkpoint", "step", "layer", column]],
                "One cell a layer and checkpoint: the mean over heads and rows.",
            )
        )
    return found


def _curves(table: pd.DataFrame, x: str, results: Any) -> Figure:
    left = {"x": x, "log_x": x == "step"}
    entropy = _shaded(table, x, charts.profile(table, CURVES, label="entropy (nats)", **left))
    spread = _shaded(table, x, charts.profile(table, "dispersion", label="C_A⊥ of rows", **left))
    rate = results["disagreement"]["rate"]
    said = "no step is defined" if rate is None else f"{rate:.1%} of steps disagree"
    return Figure(
        "Entropy and dispersion in training",
        "Does the row entropy fall because attention sharpens, or because the sink grows?",
        {"Entropies": entropy, "Content dispersion": spread},
        table[[c for c in table if c != "weights_sha256"]],
        f"Shaded: stretches between checkpoints on which H and −C_A⊥ move in opposite directions ({said}). "
        "Where H falls and H(π) does not, the sink has grown.",
    )


def _sink(table: pd.DataFrame, x: str) -> Figure:
    low = {"low": "sink_mass_low", "high": "sink_mass_high"} if "sink_mass_low" in table else {}
    return Figure(
        "Sink mass in training",
        "How much of a row does the sink take at each checkpoint?",
        charts.profile(table, "sink_mass", x=x, log_x=x == "step", label="sink share of a row", **low),
        table[["checkpoint", "step", "sink_mass", *low.values()]],
        "The mean share of the sink over rows, heads and layers; the band is a 95 % interval over text.",
    )


def _split(run: Any) -> Figure:
    collapse = run.results["collapse"]
    intervals = collapse.get("intervals") or {}
    rows = [
        {"term": said, "nats": collapse[name], **_ends(intervals.get(name))}
        for name, said in TERMS.items()
        if name != "within_sink" or collapse[name]
    ]
    table = pd.DataFrame(rows)
    ends = {"low": "low", "high": "high"} if intervals else {}
    return Figure(
        "Split of the entropy's fall",
        f"What made the entropy fall from {collapse['from']} to {collapse['to']}?",
        charts.bars(table, "nats", by="term", label="change (nats)", **ends),
        table,
        "The bars below ΔH add up to it, exactly. Only the content term is attention that sharpens; lines "
        "are 95 % intervals over text.",
    )


def _ends(pair: Any) -> dict[str, float]:
    return {"low": pair[0], "high": pair[1]} if pair else {}


def _shaded(table: pd.DataFrame, x: str, chart: Any) -> Any:
    """The chart over grey bands on the stretches that disagree."""
    at = [
        i for i, wrong in enumerate(table["disagrees_with_next"].astype(bool)) if wrong and i + 1 < len(table)
    ]
    if not at:
        return chart
    bands = pd.DataFrame({"from": table[x].to_numpy()[at], "to": table[x].to_numpy()[[i + 1 for i in at]]})
    kind = "quantitative" if x == "step" else "ordinal"
    # names in the table's order, also those that no band touches
    scale = {"scale": alt.Scale(type="log", nice=False) if x == "step" else alt.Scale(domain=[*table[x]])}
    rect = (
        alt.Chart(bands)
        .mark_rect(color=theme.LIGHT["soft"], opacity=0.16)
        .encode(x=alt.X(field("from"), type=kind, title=x, **scale), x2=alt.X2(field("to")))
    )
    # layers that share their data have it from the chart, and would lose it outside
    own = chart.data is not alt.Undefined
    lines = [
        part.properties(data=chart.data) if own and part.data is alt.Undefined else part
        for part in chart.layer
    ]
    return alt.layer(rect, *lines).properties(width="container", height=chart.height)
