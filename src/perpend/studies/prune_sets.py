"""Which heads are redundant? The prune sets of the attention paper, from head signatures.

A head's redundancy is the distance to its nearest other head: the nearest are pruned first.

    js, js_drop, content, aitchison      over all heads: JS with the sink, dropped-row JS, d_A⊥, d_A
    js_l1, js_drop_l1, content_l1        neighbours in the same layer, one of each redundant pair kept
    random_a, random_b                   two seeded draws

Keep-one (the `_l1` criteria): same-layer pairs in ascending distance; a pair with a pruned head is skipped;
a kept head is never pruned; of a pair the higher index goes. Ties break by head number, so a set is
determined.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.2, Appendix E.5 (3), Tables 3, 10, 11.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from perpend.errors import InputError
from perpend.geometry import pairwise, sink_balance
from perpend.studies.criteria import CRITERIA, DISTANCES, RANDOM, check_criteria

Head = tuple[int, int]


@dataclass(frozen=True)
class PruneSet:
    """Heads (layer, head) to remove, sorted. `shortfall`: how many fewer than asked the rule could find.

    `fixed`: the set depends on no seed of the text (a random draw, or heads that were given).
    """

    criterion: str
    sparsity: float
    heads: tuple[Head, ...]
    shortfall: int = 0
    fixed: bool = False


def prune_sets(
    log_signatures: np.ndarray,
    sink: Sequence[int],
    sparsities: Sequence[float],
    criteria: Sequence[str] = CRITERIA,
) -> list[PruneSet]:
    """One set a criterion and sparsity, from signatures (layers, heads, keys), log-probabilities.

    Sparsities are fractions; a set holds round(sparsity · heads) heads. Heads without a signature (NaN) are
    never pruned and count among no neighbours. Raises InputError for an unknown criterion or sparsity.
    """
    defined = np.isfinite(log_signatures).all(-1)
    index = [(int(layer), int(head)) for layer, head in np.argwhere(defined)]
    if len(index) < 2:
        raise InputError("redundancy needs at least two heads with a signature")
    check_criteria(criteria)
    for sparsity in sparsities:
        if not 0 < sparsity < 1:
            raise InputError(f"a sparsity is a fraction between 0 and 1, not {sparsity}")
    rows = log_signatures[defined]
    matrices: dict[str, np.ndarray] = {}
    found = []
    for criterion in criteria:
        base = criterion.replace("_l1", "")
        if criterion not in RANDOM and base not in matrices:
            matrices[base] = _distances(rows, base, list(sink))
        for sparsity in sparsities:
            count = round(sparsity * len(index))
            if criterion in RANDOM:
                order = np.random.default_rng(RANDOM[criterion]).permutation(len(index))
                chosen = list(order[:count])
            elif "_l1" in criterion:
                chosen = keep_one(matrices[base], [layer for layer, _ in index], count)
            else:
                chosen = most_redundant(matrices[base], count)
            heads = tuple(sorted(index[i] for i in chosen))
            found.append(PruneSet(criterion, sparsity, heads, count - len(heads), criterion in RANDOM))
    return found


def _distances(rows: np.ndarray, base: str, sink: list[int]) -> np.ndarray:
    if base in DISTANCES:
        metric, policy = DISTANCES[base]
        return pairwise(rows, metric, sink=sink, policy=policy, log=True)
    weight = float(base.partition(":")[2])
    if np.isinf(weight):
        balance = sink_balance(rows, sink=sink, log=True)
        return np.abs(balance[:, None] - balance)
    return pairwise(rows, "aitchison_weighted", sink=sink, weight=weight, log=True)


def most_redundant(distances: np.ndarray, count: int) -> list[int]:
    """The `count` heads nearest to another head, by ascending distance, ties by number."""
    away = distances + np.where(np.eye(len(distances), dtype=bool), np.inf, 0.0)
    return [int(i) for i in np.argsort(away.min(1), kind="stable")[:count]]


def keep_one(distances: np.ndarray, layers: Sequence[int], count: int) -> list[int]:
    """Heads to prune so that of each redundant same-layer pair one stays; may be fewer than `count`."""
    layers = np.asarray(layers)
    i, j = np.triu_indices(len(distances), 1)
    same = layers[i] == layers[j]
    i, j = i[same], j[same]
    order = np.argsort(distances[i, j], kind="stable")
    kept: set[int] = set()
    pruned: list[int] = []
    gone: set[int] = set()
    for k in order:
        if len(pruned) >= count:
            break
        low, high = int(i[k]), int(j[k])
        if low in gone or high in gone or high in kept:
            continue
        kept.add(low)
        gone.add(high)
        pruned.append(high)
    return pruned


def jaccard(first: Sequence[Head], second: Sequence[Head]) -> float:
    """|A ∩ B| / |A ∪ B|; 1 for two empty sets."""
    a, b = set(first), set(second)
    return len(a & b) / len(a | b) if a | b else 1.0


def stability(by_seed: Mapping[int, Sequence[PruneSet]]) -> dict[tuple[str, float], float]:
    """Mean Jaccard over pairs of seeds of each (criterion, sparsity); random draws have no seed."""
    seeds = list(by_seed)
    found = {}
    for position, chosen in enumerate(by_seed[seeds[0]]):
        pairs = [
            jaccard(by_seed[a][position].heads, by_seed[b][position].heads)
            for n, a in enumerate(seeds)
            for b in seeds[n + 1 :]
        ]
        if pairs and not chosen.fixed:
            found[chosen.criterion, chosen.sparsity] = float(np.mean(pairs))
    return found
