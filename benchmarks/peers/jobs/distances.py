"""Distances between all heads' signatures, and the tree made of them, against scipy and scikit-bio.

Rows of 64 keys with a strong sink, as signatures have it. One thread, processor time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from peers.jobs import Job, Run, Setting

CELLS = tuple({"heads": heads, "keys": 64} for heads in (270, 1024))  # SmolLM2-135M's, a large one's


def rows_of(setting: Setting) -> Any:
    """[heads, keys] rows that sum to one, float64."""
    import numpy as np

    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (setting.sizes["heads"], setting.sizes["keys"]))
    logits[:, 0] += 4
    rows = np.exp(logits)
    return rows / rows.sum(-1, keepdims=True)


def _made(act: Callable[[Any], Any]) -> Callable[[Setting], Run]:
    def make(setting: Setting) -> Run:
        rows = rows_of(setting)
        return lambda: act(rows)

    return make


def _perpend(metric: str) -> Callable[[Setting], Run]:
    def act(rows: Any) -> Any:
        from perpend.geometry import pairwise

        return pairwise(rows, metric)

    return _made(act)


def _scipy_js(rows: Any) -> Any:
    from scipy.spatial.distance import pdist, squareform

    return squareform(pdist(rows, "jensenshannon") ** 2)


def _scipy_aitchison(rows: Any) -> Any:
    import numpy as np
    from scipy.spatial.distance import pdist, squareform

    logs = np.log(rows)
    return squareform(pdist(logs - logs.mean(-1, keepdims=True)))


def _skbio_js(rows: Any) -> Any:
    from skbio.diversity import beta_diversity

    return beta_diversity("jensenshannon", rows, validate=False).data ** 2


def _skbio_aitchison(rows: Any) -> Any:
    from skbio.diversity import beta_diversity
    from skbio.stats.composition import clr

    return beta_diversity("euclidean", clr(rows), validate=False).data


def _perpend_tree(rows: Any) -> Any:
    from perpend.geometry import pairwise
    from perpend.studies.taxonomy import merges

    return merges(pairwise(rows, "jensen_shannon"))[:, 2]


def _scipy_tree(rows: Any) -> Any:
    from scipy.cluster.hierarchy import linkage
    from scipy.spatial.distance import pdist

    return linkage(pdist(rows, "jensenshannon") ** 2, "average")[:, 2]


def _skbio_tree(rows: Any) -> Any:
    """Heights of the merges, ascending; a UPGMA branch is half a distance."""
    from skbio import DistanceMatrix
    from skbio.tree import upgma

    heights = []
    for node in upgma(DistanceMatrix(_skbio_js(rows))).postorder():
        node.height = 0.0 if node.is_tip() else node.children[0].height + node.children[0].length
        if not node.is_tip():
            heights.append(2 * node.height)
    return sorted(heights)


def _pairs(sizes: Mapping[str, int]) -> int:
    return sizes["heads"] * (sizes["heads"] - 1) // 2


def _job(name: str, title: str, about: str, perpend: Any, scipy: Any, skbio: Any) -> Job:
    return Job(
        name=name,
        title=title,
        about=about,
        baseline="scipy",
        contenders={"scipy": _made(scipy), "perpend": perpend, "scikit-bio": _made(skbio)},
        tolerance=1e-6,
        sizes=CELLS,
        count=_pairs,
        unit="pairs",
    )


JS = _job(
    "jensen-shannon",
    "Jensen-Shannon distances",
    "All pairs of heads' rows; perpend's matrix is exactly symmetric and equal rows are at exactly 0.",
    _perpend("jensen_shannon"),
    _scipy_js,
    _skbio_js,
)
AITCHISON = _job(
    "aitchison",
    "Aitchison distances",
    "All pairs of heads' rows: Euclidean distances of their centred log-ratios.",
    _perpend("aitchison"),
    _scipy_aitchison,
    _skbio_aitchison,
)
TREE = _job(
    "linkage",
    "Average linkage",
    "From the rows to the tree: Jensen-Shannon distances and their average linkage.",
    _made(_perpend_tree),
    _scipy_tree,
    _skbio_tree,
)
