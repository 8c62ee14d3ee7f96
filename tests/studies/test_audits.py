"""Audits against brute force, against the laws they check, and on inputs made so that they must fire."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from perpend.errors import InputError
from perpend.geometry import content_distance, pairwise
from perpend.studies import audit_intervals, audits, reversal
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
    assert set(study.undefined) == {"intervals"}
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


def test_the_worst_temperature(rows: np.ndarray) -> None:
    found = audits.temperature(rows, [0])
    worst = audits.worst(found)
    js = [row for row in found if row["metric"] == "jensen_shannon"]
    assert worst["jensen_shannon"]["flips"] == max(row["flips"] for row in js) > 0
    assert worst["jensen_shannon"]["retention"] == min(row["retention"] for row in js)
    assert worst["content"] == {"flips": 0, "retention": 1, "identical": True}
    assert not worst["jensen_shannon"]["identical"]


def test_hellinger_on_content_against_dropped_js_by_hand(rows: np.ndarray) -> None:
    """Neighbours and prune sets from content rows alone, pair by pair."""
    content = np.exp(rows[:, 1:])
    content /= content.sum(1, keepdims=True)
    hellinger, js = np.full((2, 20, 20), np.inf)
    for p in range(20):
        for q in set(range(20)) - {p}:
            a, b = content[p], content[q]
            hellinger[p, q] = math.sqrt(1 - np.sqrt(a * b).sum())
            middle = (a + b) / 2
            js[p, q] = ((a * np.log(a / middle)).sum() + (b * np.log(b / middle)).sum()) / 2
    found = audits.rivals(reversal.matrices(rows, [0]))
    same = np.mean(hellinger.argmin(1) == js.argmin(1))
    assert found["hellinger_content_neighbours"] == same
    first, second = (set(np.argsort(d.min(1), kind="stable")[:4]) for d in (hellinger, js))
    assert found["hellinger_content_prune_sets"]["0.2"] == len(first & second) / len(first | second)
    every = same == 1 and set(found["hellinger_content_prune_sets"].values()) == {1.0}
    assert found["hellinger_content_identical"] == every
    near = signatures(seed=2).reshape(20, 12) * 0.01  # close to uniform, f-divergences have one local form
    near -= np.log(np.exp(near).sum(1, keepdims=True))
    assert audits.rivals(reversal.matrices(near, [0]))["hellinger_content_identical"]


def test_dominance_is_looked_for_in_every_pair() -> None:
    """Sets the wrong way round: what must never grow grows in every pair, and the count says so."""
    wide = signatures(keys=16, seed=3).reshape(20, 16)
    assert audits.sink_set(wide, [0, 1, 2, 3], [0])["violations"] == 190


def test_cross_ari_by_number_of_clusters(rows: np.ndarray) -> None:
    pairs = reversal.matrices(rows, [0], ("jensen_shannon", "content"))
    found = audits.content_channel(pairs["jensen_shannon"][1], pairs["content"][1])
    assert set(found["cross_ari_by_clusters"]) == {"4", "6", "8"}
    assert found["cross_ari"] == pytest.approx(np.mean(list(found["cross_ari_by_clusters"].values())))


def blocks_of(text: np.ndarray) -> audits.BlockSums:
    """Sums of [blocks, rows, layers, heads, keys] log-rows, each block's rows apart."""
    centred = text - text[..., 1:].mean(-1, keepdims=True)
    count = np.full((len(text), text.shape[2]), float(text.shape[1]))
    return audits.BlockSums(centred.sum(1), count, np.exp(text).sum(1))


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    """Log-rows of 10 blocks of 6 rows, 4 layers, 5 heads, 12 keys: heads with rows scattered about them."""
    generator = np.random.default_rng(1)
    logits = signatures()[None, None] + generator.normal(size=(10, 6, 4, 5, 12)) * 0.7
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def signatures_of(text: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    mean = text.mean((0, 1))
    return mean - np.log(np.exp(mean).sum(-1, keepdims=True)), np.exp(text).mean((0, 1))


def test_replicates_are_the_signatures_of_resampled_text(text: np.ndarray) -> None:
    defined = np.ones((4, 5), bool)
    defined[1, 2] = False
    logs, native = next(blocks_of(text).replicates(defined, 1, seed=4))
    drawn = np.random.default_rng(4).integers(0, 10, 10)
    by_hand, means = signatures_of(text[drawn])
    np.testing.assert_allclose(logs, by_hand[defined], atol=1e-12)
    np.testing.assert_allclose(native, means[defined], atol=1e-12)


def test_what_is_resampled_is_what_the_audit_reports(text: np.ndarray) -> None:
    """On all triples instead of a sample, one measurement gives the audit's own rates, name by name."""
    logs, native = signatures_of(text)
    study = audits.audit_signatures(logs, [0], native)
    values = audit_intervals.flat(study.results)
    every = np.array(list(reversal.all_triples(20)))
    measured = audit_intervals.measure(
        logs.reshape(20, 12), native.reshape(20, 12), [0], every, study.results
    )
    assert set(values) == set(measured)
    assert len(values) == 36
    for name, value in values.items():
        assert measured[name] == pytest.approx(value, abs=1e-12), name


def test_intervals_of_an_audit(text: np.ndarray) -> None:
    logs, native = signatures_of(text)
    study = audits.audit_signatures(logs, [0], native, blocks_of(text), 30)
    json.dumps(study.results, allow_nan=False)
    found = study.results["intervals"]
    assert set(found) == set(audit_intervals.flat(study.results))
    assert all(number["low"] <= number["high"] for number in found.values())
    wide = [name for name, number in found.items() if number["high"] > number["low"]]
    assert {"rivals/hellinger", "content/spearman", "aggregation/arithmetic/cosine"} <= set(wide)
    assert found["taxonomy/content"] == {"value": 1.0, "low": 1.0, "high": 1.0}
    assert len(study.tables["intervals"]) == len(found)
    assert "intervals" not in study.undefined
    assert sum("95 % interval" in line for line in study.findings) >= 7
    alone = audits.audit_signatures(logs, [0], native, blocks_of(text[:1]), 30)
    assert "single block" in alone.undefined["intervals"]


def test_more_text_narrows_intervals(text: np.ndarray) -> None:
    """Sixteen times the blocks, a quarter of the width, give or take."""
    generator = np.random.default_rng(2)
    logits = signatures()[None, None] + generator.normal(size=(160, 6, 4, 5, 12)) * 0.7
    many = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    widths = []
    for of in (many[:10], many):
        logs, native = signatures_of(of)
        number = audits.audit_signatures(logs, [0], native, blocks_of(of), 60).results["intervals"]
        widths.append(number["sink/signature_mass"]["high"] - number["sink/signature_mass"]["low"])
    assert 2 < widths[0] / widths[1] < 8
