"""Audits of what is read off head signatures: which of it is the estimator, the metric or a convention.

    study = audit_signatures(log_signatures, sink=[0], arithmetic=means)

Everything here comes from saved signatures (layers, heads, keys) of a survey; no model is run. Rates are
exact, over all head triples, never sampled; fractions.

    tail          share of squared d_A⊥ on coordinates that are small in either head
    rivals        Hellinger and Fisher-Rao order all pairs alike; Hellinger on content against dropped-row JS
    content       dropped-row JS against d_A⊥: ranking, nearest neighbours, taxonomies
    aggregation   reversal rates on arithmetic and on Aitchison means
    temperature   content logits times τ: d_A⊥ → τ·d_A⊥, so no verdict moves; dropped-row JS has no such law
    sink_set      first key against first four: content distances are nested projections
    taxonomy      clusters of heads, kept against dropped
    witness       Theorem 1 in the wild: the triples on which all classical verdicts reverse at once

Source: "Which Question Is Your Attention Metric Answering?", Appendix E.1, E.2, Tables 5-8, Figure 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from perpend.errors import InputError, PerpendError
from perpend.geometry import pairwise
from perpend.report.notebook import Rich
from perpend.studies import taxonomy
from perpend.studies.prune_sets import jaccard, most_redundant
from perpend.studies.reversal import exact_rates, matrices

if TYPE_CHECKING:
    import pandas as pd

CLASSICAL = ("cosine", "jensen_shannon", "euclidean")
THRESHOLDS = (1e-6, 1e-9)
TEMPERATURES = (0.5, 0.7, 1.5, 2.0)
SPARSITIES = (0.1, 0.2, 0.3)
ROUNDING = 1e-12  # relative: what the dominance of nested projections may miss


def same_order(first: np.ndarray, second: np.ndarray) -> bool:
    """Whether two matrices give every closer-head verdict alike, ties included."""
    return all(
        np.array_equal(stats.rankdata(np.delete(a, p), "dense"), stats.rankdata(np.delete(b, p), "dense"))
        for p, (a, b) in enumerate(zip(first, second))
    )


def flips(first: np.ndarray, second: np.ndarray) -> float:
    """Share of all triples whose verdict is opposite between two matrices."""
    return float(exact_rates(first, second)[0].mean())


def nearest(distances: np.ndarray) -> np.ndarray:
    """The nearest other head of each head, the first of equals, (heads,)."""
    return np.argmin(distances + np.where(np.eye(len(distances), dtype=bool), np.inf, 0.0), axis=1)


def tail(rows: np.ndarray, sink: Sequence[int], thresholds: Sequence[float] = THRESHOLDS) -> dict[str, Any]:
    """Share of squared d_A⊥, over all pairs, on content keys whose smaller entry is below each threshold.

    `rows` (heads, keys), log-probabilities; entries are those of the whole signature, sink included. Also
    the number of keys whose median over heads is below, where a tail could be amalgamated.
    """
    content = [key for key in range(rows.shape[1]) if key not in set(sink)]
    entries = rows[:, content]
    logs = entries - entries.mean(1, keepdims=True)
    whole, small = 0.0, np.zeros(len(thresholds))
    for p in range(len(rows) - 1):
        square = np.square(logs[p] - logs[p + 1 :])
        low = np.minimum(entries[p], entries[p + 1 :])
        whole += square.sum()
        small += [square[low < np.log(threshold)].sum() for threshold in thresholds]
    median = np.median(entries, axis=0)
    return {
        f"{threshold:g}": {
            "share": float(part / whole) if whole else None,
            "keys_with_median_below": int((median < np.log(threshold)).sum()),
        }
        for threshold, part in zip(thresholds, small)
    }


def rivals(
    pairs: dict[str, tuple[np.ndarray, np.ndarray]], sparsities: Sequence[float] = SPARSITIES
) -> dict[str, Any]:
    """Hellinger against Fisher-Rao, and Hellinger on content against dropped-row JS."""
    (h_keep, h_drop), (f_keep, f_drop) = pairs["hellinger"], pairs["fisher_rao"]
    js = pairs["jensen_shannon"][1]
    sets = {}
    for sparsity in sparsities:
        count = round(sparsity * len(js))
        both = [[(0, head) for head in most_redundant(d, count)] for d in (h_drop, js)]
        sets[f"{sparsity:g}"] = jaccard(*both)
    return {
        "hellinger": flips(h_keep, h_drop),
        "fisher_rao": flips(f_keep, f_drop),
        "verdicts_identical": same_order(h_keep, f_keep) and same_order(h_drop, f_drop),
        "hellinger_content_neighbours": float(np.mean(nearest(h_drop) == nearest(js))),
        "hellinger_content_prune_sets": sets,
    }


def content_channel(js_drop: np.ndarray, content: np.ndarray) -> dict[str, float | None]:
    """Dropped-row JS against d_A⊥: Spearman ρ of distances, nearest-neighbour agreement, cross-ARI."""
    upper = np.triu_indices(len(content), 1)
    cross = taxonomy.between(js_drop, content)
    return {
        "spearman": float(stats.spearmanr(js_drop[upper], content[upper]).statistic),
        "neighbours": float(np.mean(nearest(js_drop) == nearest(content))),
        "cross_ari": None if np.isnan(cross) else cross,
    }


def temperature(
    rows: np.ndarray,
    sink: Sequence[int],
    temperatures: Sequence[float] = TEMPERATURES,
    sparsity: float = 0.2,
) -> list[dict[str, Any]]:
    """Content logits times each τ against τ = 1, for dropped-row JS and d_A⊥.

    `flips` over all triples; `retention`, the share of the prune set at τ = 1 that stays; `identical`
    whether every verdict and the prune set are the same, ties included; `equivariance`, the largest relative
    distance of d from τ·d(1).
    """
    content = np.delete(rows, list(sink), axis=1)
    # A column that the metric takes for the sink: its value does not enter.
    padded = np.concatenate([np.zeros((len(rows), 1)), content], axis=1)
    count = round(sparsity * len(rows))
    upper = np.triu_indices(len(rows), 1)
    base = {
        name: pairwise(padded, name, sink=0, policy="drop", log=True)
        for name in ("jensen_shannon", "content")
    }
    found = []
    for tau in temperatures:
        for name, before in base.items():
            after = pairwise(padded * tau, name, sink=0, policy="drop", log=True)
            sets = [set(most_redundant(d, count)) for d in (before, after)]
            scale = tau * before[upper]
            off = np.abs(after[upper] - scale)[scale > 0] / scale[scale > 0]
            found.append(
                {
                    "metric": name,
                    "tau": float(tau),
                    "flips": flips(before, after),
                    "retention": len(sets[0] & sets[1]) / count if count else 1.0,
                    "identical": same_order(before, after) and sets[0] == sets[1],
                    "equivariance": float(off.max()) if off.size else 0.0,
                }
            )
    return found


def sink_set(rows: np.ndarray, one: Sequence[int], four: Sequence[int]) -> dict[str, Any]:
    """Verdicts under a smaller and a larger sink, and whether the content distances are nested.

    The content without `four` is a projection of the content without `one`, so d_A⊥ never grows.
    """
    before = {
        m: pairwise(rows, m, sink=list(one), policy="drop", log=True) for m in ("jensen_shannon", "content")
    }
    after = {
        m: pairwise(rows, m, sink=list(four), policy="drop", log=True) for m in ("jensen_shannon", "content")
    }
    upper = np.triu_indices(len(rows), 1)
    small, large = after["content"][upper], before["content"][upper]
    js_small, js_large = after["jensen_shannon"][upper], before["jensen_shannon"][upper]
    return {
        "small": list(one),
        "large": list(four),
        "jensen_shannon": flips(before["jensen_shannon"], after["jensen_shannon"]),
        "content": flips(before["content"], after["content"]),
        "pairs": len(small),
        "violations": int((small > large * (1 + ROUNDING)).sum()),
        "violations_jensen_shannon": int((js_small > js_large * (1 + ROUNDING)).sum()),
    }


@dataclass(frozen=True)
class Witness:
    """Triples on which all classical verdicts reverse at once: their share, and the sharpest (p, q, r).

    With the sink r is closer to p, without it q is, as in the paper's Table 1. `margin`: the smallest of
    |d(p,q) − d(p,r)| / (d(p,q) + d(p,r)) over metrics and conventions.
    """

    share: float
    triple: tuple[int, int, int] | None
    margin: float


def witness(pairs: dict[str, tuple[np.ndarray, np.ndarray]], metrics: Sequence[str] = CLASSICAL) -> Witness:
    """All triples looked at, O(heads³)."""
    heads = len(pairs[metrics[0]][0])
    best, triple, count = 0.0, None, 0
    for p in range(heads):
        others = np.delete(np.arange(heads), p)
        sharp = np.full((heads - 1, heads - 1), np.inf)
        for metric in metrics:
            for sign, distances in zip((1.0, -1.0), pairs[metric]):
                d = distances[p, others]
                total = d[:, None] + d
                part = np.divide(sign * (d[:, None] - d), total, out=np.zeros_like(total), where=total > 0)
                sharp = np.minimum(sharp, part)
        count += int((sharp > 0).sum())
        at = int(sharp.argmax())
        if sharp.flat[at] > best:
            q, r = np.unravel_index(at, sharp.shape)
            best, triple = float(sharp.flat[at]), (p, int(others[q]), int(others[r]))
    questions = heads * (heads - 1) * (heads - 2) / 2
    return Witness(count / questions, triple, best)


@dataclass(frozen=True)
class Audit(Rich):
    """Plain results: `results` as in run.json, `tables` and `arrays` by name, `findings` in words."""

    results: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    arrays: dict[str, np.ndarray]
    findings: list[str]
    undefined: dict[str, str] = field(default_factory=dict)


def audit_signatures(
    log_signatures: np.ndarray,
    sink: Sequence[int] = (0,),
    arithmetic: np.ndarray | None = None,
) -> Audit:
    """All audits of signatures (layers, heads, keys), log-probabilities; `arithmetic` are probabilities.

    Heads without a signature (NaN) are left out. Raises InputError with fewer than four heads that have one,
    and for a sink outside the keys.
    """
    import pandas as pd

    defined = np.isfinite(log_signatures).all(-1)
    index = [(int(layer), int(head)) for layer, head in np.argwhere(defined)]
    if len(index) < 4:
        raise InputError(f"an audit needs at least four heads with a signature, and there are {len(index)}")
    rows, sink, undefined = log_signatures[defined], sorted(int(key) for key in sink), {}
    keys = rows.shape[1]
    if not sink or not 0 <= sink[0] <= sink[-1] < keys:
        raise InputError(f"the sink {sink} is not among keys 0 to {keys - 1}")
    pairs = matrices(rows, sink)
    if not np.array_equal(*pairs["content"]):
        raise PerpendError("d_A⊥ differs between keep and drop, which it cannot: please report this")
    results: dict[str, Any] = {
        "heads": len(index),
        "sink": {"columns": sink, "signature_mass": float(np.exp(rows[:, sink]).sum(1).mean())},
        "tail": tail(rows, sink),
        "rivals": rivals(pairs),
        "content": content_channel(pairs["jensen_shannon"][1], pairs["content"][1]),
        "temperature": temperature(rows, sink),
    }
    results["aggregation"] = {"aitchison": {m: flips(*pairs[m]) for m in CLASSICAL}, "arithmetic": None}
    if arithmetic is None or not (arithmetic[defined] > 0).all():
        undefined["aggregation"] = (
            "no arithmetic signatures" if arithmetic is None else "arithmetic signatures with zeros"
        )
    else:
        native = matrices(np.log(arithmetic[defined]), sink, CLASSICAL)
        results["aggregation"]["arithmetic"] = {m: flips(*native[m]) for m in CLASSICAL}
    four = list(range(4))
    if set(sink) < set(four) and keys > 6:
        results["sink_set"] = sink_set(rows, sink, four)
    else:
        results["sink_set"] = None
        undefined["sink_set"] = f"the sink {sink} of {keys} keys is not a part of the first four"
    clusters = taxonomy.stability({metric: pairs[metric] for metric in taxonomy.METRICS})
    average = clusters[clusters["linkage"] == "average"].groupby("metric", sort=False)["ari"].mean()
    results["taxonomy"] = {"between_conventions": {m: float(v) for m, v in average.items()}}
    found = witness(pairs)
    results["witness"] = {"share": found.share, "margin": found.margin, "triple": None}
    if found.triple is None:
        undefined["witness"] = "no triple of heads reverses cosine, Jensen-Shannon and Euclidean at once"
    else:
        results["witness"]["triple"] = _told(found.triple, index, pairs)
    tables = {
        "temperature": pd.DataFrame(results["temperature"]),
        "taxonomy": clusters,
        "heads": _plane(index, pairs),
    }
    arrays = {
        "triple": rows[list(found.triple)] if found.triple else np.empty((0, keys)),
        "content_distance": pairs["content"][1],
        "jensen_shannon_keep": pairs["jensen_shannon"][0],
        "jensen_shannon_drop": pairs["jensen_shannon"][1],
    }
    return Audit(results, tables, arrays, _findings(results), undefined)


def _told(triple: tuple[int, int, int], index: Sequence[tuple[int, int]], pairs: Any) -> dict[str, Any]:
    p, q, r = triple
    return {
        **{name: list(index[head]) for name, head in zip("pqr", triple)},
        "distances": {
            metric: {
                policy: {"pq": float(d[p, q]), "pr": float(d[p, r])}
                for policy, d in zip(("keep", "drop"), pairs[metric])
            }
            for metric in (*CLASSICAL, "content")
        },
    }


def _plane(index: Sequence[tuple[int, int]], pairs: Any) -> pd.DataFrame:
    """Where each head lies on a plane, under three questions, and its cluster of six there."""
    import pandas as pd

    table = pd.DataFrame(index, columns=["layer", "head"])
    questions = {
        "js_keep": pairs["jensen_shannon"][0],
        "js_drop": pairs["jensen_shannon"][1],
        "content": pairs["content"][1],
    }
    for name, distances in questions.items():
        places = taxonomy.plane(distances)
        table[f"{name}_x"], table[f"{name}_y"] = places[:, 0], places[:, 1]
        table[f"{name}_cluster"] = taxonomy.cut(taxonomy.merges(distances), min(6, len(index)))
    return table


def _findings(results: dict[str, Any]) -> list[str]:
    rival, channel, hot = results["rivals"], results["content"], results["temperature"]
    share = results["tail"]["1e-06"]["share"]
    js = [row for row in hot if row["metric"] == "jensen_shannon"]
    own = [row for row in hot if row["metric"] == "content"]
    lines = [
        f"Keys below 1e-6 in either head carry {share or 0:.2%} of squared d_A⊥.",
        "Hellinger and Fisher-Rao verdicts "
        f"{'coincide' if rival['verdicts_identical'] else 'do NOT coincide'}, ties included; "
        f"{rival['hellinger']:.1%} reverse when the sink is dropped.",
        f"Hellinger on content picks the nearest neighbour of dropped-row JS for "
        f"{rival['hellinger_content_neighbours']:.1%} of heads; prune sets overlap with a "
        f"Jaccard index of at least {min(rival['hellinger_content_prune_sets'].values()):.2f}.",
        f"With the sink gone, JS and d_A⊥ have a rank correlation of {channel['spearman']:.3f} and agree on "
        f"{channel['neighbours']:.1%} of nearest neighbours.",
        f"Over temperatures, dropped-row JS flips up to {max(r['flips'] for r in js):.1%} of verdicts and "
        f"keeps at least {min(r['retention'] for r in js):.1%} of its prune set; d_A⊥ "
        + ("changes nothing." if all(r["identical"] for r in own) else "CHANGES, which it must not."),
    ]
    both = results["aggregation"]
    if both["arithmetic"]:
        gap = max(abs(both["arithmetic"][m] - both["aitchison"][m]) for m in CLASSICAL)
        lines.append(
            f"On arithmetic means JS verdicts reverse in {both['arithmetic']['jensen_shannon']:.1%} "
            f"of triples, on Aitchison means in {both['aitchison']['jensen_shannon']:.1%}; over metrics the "
            f"two differ by {gap:.3f} at most."
        )
    sets = results["sink_set"]
    if sets:
        lines.append(
            f"Four sink keys instead of {len(sets['small'])}: {sets['jensen_shannon']:.1%} of JS verdicts "
            f"and {sets['content']:.1%} of d_A⊥ verdicts flip; the content distance grew in "
            f"{sets['violations']} of {sets['pairs']} pairs (it cannot), JS in "
            f"{sets['violations_jensen_shannon']} (it may)."
        )
    told = results["taxonomy"]["between_conventions"]
    if told:
        lines.append(
            "Clusters kept against dropped, adjusted Rand index: "
            + ", ".join(f"{metric} {value:.2f}" for metric, value in told.items())
            + "."
        )
    seen = results["witness"]
    if seen["triple"]:
        names = ", ".join(f"{n} = {seen['triple'][n][0]}.{seen['triple'][n][1]}" for n in "pqr")
        lines.append(
            f"Cosine, JS and Euclidean reverse all at once on {seen['share']:.1%} of triples; most sharply "
            f"on {names} (layer.head)."
        )
    return lines
