"""What a run measured of a table or figure, under the names that the printed numbers have.

    measured = measure("survey", [run])          # {"cosine": Measured(0.361, 0.352, 0.370), …}

Fractions, nats and plain numbers as run.json has them; the comparison turns them into the printed unit. A
quantity that a run does not hold is left out, so that runs of other options stay readable.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from perpend.runs.reader import FinishedRun

AGREEMENTS = ("top1_agreement", "cosine", "agreement")
METRICS = ("cosine", "jensen_shannon", "euclidean", "hellinger", "fisher_rao")


@dataclass(frozen=True)
class Measured:
    """A value with its 95 % interval where the run has one; `unit` as run.json has it ("" a fraction)."""

    value: float
    low: float | None = None
    high: float | None = None
    unit: str = "fraction"


Found = dict[str, Measured]
Measure = Callable[[Sequence["FinishedRun"]], Found]


def measure(kind: str | None, runs: Sequence[FinishedRun]) -> Found:
    """All quantities of one item that the runs of one model hold; none where `kind` is None."""
    found = {} if kind is None else _MEASURES[kind](runs)
    return {name: one for name, one in found.items() if one.value is not None and math.isfinite(one.value)}


def _of(runs: Sequence[FinishedRun], command: str) -> Mapping[str, Any]:
    """Results of the last run of a command, empty where there is none."""
    chosen = [run.results for run in runs if run.command == command]
    return chosen[-1] if chosen else {}


def at(results: Any, *path: Any, default: Any = None) -> Any:
    """The value under a path of keys and indices, `default` where any of it is missing or null."""
    for key in path:
        try:
            results = results[key]
        except (KeyError, IndexError, TypeError):
            return default
    return default if results is None else results


def survey(runs: Sequence[FinishedRun]) -> Found:
    """Table 2 of the attention paper: sink masses, reversal rates, collapse disagreement."""
    results = _of(runs, "attention")
    found = {
        "sink_row": Measured(at(results, "sink", "row_mass")),
        "sink_signature": Measured(at(results, "sink", "signature_mass")),
    }
    for metric in METRICS[:4]:
        rate = at(results, "reversal", metric, default={})
        found[metric] = Measured(rate.get("mean"), rate.get("low"), rate.get("high"), "fraction")
    found["collapse_disagreement"] = Measured(at(results, "collapse", "disagreement"))
    found["cv"] = Measured(at(results, "sink", "signature_cv"), unit="CV")
    return found


def windows(runs: Sequence[FinishedRun]) -> Found:
    """Appendix E.3: JS reversal and retained mass by window, and content distances between windows."""
    results = at(_of(runs, "attention"), "windows", default={})
    found: Found = {}
    kept = []
    for row in results.get("by_window", []):
        found[f"{row['window']}/jensen_shannon"] = _number(row["reversal"]["jensen_shannon"])
        found[f"{row['window']}/retained"] = _number(row["retained"])
        kept.append(_number(row["retained"]))
    if kept:
        found["retained/low"] = min(kept, key=lambda one: one.value)
        found["retained/high"] = max(kept, key=lambda one: one.value)
    windows_of = [row["window"] for row in results.get("by_window", [])]
    next_to = [
        _number(row["spearman"], "rho")
        for row in results.get("between", [])
        if (row["first"], row["second"]) in list(pairwise(windows_of))
    ]
    if next_to:
        found["spearman/low"] = min(next_to, key=lambda one: one.value)
        found["spearman/high"] = max(next_to, key=lambda one: one.value)
    return found


def _number(number: Mapping[str, Any], unit: str = "fraction") -> Measured:
    """A {value, low, high} of a run."""
    return Measured(number["value"], number.get("low"), number.get("high"), unit)


def audit(runs: Sequence[FinishedRun]) -> Found:
    """Tables 6 to 8 and Figure 7: rates exact over all triples, with intervals where the run has them."""
    results = _of(runs, "audit")
    drawn = at(results, "intervals", default={})

    def one(key: str, *path: str, unit: str = "fraction") -> Measured:
        ends = drawn.get(key) or {}
        return Measured(at(results, *path), ends.get("low"), ends.get("high"), unit)

    temperature = [row for row in at(results, "temperature", default=[]) if row["metric"] == "jensen_shannon"]
    content = [row for row in at(results, "temperature", default=[]) if row["metric"] == "content"]
    found = {
        "hellinger": one("rivals/hellinger", "rivals", "hellinger"),
        "fisher_rao": one("rivals/fisher_rao", "rivals", "fisher_rao"),
        "share_below_1e-6": one("tail/1e-06", "tail", "1e-06", "share"),
        "spearman": one("content/spearman", "content", "spearman", unit="rho"),
        "nearest_neighbour_agreement": one("content/neighbours", "content", "neighbours"),
        "cross_ari": one("content/cross_ari", "content", "cross_ari", unit="ARI"),
        "sink_set_js_drop": one("sink_set/jensen_shannon", "sink_set", "jensen_shannon"),
        "sink_set_content": one("sink_set/content", "sink_set", "content"),
        "triples_all_reverse": one("witness/share", "witness", "share"),
        "triple_margin": Measured(at(results, "witness", "margin"), unit="relative"),
    }
    for mean, printed in (("arithmetic", "arithmetic"), ("aitchison", "aitchison_mean")):
        for metric in METRICS[:3]:
            found[f"{printed}/{metric}"] = one(f"aggregation/{mean}/{metric}", "aggregation", mean, metric)
    for metric, value in at(results, "taxonomy", "between_conventions", default={}).items():
        found[f"ari/{metric}"] = Measured(value, unit="ARI")
    if temperature:
        for name, worst in (("flips", max), ("retention", min)):
            ends = drawn.get(f"temperature_worst/jensen_shannon/{name}") or {}
            value = worst(row[name] for row in temperature)
            key = "temperature_flip" if name == "flips" else "temperature_retention"
            found[key] = Measured(value, ends.get("low"), ends.get("high"))
    if content:
        found["temperature_flip_content"] = Measured(max(row["flips"] for row in content))
    return found


def prune(runs: Sequence[FinishedRun]) -> Found:
    """Tables 3, 10, 11 and the held-out test: perplexities by criterion and sparsity, and the sink's CV."""
    results = _of(runs, "prune")
    found = {
        "base": Measured(at(results, "base", "perplexity"), unit="perplexity"),
        "cv": Measured(at(results, "prediction", "cv"), unit="CV"),
    }
    base = at(results, "base", "perplexity")
    for cell in at(results, "cells", default=[]):
        key = f"{round(100 * cell['sparsity'])}/{cell['criterion']}"
        if "perplexity" not in cell:  # an image model or an encoder is held against itself
            name = next((name for name in AGREEMENTS if name in cell), None)
            if name:
                unit = name.replace("_", " ").replace("top1", "top-1")
                found[key] = Measured(cell[name], cell.get("low"), cell.get("high"), unit)
            continue
        ends = [cell.get(f"loss_change_{end}") for end in ("low", "high")]
        low, high = (base * math.exp(end) if base and end is not None and end < 700 else None for end in ends)
        found[key] = Measured(cell["perplexity"], low, high, "perplexity")
    return found


def checkpoints(runs: Sequence[FinishedRun]) -> Found:
    """Figure 5b and Appendix E.2: the fall of the entropy and its exact parts."""
    collapse = at(_of(runs, "checkpoints"), "collapse", default={})
    found = {}
    units = {"share": "fraction", "dispersion_change": "fraction"}
    for name in ("total", "binary", "weighted_content", "content", "share", "dispersion_change"):
        low, high = at(collapse, "intervals", name, default=(None, None))
        found[name] = Measured(collapse.get(name), low, high, units.get(name, "nats"))
    return found


def scale(runs: Sequence[FinishedRun]) -> Found:
    """Figure 5a: a model's point, sink masses and reversal rates."""
    return {name: one for name, one in survey(runs).items() if name != "cv"}


def taxonomy(runs: Sequence[FinishedRun]) -> Found:
    """Tables 5 and 9 of the attention paper: Rand indices between conventions, and the blocks found again."""
    results = _of(runs, "taxonomy")
    names = {"jensen_shannon": "js", "cosine": "cosine", "content": "content"}
    found: Found = {}
    for metric, record in at(results, "between_conventions", default={}).items():
        found[f"ari/{metric}"] = Measured(record["mean"], record.get("low"), record.get("high"), "ARI")
        for k, value in record["by_clusters"].items():
            if metric in names:
                found[f"k{k}/{names[metric]}_cross_ari"] = Measured(value, unit="ARI")
    for row in at(results, "blocks", "sep", default=[]):
        if row["metric"] in names and (row["metric"] != "content" or row["policy"] == "keep"):
            name = names[row["metric"]] + ("" if row["metric"] == "content" else f"_{row['policy']}")
            key = f"k{row['clusters']}/sep_jaccard_{name}"
            found[key] = Measured(row["jaccard"], row.get("low"), row.get("high"), "Jaccard")
    for role, count in at(results, "majority", default={}).items():
        found[f"heads/{role}"] = Measured(float(count), unit="heads")
    if "heads" in results:
        found["heads/all"] = Measured(float(results["heads"]), unit="heads")
    return found


def diagonal(runs: Sequence[FinishedRun]) -> Found:
    """Tables 5 and 6 of the directional paper, over all layers; fractions and additions to A_tt."""
    results = at(_of(runs, "edit"), "diagonal", default={})
    found: Found = {}
    forms = {"residual.attn head": "residual", "value.exclude_self": "value", "value.full": "value_full"}
    for row in at(results, "diagonal", default=[]):
        if row.get("layer") is None and row["form"] in forms:
            for end in ("min", "max"):
                found[f"diagonal/{forms[row['form']]}/{end}"] = Measured(row[end], unit="A_tt")
    sites = {"residual.attn": "residual", "value.exclude_self": "value", "value.full": "value_full"}
    for row in at(results, "audit", default=[]):
        if row.get("layer") is None and row["site"] in sites:
            for name in ("norm_change", "energy_removed"):
                found[f"applied/{sites[row['site']]}/{name}"] = Measured(row[name])
    return found


def compress(runs: Sequence[FinishedRun]) -> Found:
    """Figure 6 and its table: r(e⊥, e) over layers and tokens, and each regime's mean errors."""
    found: Found = {}
    for regime, outcome in at(_of(runs, "compress"), "regimes", default={}).items():
        for row in outcome.get("summary", []):
            if row["mode"] != "local" or row.get("along", "update") != "update":
                continue
            key = f"{regime}/{row['part']}"
            for name in ("perpendicular", "parallel", "total"):
                found[f"{key}/{name}"] = Measured(row[name], unit="of the update")
            found[f"{key}/r_over_tokens"] = Measured(row.get("r_over_tokens"), unit="r")
            found[f"{key}/r_over_layers"] = Measured(row.get("r_over_layers"), unit="r")
    over = [one.value for name, one in found.items() if name.endswith("mlp/r_over_layers")]
    if over and None not in over:
        found["error/correlation"] = Measured(min(over), unit="r")
    return found


def edit(runs: Sequence[FinishedRun]) -> Found:
    """The sweep's change of the loss, nats per token, by cell."""
    found: Found = {}
    for cell in at(_of(runs, "edit"), "cells", default=[])[1:]:
        name = f"{cell['site']} s∥={cell['parallel']:g} s⊥={cell['perpendicular']:g}"
        name += f" {cell['control']} control" if cell.get("control") else ""
        found[name] = Measured(cell["change"], cell.get("change_low"), cell.get("change_high"), "nats")
    return found


def heads(runs: Sequence[FinishedRun]) -> Found:
    """Figure 7: the joint edit against the single heads', summed over layers after the first."""
    layers = at(_of(runs, "edit"), "heads", "layers", default=[])
    if not layers:
        return {}
    rest = layers[1:] or layers
    found = {
        name: Measured(sum(row[name] for row in rest), unit="nats")
        for name in ("joint", "signed_sum", "sum_of_sizes")
    }
    found["within_envelope"] = Measured(sum(row["within_envelope"] for row in rest) / len(rest))
    first = layers[0]
    found["layer 0 joint"] = Measured(first["joint"], first["joint_low"], first["joint_high"], "nats")
    return found


def tasks(runs: Sequence[FinishedRun]) -> Found:
    """Tables 8 and 9: paired change of each score, and of the right answer's log-likelihood."""
    found: Found = {}
    for condition, one in at(_of(runs, "evaluate"), "comparison", default={}).items():
        for task, quantities in one.get("tasks", {}).items():
            for name, row in quantities.items():
                unit = "nats" if row.get("unit") == "nats" else "fraction"
                key = f"{condition} {task} {name}"
                found[key] = Measured(row["difference"], row.get("low"), row.get("high"), unit)
    return found


def train(runs: Sequence[FinishedRun]) -> Found:
    """Pretraining: differences of the validation loss within a seed, by budget."""
    found: Found = {}
    for row in at(_of(runs, "train"), "paired", default=[]):
        key = f"{row['variant']} − {row['against']} at equal {row['budget']}"
        found[key] = Measured(row["mean"], row.get("low"), row.get("high"), "nats")
    return found


def cosine(runs: Sequence[FinishedRun]) -> Found:
    """Figure 11: the second-order form's largest median gap over blocks, and mean ratios beside the null."""
    results = _of(runs, "updates")
    gaps = [at(layer, "block", "gap_median") for layer in at(results, "updates", "per_layer", default=[])]
    kept = [gap for gap in gaps if gap is not None]
    found = {"largest median gap of 1 − ρ²/2": Measured(max(kept), unit="cosine")} if kept else {}
    for part in ("attn", "mlp", "block"):
        value = at(results, "updates", "over_layers", part, "all", "ratio")
        found[f"ratio/{part}"] = Measured(value, unit="along/across")
    found["ratio/random direction"] = Measured(
        at(results, "updates", "null", "ratio_mean"), unit="along/across"
    )
    return found


_MEASURES: dict[str, Measure] = {
    "survey": survey,
    "windows": windows,
    "audit": audit,
    "prune": prune,
    "checkpoints": checkpoints,
    "scale": scale,
    "taxonomy": taxonomy,
    "diagonal": diagonal,
    "compress": compress,
    "edit": edit,
    "heads": heads,
    "tasks": tasks,
    "train": train,
    "cosine": cosine,
}
