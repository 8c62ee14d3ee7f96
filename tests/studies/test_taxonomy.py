"""Taxonomies: cuts, the adjusted Rand index, the map."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from scipy.spatial.distance import pdist, squareform

from perpend.errors import InputError
from perpend.studies import taxonomy


def rand_by_hand(a: np.ndarray, b: np.ndarray) -> float:
    """The index from pairs of heads, one by one."""
    pairs = [(a[i] == a[j], b[i] == b[j]) for i, j in combinations(range(len(a)), 2)]
    together = sum(x and y for x, y in pairs)
    first, second = sum(x for x, _ in pairs), sum(y for _, y in pairs)
    expected = first * second / len(pairs)
    return (together - expected) / ((first + second) / 2 - expected)


def test_the_index_against_counting_pairs() -> None:
    generator = np.random.default_rng(0)
    for _ in range(20):
        a, b = generator.integers(0, 4, (2, 15))
        assert taxonomy.adjusted_rand(a, b) == pytest.approx(rand_by_hand(a, b), abs=1e-12)
    assert taxonomy.adjusted_rand([0, 0, 1, 1], [7, 7, 3, 3]) == 1
    assert taxonomy.adjusted_rand([0, 0, 0, 0], [1, 1, 1, 1]) == 1
    with pytest.raises(InputError, match="3 and 2"):
        taxonomy.adjusted_rand([0, 1, 2], [0, 1])


@pytest.mark.parametrize("linkage", taxonomy.LINKAGES)
def test_separated_groups_are_found(linkage: str) -> None:
    generator = np.random.default_rng(1)
    truth = np.repeat(np.arange(4), 5)
    places = 10 * np.eye(4)[truth] + generator.normal(0, 0.1, (20, 4))
    tree = taxonomy.merges(squareform(pdist(places)), linkage)
    assert taxonomy.adjusted_rand(taxonomy.cut(tree, 4), truth) == 1
    for clusters in (1, 3, 20):
        assert len(set(taxonomy.cut(tree, clusters))) == clusters
    with pytest.raises(InputError, match="no 21 clusters"):
        taxonomy.cut(tree, 21)


def test_equal_distances_still_make_the_asked_number_of_clusters() -> None:
    tree = taxonomy.merges(1.0 - np.eye(8))
    assert len(set(taxonomy.cut(tree, 4))) == 4


def test_unknown_linkage_names_the_known() -> None:
    with pytest.raises(InputError, match="average"):
        taxonomy.merges(1.0 - np.eye(4), "avrage")


def test_the_plane_keeps_distances_that_lie_in_one() -> None:
    places = np.random.default_rng(2).normal(size=(12, 2))
    distances = squareform(pdist(places))
    found = taxonomy.plane(distances)
    np.testing.assert_allclose(squareform(pdist(found)), distances, atol=1e-9)
    np.testing.assert_allclose(found.mean(0), 0, atol=1e-12)


@pytest.mark.parametrize("linkage", taxonomy.LINKAGES)
@pytest.mark.parametrize("heads", [2, 5, 40])
def test_cuts_are_those_of_scipy(linkage: str, heads: int) -> None:
    """Same partitions, same numbers, ties (equal heads) included."""
    from scipy.cluster.hierarchy import cut_tree

    places = np.random.default_rng(heads).normal(size=(heads, 3))
    places[: heads // 3] = places[0]
    tree = taxonomy.merges(squareform(pdist(places)), linkage)
    for clusters in (1, 2, 4, 8):
        if clusters <= heads:
            expected = cut_tree(tree, n_clusters=clusters)[:, 0]
            assert taxonomy.cut(tree, clusters).tolist() == expected.tolist()
