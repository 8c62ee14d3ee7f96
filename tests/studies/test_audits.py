"""Audits against brute force, against the laws they check, and on inputs made so that they must fire."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from perpend.errors import InputError
from perpend.geometry import content_distance, pairwise
from perpend.studies import audits, reversal
from perpend.studies.prune_sets import most_redundant


def signatures(
    layers: int = 4, heads: int = 5, keys: int = 12, seed: int = 0, sink: float = 3.0
) -> np.ndarray:
    """Log-probabilities with a sink that varies over heads."""
    generator = np.random.default_rng(seed)
    logits = generator.normal(size=(layers, heads, keys)) * generator.uniform(0.3, 2.0, (layers, heads, 1))
    logits[..., 0] += sink + generator.normal(size=(layers, heads))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


@pytest.fixture(scope="module")
def rows() -> np.ndarray:
    return signatures().reshape(20, 12)


def test_tail_against_pairs_one_by_one(rows: np.ndarray) -> None:
    low = 0.01
    whole = small = 0.0
    content = rows[:, 1:]
    logs = content - content.mean(1, keepdims=True)
    for p in range(20):
        for q in range(p):
            square = (logs[p] - logs[q]) ** 2
            assert square.sum() == pytest.approx(content_distance(np.exp(rows[p]), np.exp(rows[q]), 0) ** 2)
            whole += square.sum()
            small += square[np.minimum(content[p], content[q]) < math.log(low)].sum()
    found = audits.tail(rows, [0], (low, 1e-9))
    assert found["0.01"]["share"] == pytest.approx(small / whole)
    assert 0 < found["0.01"]["share"] < 1
    assert found["1e-09"] == {"share": 0.0, "keys_with_median_below": 0}


def test_a_tail_key_is_counted() -> None:
    sharp = signatures().reshape(20, 12).copy()
    sharp[:, 5] = math.log(1e-8)
    assert audits.tail(sharp, [0])["1e-06"]["keys_with_median_below"] == 1


def test_hellinger_and_fisher_rao_coincide_and_js_does_not(rows: np.ndarray) -> None:
    pairs = reversal.matrices(rows, [0])
    found = audits.rivals(pairs)
    assert found["verdicts_identical"]
    assert found["hellinger"] == found["fisher_rao"] > 0
    assert not audits.same_order(pairs["hellinger"][0], pairs["euclidean"][0])


def test_temperature_leaves_content_alone_to_the_bit(rows: np.ndarray) -> None:
    found = audits.temperature(rows, [0])
    own = [row for row in found if row["metric"] == "content"]
    assert [row["tau"] for row in own] == [0.5, 0.7, 1.5, 2.0]
    assert all(row["identical"] and row["flips"] == 0 and row["retention"] == 1 for row in own)
    assert max(row["equivariance"] for row in own) < 1e-13
    js = [row for row in found if row["metric"] == "jensen_shannon"]
    assert max(row["flips"] for row in js) > 0
    # τ = 2 by hand: contents squared and re-closed
    content = np.exp(rows[:, 1:])
    content /= content.sum(1, keepdims=True)
    squared = content**2 / (content**2).sum(1, keepdims=True)
    one, two = (pairwise(values, "jensen_shannon") for values in (content, squared))
    last = js[-1]
    assert last["flips"] == pytest.approx(audits.flips(one, two))
    kept = set(most_redundant(one, 4)) & set(most_redundant(two, 4))
    assert last["retention"] == len(kept) / 4


def test_content_distances_are_nested_and_js_is_not() -> None:
    wide = signatures(keys=16, seed=3).reshape(20, 16)
    found = audits.sink_set(wide, [0], [0, 1, 2, 3])
    assert found["violations"] == 0
    assert found["pairs"] == 190
    assert found["violations_jensen_shannon"] > 0
    assert found["content"] > 0


def test_the_sharpest_triple_against_all_triples(rows: np.ndarray) -> None:
    few = rows[:9]
    pairs = reversal.matrices(few, [0])
    found = audits.witness(pairs)
    best, count, total = 0.0, 0, 0
    for p, q, r in reversal.all_triples(9):
        total += 1
        for a, b in ((q, r), (r, q)):
            margins = []
            for metric in audits.CLASSICAL:
                keep, drop = pairs[metric]
                margins.append((keep[p, a] - keep[p, b]) / (keep[p, a] + keep[p, b]))
                margins.append((drop[p, b] - drop[p, a]) / (drop[p, b] + drop[p, a]))
            if min(margins) > 0:
                count += 1
                best = max(best, min(margins))
    assert count > 0
    assert found.share == pytest.approx(count / total)
    assert found.margin == pytest.approx(best)


def test_the_papers_own_witness_is_found() -> None:
    p, q, r = (0.90, 0.08, 0.02), (0.70, 0.24, 0.06), (0.90, 0.02, 0.08)
    pairs = reversal.matrices(np.log([p, q, r]), [0], audits.CLASSICAL)
    assert audits.witness(pairs).triple == (0, 1, 2)


def test_the_whole_audit(rows: np.ndarray) -> None:
    log = signatures(keys=16)
    log[1, 2] = np.nan
    study = audits.audit_signatures(log, [0], np.exp(log) * 0.9 + 0.1 / 16)
    results = study.results
    json.dumps(results, allow_nan=False)
    assert results["heads"] == 19
    assert results["taxonomy"]["between_conventions"]["content"] == 1
    assert results["taxonomy"]["between_conventions"]["jensen_shannon"] < 1
    assert set(results["aggregation"]["arithmetic"]) == set(audits.CLASSICAL)
    assert -1 <= results["content"]["spearman"] <= 1
    assert len(study.tables["taxonomy"]) == 5 * 3 * 3
    assert study.undefined == {}
    triple = results["witness"]["triple"]
    assert [1, 2] not in [triple[name] for name in "pqr"]
    told = triple["distances"]["jensen_shannon"]
    assert told["keep"]["pr"] < told["keep"]["pq"]
    assert told["drop"]["pq"] < told["drop"]["pr"]
    own = triple["distances"]["content"]
    assert own["keep"] == own["drop"]
    assert any("d_A⊥ changes nothing" in line for line in study.findings)


def test_what_cannot_be_said_is_said_in_words() -> None:
    study = audits.audit_signatures(signatures(keys=16), [9])
    assert study.results["sink_set"] is None
    assert "first four" in study.undefined["sink_set"]
    assert study.results["aggregation"]["arithmetic"] is None
    assert "aggregation" in study.undefined
    with pytest.raises(InputError, match="at least four"):
        audits.audit_signatures(signatures(1, 3), [0])
    with pytest.raises(InputError, match="not among"):
        audits.audit_signatures(signatures(), [40])
