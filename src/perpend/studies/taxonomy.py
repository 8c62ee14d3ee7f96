"""Head taxonomies: do the clusters of heads survive a change of convention?

    stability(matrices(log_signatures, sink=[0]))     # ARI between conventions, by metric, linkage and K
    adjusted_rand(first, second)

Agglomerative clustering of heads from a matrix of dissimilarities, cut at K clusters. Stability is the
adjusted Rand index between the partitions of the two conventions: 1 is the same partition, 0 is chance.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.3 (1), Table 5, Appendix E.6 (1).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from perpend.errors import InputError, unknown_name

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("cosine", "jensen_shannon", "euclidean", "content", "aitchison")
LINKAGES = ("average", "complete", "single")
CLUSTERS = (4, 6, 8)


def merges(distances: np.ndarray, linkage: str = "average") -> np.ndarray:
    """scipy's linkage matrix (heads − 1, 4) of a symmetric matrix of dissimilarities (heads, heads)."""
    from scipy.cluster import hierarchy
    from scipy.spatial.distance import squareform

    if linkage not in LINKAGES:
        raise unknown_name("linkage", linkage, LINKAGES)
    if len(distances) < 2:
        raise InputError("a tree needs at least two heads")
    return hierarchy.linkage(squareform(distances, checks=False), linkage)


def cut(tree: np.ndarray, clusters: int) -> np.ndarray:
    """Cluster numbers (heads,) in order of appearance, exactly `clusters` of them.

    What the first heads − K merges join is one cluster. InputError for more clusters than heads.
    """
    heads = len(tree) + 1
    if not 1 <= clusters <= heads:
        raise InputError(f"{heads} heads make no {clusters} clusters")
    above = np.arange(2 * heads - 1)
    for merge, (first, second) in enumerate(tree[: heads - clusters, :2].astype(int)):
        above[first] = above[second] = heads + merge
    for node in range(2 * heads - 2, -1, -1):  # a merge has a larger number than what it merges
        above[node] = above[above[node]]
    _, seen, labels = np.unique(above[:heads], return_index=True, return_inverse=True)
    return np.argsort(np.argsort(seen))[labels]


def adjusted_rand(first: Sequence[int], second: Sequence[int]) -> float:
    """ARI of two partitions of the same heads: 1 for the same partition, 0 on average by chance."""
    a, b = (np.unique(np.asarray(labels), return_inverse=True)[1] for labels in (first, second))
    if len(a) != len(b):
        raise InputError(f"the partitions are of {len(a)} and {len(b)} heads")
    table = np.zeros((a.max() + 1, b.max() + 1), np.int64)
    np.add.at(table, (a, b), 1)

    def pairs(counts: np.ndarray) -> float:
        return float((counts * (counts - 1) / 2).sum())

    together, rows, columns = pairs(table), pairs(table.sum(1)), pairs(table.sum(0))
    expected = rows * columns / pairs(np.array([len(a)])) if len(a) > 1 else 0.0
    most = (rows + columns) / 2
    return 1.0 if most == expected else (together - expected) / (most - expected)


def stability(
    matrices: Mapping[str, tuple[np.ndarray, np.ndarray]],
    *,
    linkages: Sequence[str] = LINKAGES,
    clusters: Sequence[int] = CLUSTERS,
) -> pd.DataFrame:
    """ARI between conventions, one row a metric, linkage and K: `metric`, `linkage`, `clusters`, `ari`.

    `matrices`: metric → (keep, drop), as `reversal.matrices` makes them. A K above the number of heads is
    left out.
    """
    import pandas as pd

    rows = []
    for metric, pair in matrices.items():
        for linkage in linkages:
            keep, drop = (merges(distances, linkage) for distances in pair)
            rows += [
                {
                    "metric": metric,
                    "linkage": linkage,
                    "clusters": k,
                    "ari": adjusted_rand(cut(keep, k), cut(drop, k)),
                }
                for k in clusters
                if k <= len(pair[0])
            ]
    return pd.DataFrame(rows, columns=["metric", "linkage", "clusters", "ari"])


def between(first: np.ndarray, second: np.ndarray, clusters: Sequence[int] = CLUSTERS) -> float:
    """Mean over K of the ARI between the average-linkage partitions of two matrices; NaN without a K."""
    one, other = merges(first), merges(second)
    found = [adjusted_rand(cut(one, k), cut(other, k)) for k in clusters if k <= len(first)]
    return float(np.mean(found)) if found else float("nan")


def plane(distances: np.ndarray) -> np.ndarray:
    """Heads on a plane, (heads, 2): classical scaling of a matrix of dissimilarities, centred."""
    square = np.square(distances)
    centred = square - square.mean(0) - square.mean(1, keepdims=True) + square.mean()
    values, vectors = np.linalg.eigh(-centred / 2)
    top = np.argsort(values)[::-1][:2]
    places = vectors[:, top] * np.sqrt(np.maximum(values[top], 0))
    # An eigenvector's sign is the library's whim: the entry of largest size is positive.
    return places * np.sign(places[np.abs(places).argmax(0), [0, 1]] + 1e-300)
