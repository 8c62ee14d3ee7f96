"""The figures of an audit of head signatures, from its run folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from perpend.commands._taxonomy_figures import labels, maps, trees
from perpend.report import charts
from perpend.report.figure import Figure

NAMES = {
    "cosine": "cosine",
    "jensen_shannon": "Jensen–Shannon",
    "euclidean": "Euclidean",
    "content": "content d_A⊥",
    "aitchison": "full d_A",
}
BAND = " The shaded band is the 95 % interval over sequences."
RULE = " The dark line over the end of a bar is the 95 % interval over sequences."
POINTS = 3_000  # pairs drawn; all are in the correlation
QUESTIONS = {"js_keep": "JS, sink kept", "js_drop": "JS, sink dropped", "content": "content d_A⊥"}


def figures(run: Any) -> list[Figure]:
    """Temperature, rival distances, means, sink sets, taxonomies and the sharpest triple."""
    known = run.results.get("intervals") or {}
    found = [_temperature(run.tables["temperature"], known), _channel(run)]
    if run.results["aggregation"]["arithmetic"]:
        found.append(_aggregation(run.results["aggregation"], known))
    if run.results["sink_set"]:
        found.append(_sink_set(run.results["sink_set"], known))
    clusters = run.tables["taxonomy"]
    if len(clusters):
        found.append(_stability(clusters))
    found += [_trees(run), _plane(run.tables["heads"])]
    if run.results["witness"]["triple"]:
        found.append(_triple(run))
    return found


def _ends(table: pd.DataFrame, names: list[str], known: Any, low: str = "low", high: str = "high") -> Any:
    """The table with interval columns, and the chart's arguments for them; neither without intervals."""
    if not all(name in known and {"low", "high"} <= set(known[name]) for name in names if name):
        return table, {}
    ends = {
        end: [known[name][end] if name else value for name, value in zip(names, table.iloc[:, -1])]
        for end in ("low", "high")
    }
    return table.assign(**{low: ends["low"], high: ends["high"]}), {"low": low, "high": high}


def _temperature(table: pd.DataFrame, known: Any) -> Figure:
    bands = {}
    for value in ("flips", "retention"):
        # d_A⊥ has no interval: nothing changes in any text
        names = [
            f"temperature/{m}/{tau:g}/{value}" if m == "jensen_shannon" else ""
            for m, tau in zip(table["metric"], table["tau"])
        ]
        exact = table[[*(c for c in table if c != value), value]]
        exact, bands[value] = _ends(exact, names, known, f"{value}_low", f"{value}_high")
        table = table.assign(**{column: exact[column] for column in bands[value].values()})
    table = table.assign(metric=table["metric"].map({**NAMES, "jensen_shannon": "dropped-row JS"}))
    drawn = {"x": "tau", "series": "metric", "x_label": "τ", "zero": True}
    return Figure(
        "Temperature",
        "Do verdicts among content keys depend on a temperature that nobody can observe?",
        {
            "Verdicts that flip": charts.profile(
                table, "flips", label="share of triples", **bands["flips"], **drawn
            ),
            "Prune set that stays": charts.profile(
                table, "retention", label="share of set", **bands["retention"], **drawn
            ),
        },
        table,
        "Content logits times τ, against τ = 1; the prune set is the fifth of heads nearest to another. d_A⊥ "
        "is multiplied by τ and so orders everything as before." + (BAND if any(bands.values()) else ""),
    )


def _channel(run: Any) -> Figure:
    js, content = run.arrays["jensen_shannon_drop"], run.arrays["content_distance"]
    upper = np.triu_indices(len(js), 1)
    chosen = np.random.default_rng(0).permutation(len(upper[0]))[:POINTS]
    table = pd.DataFrame({"d_A⊥": content[upper][chosen], "dropped-row JS": js[upper][chosen]})
    said = run.results["content"]
    return Figure(
        "Rival distances of the content",
        "Once the sink is gone, does the choice of geometry still matter?",
        charts.scatter(table, "d_A⊥", "dropped-row JS", x_label="d_A⊥", y_label="dropped-row JS (nats)"),
        table,
        f"One point a pair of heads ({len(table)} of {len(upper[0])}). Their rank correlation is "
        f"{said['spearman']:.3f}; they name the same nearest head for {said['neighbours']:.1%} of heads.",
    )


def _aggregation(found: Any, known: Any) -> Figure:
    table = pd.DataFrame(
        [
            {"metric": NAMES[metric], "mean": f"{kind} mean", "reversal": value}
            for kind in ("arithmetic", "aitchison")
            for metric, value in found[kind].items()
        ]
    )
    names = [f"aggregation/{k}/{m}" for k in ("arithmetic", "aitchison") for m in found[k]]
    table, ends = _ends(table, names, known)
    return Figure(
        "Reversals by kind of mean",
        "Do verdicts reverse only because signatures are geometric means?",
        charts.bars(
            table, "reversal", by="metric", series="mean", **ends, label="triples reversed", percent=True
        ),
        table,
        "Triples of heads whose verdict reverses when the sink is dropped, on two kinds of mean of the same "
        "rows." + (RULE if ends else ""),
    )


def _sink_set(found: Any, known: Any) -> Figure:
    table = pd.DataFrame(
        [{"metric": NAMES[metric], "flips": found[metric]} for metric in ("jensen_shannon", "content")]
    )
    table, ends = _ends(table, ["sink_set/jensen_shannon", "sink_set/content"], known)
    return Figure(
        "Sink set",
        "Does it matter whether one key or four are called the sink?",
        charts.bars(table, "flips", by="metric", **ends, label="verdicts that flip", percent=True),
        table,
        f"The sink is dropped as keys {found['small']} or {found['large']}. The content distance cannot grow "
        f"with the larger set, and did in {found['violations']} of {found['pairs']} pairs."
        + (RULE if ends else ""),
    )


def _stability(clusters: pd.DataFrame) -> Figure:
    table = clusters.assign(metric=clusters["metric"].map(NAMES))
    drawn = table.groupby(["metric", "linkage"], sort=False, as_index=False)["ari"].mean()
    return Figure(
        "Taxonomies between conventions",
        "Are the clusters of heads the same with and without the sink?",
        charts.bars(
            drawn,
            "ari",
            by="metric",
            series="linkage",
            label="adjusted Rand index",
            reference={"chance": 0.0, "same partition": 1.0},
        ),
        table,
        "Agglomerative clusters of heads, mean over K of 4, 6 and 8: 1 is the same partition under both "
        "conventions, 0 is what chance gives.",
    )


def _trees(run: Any) -> Figure:
    heads = run.tables["heads"]
    matrices = {
        "JS, sink kept": run.arrays["jensen_shannon_keep"],
        "JS, sink dropped": run.arrays["jensen_shannon_drop"],
        "content d_A⊥": run.arrays["content_distance"],
    }
    return Figure(
        "Trees of heads",
        "Which heads belong together, by which question?",
        trees(heads, matrices),
        heads[["layer", "head", *(f"{name}_cluster" for name in QUESTIONS)]],
        "Average linkage; one dot a head, coloured by layer, and two heads meet at their clusters' mean "
        "distance.",
    )


def _plane(heads: pd.DataFrame) -> Figure:
    shown = heads.assign(head=labels(heads))
    return Figure(
        "Map of heads",
        "Which heads lie near each other, by which question?",
        maps(shown.assign(cluster=[f"cluster {k}" for k in shown["js_keep_cluster"]]), QUESTIONS, "cluster"),
        shown,
        "Classical scaling to a plane. All three maps are coloured by the clusters of JS with the sink: "
        "where colours mix, those clusters are not there without it.",
    )


def _triple(run: Any) -> Figure:
    triple, rows = run.results["witness"]["triple"], np.exp(run.arrays["triple"])
    sinks = run.results["sink"]["columns"]
    dropped = np.delete(rows, sinks, axis=1)
    dropped = dropped / dropped.sum(1, keepdims=True)
    content = [key for key in range(rows.shape[1]) if key not in sinks]
    told = {name: f"{name}: head {triple[name][0]}.{triple[name][1]}" for name in "pqr"}

    def tidy(values: np.ndarray, keys: Any) -> pd.DataFrame:
        parts = [
            pd.DataFrame({"key": list(keys), "head": told[name], "share": row})
            for name, row in zip("pqr", values)
        ]
        return pd.concat(parts, ignore_index=True)

    kept, alone = tidy(rows, range(rows.shape[1])), tidy(dropped, content)
    # in logarithms: on a linear axis every key but the sink lies at zero, and the heads on one another
    drawn = {"x": "key", "series": "head", "label": "share", "log_y": True, "points": False}
    said = "; ".join(
        f"{NAMES[metric]} {d['keep']['pq']:.3g} and {d['keep']['pr']:.3g} with, {d['drop']['pq']:.3g} and "
        f"{d['drop']['pr']:.3g} without"
        for metric, d in triple["distances"].items()
    )
    return Figure(
        "Theorem 1 in this model",
        "Which heads are the sharpest case of a verdict that every classical metric reverses?",
        {
            "With the sink": charts.profile(kept, "share", **drawn),
            "Sink dropped": charts.profile(alone, "share", **drawn),
        },
        pd.concat([kept.assign(convention="keep"), alone.assign(convention="drop")], ignore_index=True),
        f"With the sink r is closer to p, without it q is. Distances to q and r: {said}. Where lines lie on "
        "one another, p is the unbroken one beneath; classical distances hear the left end, the sink.",
    )
