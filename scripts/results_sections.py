"""Sections of docs/results.md that hold a run of `perpend updates` or `perpend prune` against the papers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from profile_svg import log_lines

Document = Mapping[str, Any]
Table = Callable[[Sequence[str], Sequence[Sequence[Any]]], list[str]]
PARTS = {"attn": "attention", "mlp": "MLP", "block": "block"}
SETS = {
    "all": "all",
    "without_first": "no position 0",
    "without_top": "no top 1 %",
    "without_both": "neither",
}

# What the attention paper prints of SmolLM2-135M at 20 % sparsity (Appendix E.2, held-out test).
PRINTED = {
    "unpruned perplexity": "24.8",
    "CV of the sink share, and the rule": "0.42, abstains",
    "best of the six criteria": "js_l1, 83.5 ± 0.2 (3.4 × base)",
    "content-conditioned criteria, × base": "9 to 54",
}
CONDITIONED = ("js_drop", "content", "js_drop_l1", "content_l1")
SIX = ("js", "js_l1", *CONDITIONED)


def profile(document: Document) -> str:
    """The profile figure: the ratio by layer and part, beside a random direction's. SVG."""
    updates = document["results"]["updates"]
    layers = updates["per_layer"]
    series = {
        name: [layer[part]["ratio_median"] for layer in layers]
        for part, name in PARTS.items()
        if part in layers[0]
    }
    return log_lines(
        series,
        title="Update along the stream over update across it, median token",
        x="layer",
        y="‖Δ∥‖ / ‖Δ⊥‖",
        reference=("random direction", updates["null"]["ratio_median"]),
    )


def updates(document: Document, figure: str, table: Table) -> list[str]:
    """The lines after the heading; `figure` is the file of the profile."""
    results = document["results"]
    found = results["updates"]
    lines = [f"![Ratio by layer]({figure})", ""]
    rows = [
        [PARTS[part], SETS[name], *(one[key] for key in ("ratio", "ratio_median", "alpha", "energy"))]
        for part, sets in found["over_layers"].items()
        for name, one in sets.items()
    ]
    null = found["null"]
    rows.append(["random direction", "–", null["ratio_mean"], null["ratio_median"], 0.0, null["energy"]])
    lines += ["Means over layers; the ratio is the mean, and beside it the median, over tokens.", ""]
    lines += table(["part", "tokens", "ratio", "median", "α", "energy"], rows)
    generation = results.get("generation")
    if generation:
        rows = [
            [
                layer["layer"],
                PARTS[part],
                *(layer[part][k] for k in ("ratio", "first_quarter", "last_quarter")),
            ]
            for layer in generation["per_layer"]
            for part in PARTS
            if part in layer
        ]
        lines += ["While the model writes, greedily and with its cache: the ratio over the steps.", ""]
        lines += table(["layer", "part", "all steps", "first quarter", "last quarter"], rows)
    curve = results.get("dropping", {}).get("curve", [])
    if curve:
        counts = sorted({row["count"] for row in curve})
        at = {(row["order"], row["count"]): row["perplexity"] for row in curve}
        orders = list(dict.fromkeys(row["order"] for row in curve))
        unit = results["dropping"]["unit"]
        lines += [f"Perplexity with so many {unit}s dropped, by order of dropping.", ""]
        lines += table(
            ["order", *map(str, counts)],
            [[order, *(at.get((order, count)) for count in counts)] for order in orders],
        )
    return lines


def prune(document: Document, table: Table) -> list[str]:
    """The lines after the heading: SmolLM2 beside the paper's figures, then every cell."""
    results = document["results"]
    cells = results["cells"]
    lines: list[str] = []
    if "smollm2" in document["request"]["model"]["name"].lower() and results.get("prediction"):
        ours = _here(results)
        lines += [
            "The paper prints these figures of the base model SmolLM2-135M at 20 % sparsity; here is its "
            "instruction-tuned and four-bit descendant, on other text.",
            "",
        ]
        lines += table(["", "paper", "here"], [[name, PRINTED[name], ours[name]] for name in PRINTED])
    names = ["criterion", "sparsity", "heads", "perplexity", "sd", "over_base", "loss_change"]
    names += ["loss_change_low", "loss_change_high", "kl", "top1_agreement", "cosine", "low", "high"]
    names = [name for name in [*names, "neighbour_agreement"] if name in cells[0]]
    lines += table(names, [[cell.get(name) for name in names] for cell in cells])
    stable = results.get("stability", [])
    if stable:
        lines += ["Jaccard of the sets over pairs of seeds, and how often a random draw is better.", ""]
        beaten = results.get("random_beats", {})
        rows = [
            [
                name,
                *(row["jaccard"] for row in stable if row["criterion"] == name),
                "{beaten} of {of}".format(**beaten[name]) if name in beaten else None,
            ]
            for name in dict.fromkeys(row["criterion"] for row in stable)
        ]
        sparsities = dict.fromkeys(row["sparsity"] for row in stable)
        lines += table(["criterion", *(f"{s:.0%}" for s in sparsities), "random is better"], rows)
    weighted = results.get("weighted")
    if weighted:
        lines += [
            "The weighted family d_λ² = d_A⊥² + λ(Δb)², keep-one: loss by λ; the fitted λ, cross-validated "
            "over sequences, against its rivals, nats per token.",
            "",
        ]
        curve = weighted["curve"]
        lines += table(["λ", *(point["weight"] for point in curve)], [["loss", *(p["loss"] for p in curve)]])
        rows = [
            [name, one["difference"], one["low"], one["high"], one["verdict"]]
            for name, one in weighted["against"].items()
        ]
        lines += table(["fitted λ against", "difference", "low", "high", "verdict"], rows)
    return lines


def _here(results: Mapping[str, Any]) -> dict[str, str]:
    """This run's counterpart of each figure in PRINTED."""
    at = {cell["criterion"]: cell for cell in results["cells"] if abs(cell["sparsity"] - 0.2) < 1e-9}
    six = [at[name] for name in SIX if name in at]
    best = min(six, key=lambda cell: cell["perplexity"])
    conditioned = [at[name]["over_base"] for name in CONDITIONED if name in at]
    verdict = results["prediction"]["regime"]
    said = "abstains" if verdict == "abstain" else f"predicts {verdict}"
    return {
        "unpruned perplexity": f"{results['base']['perplexity']:.1f}",
        "CV of the sink share, and the rule": f"{results['prediction']['cv']:.2f}, {said}",
        "best of the six criteria": f"{best['criterion']}, {best['perplexity']:.1f} ± {best['sd'] or 0:.1f} "
        f"({best['over_base']:.1f} × base)",
        "content-conditioned criteria, × base": f"{min(conditioned):.2g} to {max(conditioned):.2g}",
    }
