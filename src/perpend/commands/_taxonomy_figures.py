"""The figures of a taxonomy of heads, from its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from perpend.report import charts
from perpend.report.figure import Figure
from perpend.studies import taxonomy

NAMES = {
    "cosine": "cosine",
    "jensen_shannon": "Jensen–Shannon",
    "euclidean": "Euclidean",
    "content": "content d_A⊥",
    "aitchison": "full d_A",
    "summed_jensen_shannon": "JS summed over tokens",
}
QUESTIONS = {
    "jensen_shannon_keep": "JS, sink kept",
    "jensen_shannon_drop": "JS, sink dropped",
    "content_keep": "content d_A⊥ (both)",
}


def figures(run: Any) -> list[Figure]:
    """Stability, blocks, trees under both conventions, the map of heads, the predictions."""
    found = [_stability(run)]
    if len(run.tables["blocks"]):
        found.append(_blocks(run))
    found += [_trees(run), _plane(run.tables["heads"])]
    return found


def _stability(run: Any) -> Figure:
    cells = run.tables["taxonomy"]
    table = cells.assign(metric=cells["metric"].map(NAMES))
    own = table[table["linkage"] == run.results["linkage"]]
    drawn = own.assign(K=[f"K = {k}" for k in own["clusters"]])
    return Figure(
        "Clusters between conventions",
        "Are the clusters of heads the same with and without the sink?",
        charts.bars(
            drawn,
            "ari",
            by="metric",
            series="K",
            label="adjusted Rand index",
            reference={"chance": 0.0, "same clusters": 1.0},
        ),
        table,
        "Agglomerative clusters, average linkage, one bar a number of clusters: 1 is the same partition with "
        "and without the sink, 0 is what chance gives. The content distance is the same matrix under both.",
    )


def _blocks(run: Any) -> Figure:
    table = run.tables["blocks"]
    shown = table.assign(
        metric=table["metric"].map(NAMES),
        sink=table["policy"].map({"keep": "sink kept", "drop": "sink dropped"}),
    )
    counts = run.results["majority"]
    panels = {}
    for role in dict.fromkeys(shown["role"]):
        own = shown[shown["role"] == role]
        mean = own.groupby(["metric", "sink"], sort=False, as_index=False)["jaccard"].mean()
        panels[f"{role.upper()} heads ({counts[role]} of {run.results['heads']})"] = charts.bars(
            mean, "jaccard", by="metric", series="sink", label="Jaccard index, mean over K"
        )
    return Figure(
        "Blocks found again",
        "Do the heads that attend to one special token form a cluster, and does it outlive the sink?",
        panels,
        table,
        "Heads with more than half of their signature on the token, against the cluster that matches them "
        "best: 1 is the same set. Where only the bar with the sink is long, the block is the sink.",
    )


def _trees(run: Any) -> Figure:
    heads = run.tables["heads"]
    matrices = {title: run.arrays[name] for name, title in QUESTIONS.items()}
    return Figure(
        "Trees of heads under both conventions",
        "Which heads belong together, with and without the sink?",
        trees(heads, matrices, run.results["linkage"]),
        heads[["layer", "head", *(f"{name}_cluster" for name in QUESTIONS)]],
        "Average linkage; one dot a head, coloured by layer, and two heads meet at their clusters' mean "
        "distance. The content distance has one tree for both conventions.",
    )


def _plane(heads: pd.DataFrame) -> Figure:
    shares = [name for name in heads if name.endswith("_share")]
    shown = heads.assign(head=labels(heads))
    if shares:
        shown["most on"] = [
            next((name.removesuffix("_share").upper() for name in shares if row[name] > 0.5), "content")
            for row in heads.to_dict("records")
        ]
        series, said = "most on", "the token that holds more than half of the signature"
    else:
        shown["cluster"] = shown["jensen_shannon_keep_cluster"].astype(str)
        series, said = "cluster", "the clusters of JS with the sink"
    return Figure(
        "Map of heads under both conventions",
        "Which heads lie near each other, with and without the sink?",
        maps(shown, QUESTIONS, series),
        shown,
        f"Classical scaling to a plane, coloured by {said} in all maps: where colours part in one map and "
        "mix in another, the grouping belongs to the sink.",
    )


def labels(heads: pd.DataFrame) -> list[str]:
    """layer.head of each row of a table of heads."""
    return [f"{layer}.{head}" for layer, head in zip(heads["layer"], heads["head"])]


def trees(
    heads: pd.DataFrame, matrices: Mapping[str, np.ndarray], linkage: str = "average"
) -> dict[str, Any]:
    """A dendrogram of the heads for each title and its distances, coloured by layer."""
    names, layers = labels(heads), list(heads["layer"])
    return {
        title: charts.dendrogram(taxonomy.merges(distances, linkage), names, groups=layers)
        for title, distances in matrices.items()
    }


def maps(heads: pd.DataFrame, questions: Mapping[str, str], series: str) -> dict[str, Any]:
    """A plane of the heads for each question (column prefix -> title), coloured by one column."""
    return {
        title: charts.scatter(
            heads,
            f"{name}_x",
            f"{name}_y",
            series=series,
            x_label="first axis",
            y_label="second axis",
            tooltip=("head",),
        )
        for name, title in questions.items()
    }
