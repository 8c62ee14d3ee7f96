"""The figures of `perpend prune`, from the tables of a run."""

from __future__ import annotations

from typing import Any

import pandas as pd

from perpend.report import charts
from perpend.report.figure import Figure

LABELS = {
    "over_base": "perplexity, × unpruned",
    "top1_agreement": "top-1 agreement",
    "cosine": "cosine of embeddings",
}
NAMES = (
    "Criteria ending in _l1 keep one head of each redundant pair in a layer; content is d_A⊥, aitchison the "
    "full distance, js_drop Jensen-Shannon without the sink."
)


def figures(run: Any) -> list[Figure]:
    """Loss or agreement by sparsity, the map, what is removed where, the curve over the weight, stability."""
    cells = run.tables["cells"]
    cells = cells.assign(sparsity=cells["sparsity"].astype(float))
    value = next(name for name in LABELS if name in cells)
    found = [_curves(cells, value), _map(cells, value, run.results)]
    if "removed" in run.tables:
        found.append(_where(run.tables["removed"], run.tables["sets"]))
    if "weights" in run.tables:
        found.append(_weights(run.tables["weights"], run.results.get("weighted") or {}))
    if len(run.tables.get("stability", [])):
        found.append(_stability(run.tables["stability"]))
    return found


def _curves(cells: pd.DataFrame, value: str) -> Figure:
    loss = value == "over_base"
    if cells["sparsity"].nunique() > 1:
        # words, not numbers: ticks where there are sets, and nowhere else
        lines = cells.sort_values("sparsity", kind="stable")
        lines = lines.assign(heads_removed=[f"{sparsity:.3g}" for sparsity in lines["sparsity"]])
        shown = {"x": "heads_removed", "x_label": "share of heads removed", "series": "criterion"}
        chart = charts.profile(
            lines, value, label=LABELS[value], reference={"unpruned": 1.0}, log_y=loss, **shown
        )
    else:
        chart = charts.bars(cells, value, by="criterion", label=LABELS[value], reference={"unpruned": 1.0})
    logarithmic = loss and cells["sparsity"].nunique() > 1
    return Figure(
        "Perplexity after pruning" if loss else "Agreement after pruning",
        "Which notion of redundancy removes heads that the model does not miss?",
        chart,
        cells,
        f"Mean over seeds{', logarithmic' if logarithmic else ''}, against the unpruned model. {NAMES}",
    )


def _map(cells: pd.DataFrame, value: str, results: dict[str, Any]) -> Figure:
    predicted = results.get("prediction")
    rule = (
        f" The rule on the sink's spread (CV {predicted['cv']:.2f}) said {predicted['regime']!r} before any "
        "evaluation."
        if predicted and predicted.get("cv") is not None
        else ""
    )
    return Figure(
        "Regime map",
        "Where is each criterion safe?",
        charts.heat(
            cells,
            value,
            x="sparsity",
            y="criterion",
            label=LABELS[value],
            form=".2f",
            log=value == "over_base" and bool((cells[value] > 0).all()),
        ),
        cells,
        f"One cell a criterion and sparsity: {LABELS[value]}.{rule}",
    )


def _where(removed: pd.DataFrame, sets: pd.DataFrame) -> Figure:
    named = {
        f"{float(sparsity):.0%}": charts.heat(
            group, "removed", x="layer", y="criterion", label="share of the layer's heads", form=".0%"
        )
        for sparsity, group in removed.groupby("sparsity")
    }
    named = dict(zip(named, charts.one_scale(list(named.values()))))
    return Figure(
        "What each criterion removes",
        "In which layers do the removed heads sit?",
        named,
        sets.assign(unused_kv_heads=sets["unused_kv_heads"].astype(object).fillna("")),
        "At 100 % a layer loses all its heads; the mean over seeds. The table has one row a set: its file "
        "under masks/, which perpend.ablate and --heads read, and layer.head of the KV heads that no query "
        "head reads any more.",
    )


def _weights(weights: pd.DataFrame, fitted: dict[str, Any]) -> Figure:
    weights = weights.assign(weight=weights["weight"].astype(str))
    chosen = ", ".join(dict.fromkeys(fitted.get("chosen_by_fold", ())))
    return Figure(
        "The weighted family",
        "How much should the sink balance count beside the content?",
        charts.profile(weights, "loss", x="weight", label="loss (nats per token)", x_label="λ"),
        weights,
        "Keep-one pruning by d_λ² = d_A⊥² + λ(Δb)²: 0 is content alone, inf the sink balance alone."
        + (f" Chosen on other sequences: {chosen}." if chosen else ""),
    )


def _stability(stable: pd.DataFrame) -> Figure:
    stable = stable.assign(cell=[f"{c} {s:.0%}" for c, s in zip(stable["criterion"], stable["sparsity"])])
    return Figure(
        "Stability of the sets",
        "Do other sequences of the same text choose the same heads?",
        charts.bars(stable, "jaccard", by="cell", label="mean Jaccard over pairs of seeds"),
        stable,
        "1 means that every seed prunes the same heads.",
    )
