"""Which channel carries the function? Prune by each criterion, and see what the loss says.

    study = prune_study(losses, sets_by_seed, prediction)

Everything here reads per-sequence losses (`studies.pruning`) of sets chosen on other text
(`studies.prune_sets`): the regime map with a prediction made before, how often random beats a criterion,
the stability of the sets, and the weighted family d_λ² = d_A⊥² + λ(Δb)², fitted by cross-validation over
sequences.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.2, Tables 3, 10, 11, Appendix E.2; the
weighted family is its stated future work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from perpend.studies.prune_agreement import SetAgreement
from perpend.studies.prune_sets import RANDOM, Head, PruneSet, stability
from perpend.studies.pruning import SetLosses, paired_change
from perpend.studies.resampling import draws

SIX = ("js", "js_drop", "content", "js_l1", "js_drop_l1", "content_l1")
CLASSICAL = ("js", "js_drop", "js_l1", "js_drop_l1")
CATASTROPHE = 4.0  # times the unpruned perplexity
LAMBDAS = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, float("inf"))
FOLDS = 4


def cells(losses: SetLosses, by_seed: Mapping[int, Sequence[PruneSet]]) -> list[dict[str, Any]]:
    """One record a (criterion, sparsity): perplexity, its population sd over seeds, paired change, KL, top-1.

    Random draws depend on no seed: their sd is None, as with one seed. The interval is that of the first
    seed's set.
    """
    records = []
    for chosen, sets in _over_seeds(by_seed):
        perplexities = [losses.perplexity(heads) for heads in sets]
        change, low, high = paired_change(losses, sets[0])
        records.append(
            {
                "criterion": chosen.criterion,
                "sparsity": chosen.sparsity,
                "heads": len(chosen.heads),
                "shortfall": chosen.shortfall,
                "perplexity": float(np.mean(perplexities)),
                "sd": None if len(sets) == 1 else float(np.std(perplexities)),
                "over_base": float(np.mean(perplexities)) / losses.base_perplexity,
                "loss_change": change,
                "loss_change_low": low,
                "loss_change_high": high,
                "kl": float(np.mean([losses.of(heads, "kl") for heads in sets])),
                "top1_agreement": float(np.mean([losses.of(heads, "agreement") for heads in sets])),
            }
        )
    return records


def agreement_cells(found: SetAgreement, by_seed: Mapping[int, Sequence[PruneSet]]) -> list[dict[str, Any]]:
    """The same without perplexity: the mean of each measure, and the first one's sd and interval."""
    records = []
    for chosen, sets in _over_seeds(by_seed):
        means = [float(found.of(heads, found.measure).mean()) for heads in sets]
        low, high = found.interval(sets[0])
        records.append(
            {
                "criterion": chosen.criterion,
                "sparsity": chosen.sparsity,
                "heads": len(chosen.heads),
                "shortfall": chosen.shortfall,
                found.measure: float(np.mean(means)),
                "sd": None if len(sets) == 1 else float(np.std(means)),
                "low": low,
                "high": high,
                **{
                    name: float(np.mean([found.of(heads, name).mean() for heads in sets]))
                    for name in found.values
                    if name != found.measure
                },
            }
        )
    return records


def _over_seeds(
    by_seed: Mapping[int, Sequence[PruneSet]],
) -> Iterator[tuple[PruneSet, list[tuple[Head, ...]]]]:
    """Each (criterion, sparsity) with the heads it chose for every seed, once where no seed matters."""
    for position, chosen in enumerate(next(iter(by_seed.values()))):
        sets = [by_seed[seed][position].heads for seed in by_seed]
        yield chosen, sets[:1] if chosen.fixed else sets


def random_wins(
    records: Sequence[Mapping[str, Any]], measure: str = "perplexity", *, higher: bool = False
) -> dict[str, dict[str, int]]:
    """How often each criterion is beaten by a random draw: {criterion: {"beaten": k, "of": n}} over cells.

    Lower wins, as for perplexity; with `higher` higher wins.
    """
    sign = -1 if higher else 1
    found: dict[str, dict[str, int]] = {}
    for sparsity in sorted({r["sparsity"] for r in records}):
        at = {r["criterion"]: sign * r[measure] for r in records if r["sparsity"] == sparsity}
        draws = [at[name] for name in RANDOM if name in at]
        for name, value in at.items():
            if name not in RANDOM:
                entry = found.setdefault(name, {"beaten": 0, "of": 0})
                entry["beaten"] += sum(draw < value for draw in draws)
                entry["of"] += len(draws)
    return found


def score(
    prediction: str, records: Sequence[Mapping[str, Any]], base: float, sparsity: float = 0.2
) -> dict[str, Any]:
    """Hold the frozen rule's prediction (`content`, `js`, `abstain`) against the outcome at one sparsity.

    content: content_l1 best of the six or within one sd of the best, and a classical criterion above four
    times the base; js: js or js_l1 best. `held` is None where the rule abstained or a criterion is missing.
    """
    at = {r["criterion"]: r for r in records if np.isclose(r["sparsity"], sparsity) and r["criterion"] in SIX}
    if len(at) < len(SIX):
        return {"predicted": prediction, "outcome": None, "held": None, "sparsity": sparsity}
    best = min(at.values(), key=lambda r: r["perplexity"])
    ours = at["content_l1"]
    tied = ours["perplexity"] <= best["perplexity"] + max(ours["sd"] or 0.0, best["sd"] or 0.0)
    breaks = max(at[name]["perplexity"] for name in CLASSICAL) > CATASTROPHE * base
    outcome = "neither"
    if best["criterion"] in ("js", "js_l1"):
        outcome = "js"
    if tied and breaks:
        outcome = "content" if outcome == "neither" else "both"
    held = None if prediction == "abstain" else outcome in (prediction, "both")
    return {
        "predicted": prediction,
        "outcome": outcome,
        "held": held,
        "sparsity": sparsity,
        "best": best["criterion"],
        "best_perplexity": best["perplexity"],
        "classical_catastrophe": bool(breaks),
    }


def fit_weight(
    losses: SetLosses,
    sets: Mapping[str, PruneSet],
    rivals: Mapping[str, PruneSet],
    *,
    folds: int = FOLDS,
    seed: int = 0,
) -> dict[str, Any]:
    """Choose λ by cross-validation over sequences, and hold the choice against rivals on unseen sequences.

    `sets`: λ as text → its set; `rivals`: name → set (λ = 0, λ = ∞, JS). In each fold λ is chosen on the
    other folds' sequences; the losses of the choices on their own fold make the fitted loss. Differences
    are nats per token, paired by sequence, with 95 % bootstrap intervals; below zero the fitted weight is
    better.
    """
    names = list(sets)
    table = np.stack([losses.of(sets[name].heads, "loss") for name in names])
    count = table.shape[1]
    folds = min(folds, count)
    fold = np.random.default_rng(seed).permutation(np.arange(count) % folds)
    fitted, chosen = np.empty(count), []
    for k in range(folds):
        held = fold == k
        best = int(np.argmin(table[:, ~held].mean(1))) if folds > 1 else int(np.argmin(table.mean(1)))
        chosen.append(names[best])
        fitted[held] = table[best, held]
    weights = draws(count, 1000, seed)
    against = {}
    for name, rival in rivals.items():
        difference = fitted - losses.of(rival.heads, "loss")
        low, high = np.quantile(weights @ difference, [0.025, 0.975])
        verdict = "better" if high < 0 else "worse" if low > 0 else "undecided"
        against[name] = {
            "difference": float(difference.mean()),
            "low": float(low),
            "high": float(high),
            "verdict": verdict,
        }
    return {
        "curve": [{"weight": name, "loss": float(row.mean())} for name, row in zip(names, table)],
        "chosen_by_fold": chosen,
        "fitted_loss": float(fitted.mean()),
        "against": against,
        "folds": folds,
    }


def stability_records(by_seed: Mapping[int, Sequence[PruneSet]]) -> list[dict[str, Any]]:
    """Mean Jaccard of each criterion's sets over pairs of seeds."""
    return [
        {"criterion": criterion, "sparsity": sparsity, "jaccard": value}
        for (criterion, sparsity), value in stability(by_seed).items()
    ]


def findings(
    records: Sequence[Mapping[str, Any]],
    losses: SetLosses,
    scored: Mapping[str, Any] | None,
    wins: Mapping[str, Mapping[str, int]],
    weight: Mapping[str, Any] | None,
) -> list[str]:
    """The answer for a language model, in sentences; `scored` None where no rule was applied."""
    lines = [f"Unpruned perplexity {losses.base_perplexity:.2f} on {losses.tokens:,} tokens of other text."]
    for sparsity in sorted({r["sparsity"] for r in records}):
        at = [r for r in records if r["sparsity"] == sparsity]
        best, worst = (pick(at, key=lambda r: r["perplexity"]) for pick in (min, max))
        least, most = (_tied(at, one, "perplexity") for one in (best, worst))
        same = best["perplexity"] == worst["perplexity"]
        lines.append(
            f"At {sparsity:.0%} sparsity {least} cost{'s' if ' and ' not in least else ''} "
            f"{'the same' if same and len(at) > 1 else 'least'} (perplexity "
            f"{best['perplexity']:.2f}, {best['over_base']:.2f} × base, {_change(best)})"
            + (
                f" and {most} most ({worst['perplexity']:.2f}, {worst['over_base']:.2f} × base)."
                if not same
                else "."
            )
        )
    if scored:
        lines.append(_rule(scored))
    lines += _chance(wins)
    if weight:
        parts = [
            f"{name}: {a['difference']:+.4f} ({a['low']:+.4f} to {a['high']:+.4f}), {a['verdict']}"
            for name, a in weight["against"].items()
        ]
        lines.append(
            f"The weighted family, λ chosen on other sequences ("
            f"{', '.join(dict.fromkeys(weight['chosen_by_fold']))}), "
            f"in nats per token against {'; '.join(parts)} (95 % intervals, sequences resampled)."
        )
    return lines + _cost(losses)


def agreement_findings(
    records: Sequence[Mapping[str, Any]],
    found: SetAgreement,
    wins: Mapping[str, Mapping[str, int]],
    unit: str,
) -> list[str]:
    """The answer for a model without perplexity, in sentences; `unit` is what an input is called."""
    words = {"top1_agreement": "top-1 agreement", "cosine": "cosine of the embeddings"}[found.measure]
    lines = []
    for sparsity in sorted({r["sparsity"] for r in records}):
        at = [r for r in records if r["sparsity"] == sparsity]
        best, worst = (pick(at, key=lambda r: r[found.measure]) for pick in (max, min))
        near, far = (_tied(at, one, found.measure) for one in (best, worst))
        lines.append(
            f"At {sparsity:.0%} sparsity {near} stay{'s' if ' and ' not in near else ''} nearest to the "
            f"unpruned model ({words} {best[found.measure]:.3f}, 95 % interval {best['low']:.3f} to "
            f"{best['high']:.3f} over {found.count} {unit})"
            + (
                f" and {far} leave{'s' if ' and ' not in far else ''} it most ({worst[found.measure]:.3f})."
                if best[found.measure] != worst[found.measure]
                else "."
            )
        )
        if found.right is not None:
            lines[-1] += (
                f" Accuracy on the labels: {best['accuracy']:.3f}, of the unpruned model "
                f"{found.right.mean():.3f}."
            )
    return lines + _chance(wins) + _cost(found)


def _tied(at: Sequence[Mapping[str, Any]], one: Mapping[str, Any], measure: str) -> str:
    """The criteria whose measure is this one's, in words: several where their sets are the same."""
    names = [str(r["criterion"]) for r in at if r[measure] == one[measure]]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _rule(scored: Mapping[str, Any]) -> str:
    said = f"The regime rule, applied before any evaluation, predicted {scored['predicted']!r}"
    if scored["predicted"] == "abstain":
        said = "The regime rule, applied before any evaluation, abstained"
    if not scored.get("applies", True):
        said += " (though it does not apply: the sink gets about what uniform attention gives it)"
    if scored["outcome"] is None:
        return (
            f"{said}; there is no outcome to hold it against: that takes its six criteria at 20 % sparsity."
        )
    held = {None: "", True: ": it held", False: ": it failed"}[scored["held"]]
    return f"{said}; the outcome at 20 % is {scored['outcome']!r}{held}."


def _change(record: Mapping[str, Any]) -> str:
    return (
        f"{record['loss_change']:+.3f} nats per token, 95 % interval {record['loss_change_low']:+.3f} to "
        f"{record['loss_change_high']:+.3f}"
    )


def _chance(wins: Mapping[str, Mapping[str, int]]) -> list[str]:
    beaten = sum(w["beaten"] for w in wins.values())
    total = sum(w["of"] for w in wins.values())
    return [f"A random draw beats a criterion in {beaten} of {total} comparisons."] if total else []


def _cost(found: SetLosses | SetAgreement) -> list[str]:
    lines = [
        f"{len(found.sets)} distinct sets and the unpruned model cost {found.cost:.2f} of one pass for each: "
        "layers that sets share are run once."
    ]
    if found.zero_anyway:
        named = ", ".join(f"{layer}.{head}" for layer, head in found.zero_anyway[:8])
        more = ", …" if len(found.zero_anyway) > 8 else ""
        lines.append(
            f"{len(found.zero_anyway)} removed heads added nothing to begin with (layer.head {named}{more})."
        )
    return lines
