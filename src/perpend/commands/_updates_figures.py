"""The figures of `perpend updates`, from the tables of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from perpend.report import charts
from perpend.report.figure import Figure

if TYPE_CHECKING:
    from collections.abc import Callable

PARTS = {"attn": "attention", "mlp": "MLP", "block": "block"}
SETS = {
    "all": "all tokens",
    "without_first": "no position 0",
    "without_top": "no top 1 %",
    "without_both": "neither",
}


def figures(run: Any) -> list[Figure]:
    """Ratio, α, turning and norms by layer, then the ratio while writing and the price of dropping."""
    table = run.tables["updates"].copy()
    table["part"] = table["part"].map(PARTS)
    every = table[table["set"] == "all"]
    found = [_ratio(every), _sets(table), _alpha(every), _turning(every), _norms(every)]
    if "generation" in run.tables:
        found.append(_generation(run.tables["generation"], float(table["null_ratio_mean"].iloc[0])))
    found.append(_ranking(run.tables["ranking"]))
    if "dropping" in run.tables:
        found.append(_dropping(run.tables["dropping"]))
    return found


def _ratio(table: pd.DataFrame) -> Figure:

    def chart(value: str, null: str) -> Any:
        # runs of before have no median of their own
        reference = {"random direction": float(table[null if null in table else "null_ratio_mean"].iloc[0])}
        return charts.profile(
            table, value, series="part", label="‖Δ∥‖ / ‖Δ⊥‖", reference=reference, log_y=True
        )

    return Figure(
        "Parallel over perpendicular",
        "How much of what a layer adds lies along the stream it is added to?",
        {
            "mean over tokens": chart("ratio", "null_ratio_mean"),
            "median": chart("ratio_q50", "null_ratio_median"),
        },
        table[
            ["layer", "part", "ratio", "ratio_q05", "ratio_q50", "ratio_q95", "null_ratio", "null_ratio_mean"]
        ],
        "Each point is a layer. At the dashed line an update is as aligned as a direction drawn at "
        "random; above "
        "it the layer rescales the stream beside turning it. Mean far above median: few tokens carry it.",
        overlay=_over_runs("ratio", "‖Δ∥‖ / ‖Δ⊥‖", True),
    )


def _sets(table: pd.DataFrame) -> Figure:
    table = table.assign(tokens=table["set"].map(SETS))
    named = {
        str(part): charts.profile(
            group, "ratio", series="tokens", label="‖Δ∥‖ / ‖Δ⊥‖", log_y=True, points=False
        )
        for part, group in table.groupby("part", sort=False)
    }
    return Figure(
        "Which tokens carry the ratio",
        "Is the ratio that of most tokens, or of position 0 and a few very large ones?",
        named,
        table[["layer", "part", "tokens", "ratio", "ratio_q50", "used"]],
        "Where the lines part, position 0 or the 1 % of tokens of largest norm make the mean.",
    )


def _alpha(table: pd.DataFrame) -> Figure:
    named = {
        str(part): charts.profile(
            group,
            "alpha_q50",
            low="alpha_q05",
            high="alpha_q95",
            label="α (median, 5–95 %)",
            reference={"0": 0.0},
        )
        for part, group in table.groupby("part", sort=False)
    }
    return Figure(
        "Growth and shrinkage",
        "Does a layer lengthen the stream or shorten it?",
        named,
        table[["layer", "part", "alpha", "alpha_sd", "alpha_q05", "alpha_q50", "alpha_q95"]],
        "α is the factor by which an update rescales what it is added to: 0.1 lengthens it by a "
        "tenth, below 0 it "
        "works against it. The band holds nine tokens in ten.",
        overlay=_over_runs("alpha_q50", "median α", False),
    )


def _turning(table: pd.DataFrame) -> Figure:
    block = table[table["part"] == "block"]
    block = block if len(block) else table
    turn = (1 - block["cosine_q50"]).clip(lower=1e-7)  # a cosine of 1 has no place on an axis of logarithms
    block = block.assign(turn_q50=turn, second_order_q50=block["rho_q50"] ** 2 / 2)
    label = "1 − cosine of block input and output"
    medians = ["cosine_q50", "turn_q50", "gap_q50", "gap_q95"]
    chart = charts.profile(
        block, {"turn_q50": "exact", "second_order_q50": "ρ²/2"}, label=f"{label} (median token)", log_y=True
    )
    return Figure(
        "How far a block turns the stream",
        "How similar is a block's output to its input, and is the second-order form good enough?",
        chart,
        block[["layer", "part", "cosine", "second_order", "gap", "rho", *medians]],
        "0.01 is a turn of 8 degrees, 1 a right angle; the lower, the less the block turns the stream. Where "
        "the lines part, the update is not small against the stream, and 1 − ρ²/2 misjudges the cosine.",
        overlay=_over_runs("turn_q50", label, True),
    )


def _norms(table: pd.DataFrame) -> Figure:
    block = table[table["part"] == "block"]
    stream = (block if len(block) else table).assign(series="stream (block input)")
    stream = stream.rename(columns={"reference_norm": "norm"})[["layer", "series", "norm"]]
    added = table.assign(series="added by " + table["part"]).rename(columns={"update_norm": "norm"})
    both = pd.concat([stream, added[["layer", "series", "norm"]]], ignore_index=True)
    return Figure(
        "Sizes",
        "How large is what a layer adds, against the stream?",
        charts.profile(both, "norm", series="series", label="mean norm", log_y=True, points=False),
        both,
        "Mean norms over tokens. A stream that jumps in one layer usually does so at position 0 alone.",
    )


def _generation(table: pd.DataFrame, null: float) -> Figure:
    table = table.assign(layer="layer " + table["layer"].astype(str), part=table["part"].map(PARTS))
    mean = table.groupby(["step", "layer", "part"], sort=False, as_index=False)["ratio"].mean()
    named = {
        str(part): charts.profile(
            group,
            "ratio",
            x="step",
            series="layer",
            label="‖Δ∥‖ / ‖Δ⊥‖",
            x_label="tokens written",
            reference={"random direction": null},
            log_y=True,
            points=False,
        )
        for part, group in mean.groupby("part", sort=False)
    }
    return Figure(
        "While the model writes",
        "Does the ratio change from token to token as the model generates?",
        named,
        table,
        "Greedy generation with the model's own cache, the mean over prompts; step 0 is the prompt's "
        "last token.",
    )


def _ranking(table: pd.DataFrame) -> Figure:
    table = table.assign(part=table["part"].map(PARTS))
    chart = charts.profile(table, "cosine", series="part", label="1 − cosine", log_y=True)
    return Figure(
        "What could be dropped",
        "Which layers turn the stream least?",
        chart,
        table,
        "1 − cos(x, x+Δ), the mean over tokens: the lowest points are dropped first.",
        overlay=_over_runs("cosine", "1 − cosine", True),
    )


def _dropping(table: pd.DataFrame) -> Figure:
    chart = charts.profile(
        table, "perplexity", x="count", series="order", x_label="parts dropped", log_y=True, form=".4g"
    )
    return Figure(
        "The price of dropping",
        "What does perplexity pay for each part left out, by order of dropping?",
        chart,
        table[["order", "count", "dropped", "loss", "low", "high", "perplexity"]],
        "A useful ranking stays below the random orders and below dropping from the last layer on. "
        "Perplexity is "
        "taken on sequences that the ranking did not read.",
    )


def _over_runs(value: str, label: str, log: bool) -> Callable[[pd.DataFrame], Any]:
    """The block's line of several runs in one chart."""

    def chart(table: pd.DataFrame) -> Any:
        block = table[table["part"] == "block"]
        return charts.profile(block, value, series="run", label=label, log_y=log)

    return chart
