"""Judges of attention rows."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from perpend.papers.judges import (
    ARTEFACT,
    CLASSICAL,
    Outcome,
    Summary,
    beyond,
    drawn,
    either,
    judge,
    path_of,
    told_interval,
)
from perpend.papers.judges.pruning import at_sparsity
from perpend.papers.measures import at


@judge("attention")
def reversal(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rates = {m: at(summary.results, "reversal", m, default={}) for m in CLASSICAL}
    if any("exact" not in rate for rate in rates.values()):
        return None
    found = "; ".join(
        f"{m} {rate['exact']:.1%}"
        + (f" [{rate['low']:.1%}, {rate['high']:.1%}]" if rate.get("low") is not None else "")
        for m, rate in rates.items()
    )
    floors = [rate.get("noise_floor_drop") for rate in rates.values()]
    floors += [rate.get("noise_floor_keep") for rate in rates.values()]
    known = [floor for floor in floors if floor is not None]
    if known:
        found += f"; halves of the text differ by up to {max(known):.1%}"
        if all((rate.get("low") or rate["exact"]) <= max(known) for rate in rates.values()):
            return Outcome(ARTEFACT, found)
    # Half a point on either side: the printed ends are rounded.
    inside = all(args["low"] - 0.005 <= rate["exact"] <= args["high"] + 0.005 for rate in rates.values())
    return either(inside, found)


@judge("attention")
def deviation(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    by_metric = at(summary.results, "calibration", "by_metric", default={})
    off = {m: row["deviation"] for m, row in by_metric.items() if row.get("deviation") is not None}
    if not off:
        return None
    found = "off the curve by " + ", ".join(f"{m} {100 * v:+.1f}" for m, v in off.items()) + " points"
    return either(max(abs(v) for v in off.values()) <= args["most"], found)


@judge("attention")
def exact_zero(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rate = at(summary.results, "reversal", "content", "exact")
    return None if rate is None else either(rate == 0, f"{rate:.1%} of verdicts")


@judge("attention", "audit")
def identical_verdicts(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    if summary.verb == "audit":
        same = at(summary.results, "rivals", "verdicts_identical")
        rates = [at(summary.results, "rivals", m) for m in ("hellinger", "fisher_rao")]
        if same is None:
            return None
        return either(bool(same), f"order of all pairs {'' if same else 'not '}identical, ties included "
                   f"(reversal {rates[0]:.4f} and {rates[1]:.4f})")  # fmt: skip
    rates = [at(summary.results, "reversal", m, "exact") for m in ("hellinger", "fisher_rao")]
    if None in rates:
        return None
    return either(rates[0] == rates[1], f"exact reversal rates {rates[0]:.6f} and {rates[1]:.6f}")


@judge("attention")
def epsilon(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    sweep = at(summary.results, "epsilon", "fp16_probabilities", default=[])
    rates = [at(row, "reversal", "jensen_shannon") for row in sweep]
    if len(rates) < 2 or None in rates:
        return None
    spread = max(rates) - min(rates)
    found = (
        f"from logits ε never enters; from fp16 softmax outputs {sweep[0]['zeros']:.1%} of entries are zero "
        f"and the JS rate moves by {100 * spread:.2f} points"
    )
    return either(spread == 0, found)


@judge("attention")
def windows(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = at(summary.results, "windows", "by_window", default=[])
    rates = [at(row, "reversal", "jensen_shannon", "value") for row in rows]
    if len(rates) < 2 or None in rates:
        return None
    told = ", ".join(f"{rate:.1%} at {row['window']}" for row, rate in zip(rows, rates))
    return either(max(rates) - min(rates) <= args["most"], f"JS reversal {told} keys")


@judge("attention")
def windows_agree(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = at(summary.results, "windows", "between", default=[])
    order = [row["window"] for row in at(summary.results, "windows", "by_window", default=[])]
    rows = [row for row in rows if (row["first"], row["second"]) in list(pairwise(order))]
    if not rows:
        return None
    told = ", ".join(f"{row['first']} to {row['second']}: {row['spearman']['value']:.3f}" for row in rows)
    return either(min(row["spearman"]["value"] for row in rows) >= args["least"], f"Spearman ρ {told}")


@judge("attention")
def windows_retain(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    rows = at(summary.results, "windows", "by_window", default=[])
    kept = [at(row, "retained", "value") for row in rows]
    if not kept or None in kept:
        return None
    told = ", ".join(f"{value:.1%} at {row['window']}" for row, value in zip(rows, kept))
    inside = all(args["low"] - 0.005 <= value <= args["high"] + 0.005 for value in kept)
    return either(inside, f"{told} keys")


@judge()
def greater(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    first, second = (path_of(summary.results, args[name]) for name in ("first", "second"))
    if not isinstance(first, float) or not isinstance(second, float):
        return None
    return either(first - second > args["least"], f"{first:.3f} against {second:.3f}")


@judge()
def share_between(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    if args.get("verb", "attention") != summary.verb:
        return None
    value = path_of(summary.results, args["path"])
    if value is None:
        return None
    shown = 1 - value if args.get("complement") else value
    return either(args["low"] - 0.005 <= value <= args["high"] + 0.005, f"{shown:.1%}")


@judge()
def at_most(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    value = path_of(summary.results, args["path"]) if args["verb"] == summary.verb else None
    if value is None:
        return None
    ends = drawn(summary, args["interval"])
    status = beyond(value, args["most"], *ends, above=False)
    return Outcome(status, told_interval(value, *ends, form=".2%"))


@judge()
def at_least(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    value = path_of(summary.results, args["path"]) if args["verb"] == summary.verb else None
    if value is None:
        return None
    ends = drawn(summary, args["interval"])
    return Outcome(beyond(value, args["least"], *ends, above=True), told_interval(value, *ends, form=".3f"))


@judge("attention")
def entropy_identity(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    layers = at(summary.results, "entropy", "per_layer", default=[])
    gaps = [
        abs(row["total"] - row["binary"] - row["weighted_content"] - (row.get("within_sink") or 0.0))
        for row in layers
        if None not in (row.get("total"), row.get("binary"), row.get("weighted_content"))
    ]
    if not gaps or len(at(summary.results, "sink", "columns", default=[0])) > 1:
        return None  # a sink of several keys has a third term
    return either(max(gaps) < 1e-6, f"largest residual over {len(gaps)} layers {max(gaps):.1e} nats")


@judge("attention")
def bimodal(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    if "smollm2" not in summary.model.lower():
        return None
    rows = [layer["row"] for layer in at(summary.results, "sink", "per_layer", default=[])]
    if len(rows) <= args["cut"] or None in rows:
        return None
    early, late = rows[: args["cut"]], rows[args["cut"] :]
    found = (
        f"{min(early):.2f}–{max(early):.2f} in the first {args['cut']} layers, {min(late):.2f}–"
        f"{max(late):.2f} after (instruction-tuned, four-bit weights)"
    )
    return either(max(early) < min(late), found)


@judge("attention", "prune")
def smollm2_outcome(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
    if "smollm2" not in summary.model.lower():
        return None
    if summary.verb == "attention":
        cv = at(summary.results, "sink", "signature_cv")
        if cv is None:
            return None
        return either(0.36 < cv < 0.42, f"CV {cv:.2f}: the rule says {summary.results['regime']}")
    cells = at_sparsity(summary, 0.2)
    if not cells:
        return None
    best = min(cells, key=cells.get)
    return either(best == "js_l1", f"best at 20 %: {best}, {cells[best]:.2f} times the base")
