"""What an audit of head signatures measures: pure functions of rows (heads, keys) and of distance matrices.

`perpend.studies.audits` runs all of them on a survey's signatures, `perpend.studies.audit_intervals` on
resampled ones.

Source: "Which Question Is Your Attention Metric Answering?", Appendix E.1, E.2, Tables 6-8, Figure 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from perpend.geometry import pairwise
from perpend.studies import taxonomy
from perpend.studies.prune_sets import jaccard, most_redundant
from perpend.studies.reversal import exact_rates

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
    sets = {f"{sparsity:g}": shared_prune_set(h_drop, js, sparsity) for sparsity in sparsities}
    neighbours = float(np.mean(nearest(h_drop) == nearest(js)))
    return {
        "hellinger": flips(h_keep, h_drop),
        "fisher_rao": flips(f_keep, f_drop),
        "verdicts_identical": same_order(h_keep, f_keep) and same_order(h_drop, f_drop),
        "hellinger_content_neighbours": neighbours,
        "hellinger_content_prune_sets": sets,
        "hellinger_content_identical": neighbours == 1 and all(value == 1 for value in sets.values()),
    }


def shared_prune_set(first: np.ndarray, second: np.ndarray, sparsity: float) -> float:
    """Jaccard index of the most redundant heads under two matrices, round(sparsity·heads) of them each."""
    count = round(sparsity * len(first))
    return jaccard(*([(0, head) for head in most_redundant(d, count)] for d in (first, second)))


def content_channel(js_drop: np.ndarray, content: np.ndarray) -> dict[str, Any]:
    """Dropped-row JS against d_A⊥: Spearman ρ of distances, nearest-neighbour agreement, cross-ARI.

    The cross-ARI is of their average-linkage taxonomies, a mean over K; `cross_ari_by_clusters` has each K.
    """
    upper = np.triu_indices(len(content), 1)
    by_clusters = {k: taxonomy.between(js_drop, content, (k,)) for k in taxonomy.CLUSTERS}
    cross = taxonomy.between(js_drop, content)
    return {
        "spearman": float(stats.spearmanr(js_drop[upper], content[upper]).statistic),
        "neighbours": float(np.mean(nearest(js_drop) == nearest(content))),
        "cross_ari": None if np.isnan(cross) else cross,
        "cross_ari_by_clusters": {str(k): v for k, v in by_clusters.items() if not np.isnan(v)},
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
    upper = np.triu_indices(len(rows), 1)
    base = {name: heated(rows, sink, 1.0, name) for name in ("jensen_shannon", "content")}
    found = []
    for tau in temperatures:
        for name, before in base.items():
            after = heated(rows, sink, tau, name)
            kept = retention(before, after, sparsity)
            scale = tau * before[upper]
            off = np.abs(after[upper] - scale)[scale > 0] / scale[scale > 0]
            found.append(
                {
                    "metric": name,
                    "tau": float(tau),
                    "flips": flips(before, after),
                    "retention": kept,
                    "identical": same_order(before, after) and kept == 1,
                    "equivariance": float(off.max()) if off.size else 0.0,
                }
            )
    return found


def heated(rows: np.ndarray, sink: Sequence[int], tau: float, metric: str) -> np.ndarray:
    """The metric on content alone, content logits times τ, (heads, heads)."""
    content = np.delete(rows, list(sink), axis=1) * tau
    # A column that the metric takes for the sink: its value does not enter.
    padded = np.concatenate([np.zeros((len(rows), 1)), content], axis=1)
    return pairwise(padded, metric, sink=0, policy="drop", log=True)


def retention(before: np.ndarray, after: np.ndarray, sparsity: float = 0.2) -> float:
    """Share of the prune set under one matrix that is in the set under another."""
    count = round(sparsity * len(before))
    first, second = (set(most_redundant(d, count)) for d in (before, after))
    return len(first & second) / count if count else 1.0


def worst(found: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Over temperatures, by metric: most flips, least retention, whether all were identical."""
    return {
        metric: {
            "flips": max(row["flips"] for row in rows),
            "retention": min(row["retention"] for row in rows),
            "identical": all(row["identical"] for row in rows),
        }
        for metric in ("jensen_shannon", "content")
        if (rows := [row for row in found if row["metric"] == metric])
    }


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
