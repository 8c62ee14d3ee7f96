"""Reversal rates against brute force, exact witnesses and known limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perpend.errors import InputError
from perpend.studies import reversal


def brute_force(keep: np.ndarray, drop: np.ndarray) -> tuple[float, float]:
    opposite = tied = total = 0
    for p, q, r in reversal.all_triples(len(keep)):
        a, b = keep[p, q] - keep[p, r], drop[p, q] - drop[p, r]
        total += 1
        tied += a * b == 0
        opposite += a * b < 0
    return opposite / total, tied / total


def symmetric(seed: int, heads: int, values: int | None = None) -> np.ndarray:
    generator = np.random.default_rng(seed)
    upper = (
        generator.random((heads, heads)) if values is None else generator.integers(0, values, (heads,) * 2)
    )
    upper = np.triu(upper.astype(float), 1)
    return upper + upper.T


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(3, 9), st.sampled_from([None, 2, 4]))
def test_exact_rate_counts_every_triple(seed: int, heads: int, values: int | None) -> None:
    keep, drop = symmetric(seed, heads, values), symmetric(seed + 1, heads, values)
    rate, ties = reversal.exact_rates(keep, drop)
    assert (rate.mean(), ties.mean()) == pytest.approx(brute_force(keep, drop), abs=1e-12)


def test_exact_rate_is_one_minus_kendall_tau_over_two_without_ties() -> None:
    from scipy.stats import kendalltau

    keep, drop = symmetric(1, 12), symmetric(2, 12)
    rate, ties = reversal.exact_rates(keep, drop)
    tau = [kendalltau(np.delete(keep[p], p), np.delete(drop[p], p)).statistic for p in range(12)]
    np.testing.assert_allclose(rate, (1 - np.array(tau)) / 2, atol=1e-12)
    assert not ties.any()


def test_a_convention_never_reverses_itself_and_its_negative_always_does() -> None:
    keep = symmetric(3, 8)
    assert reversal.exact_rates(keep, keep)[0].max() == 0
    assert reversal.exact_rates(keep, -keep)[0].min() == 1
    triples = reversal.sample_triples(8, 1000)
    assert reversal.compare(reversal.verdicts(keep, triples), reversal.verdicts(-keep, triples)).rate == 1


def test_sampled_triples_are_distinct_uniform_and_seeded() -> None:
    triples = reversal.sample_triples(5, 60_000, seed=1)
    assert (triples[:, 0] != triples[:, 1]).all()
    assert (triples[:, 0] != triples[:, 2]).all()
    assert (triples[:, 1] != triples[:, 2]).all()
    assert triples.min() == 0
    assert triples.max() == 4
    counts = np.unique(triples, axis=0, return_counts=True)[1]
    assert len(counts) == 5 * 4 * 3
    assert abs(counts - 1000).max() < 5 * 1000**0.5
    np.testing.assert_array_equal(triples, reversal.sample_triples(5, 60_000, seed=1))
    assert (triples != reversal.sample_triples(5, 60_000, seed=2)).any()


def test_the_sampled_rate_estimates_the_exact_one() -> None:
    keep, drop = symmetric(5, 20), symmetric(6, 20)
    triples = reversal.sample_triples(20, 50_000)
    sampled = reversal.compare(reversal.verdicts(keep, triples), reversal.verdicts(drop, triples)).rate
    assert sampled == pytest.approx(reversal.exact_rates(keep, drop)[0].mean(), abs=0.01)


def test_two_heads_carry_no_verdict() -> None:
    with pytest.raises(InputError, match="three heads"):
        reversal.sample_triples(2)


WITNESS = np.log([[0.90, 0.08, 0.02], [0.70, 0.24, 0.06], [0.90, 0.02, 0.08]])


def test_the_table_1_witness_reverses_classical_verdicts_and_not_the_content_one() -> None:
    question = np.array([[0, 1, 2]])
    for metric, (keep, drop) in reversal.matrices(WITNESS).items():
        with_sink = reversal.verdicts(keep, question)[0]
        without = reversal.verdicts(drop, question)[0]
        assert without == -1, metric
        assert with_sink == (-1 if metric in ("content", "aitchison") else 1), metric


def rows(seed: int, heads: int = 12, keys: int = 8) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 1.5, (heads, keys))
    logits[:, 0] += 2
    return logits - np.log(np.exp(logits).sum(1, keepdims=True))


def test_content_never_reverses_and_full_aitchison_may() -> None:
    pairs = reversal.matrices(rows(0))
    keep, drop = pairs["content"]
    np.testing.assert_array_equal(keep, drop)
    np.testing.assert_array_equal(pairs["aitchison"][1], keep)
    assert reversal.exact_rates(*pairs["aitchison"])[0].mean() > 0


def test_bootstrap_without_any_noise_has_a_zero_floor_and_a_point_interval() -> None:
    signatures = rows(1)
    full = reversal.matrices(signatures)
    triples = reversal.sample_triples(12, 4000)
    result = reversal.bootstrap(full, [signatures] * 5, [(signatures, signatures)], triples)
    for metric, (keep, drop) in full.items():
        rate = reversal.compare(reversal.verdicts(keep, triples), reversal.verdicts(drop, triples))
        interval = result[metric]
        assert (interval.low, interval.high) == (rate.rate, rate.rate)
        assert interval.noise.floor_keep == interval.noise.floor_drop == 0
        assert interval.noise.significant == pytest.approx(1 - rate.ties)
        assert interval.noise.rate == pytest.approx(rate.rate / (1 - rate.ties))


def test_bootstrap_of_pure_noise_finds_hardly_any_significant_verdict() -> None:
    triples = reversal.sample_triples(12, 2000)
    result = reversal.bootstrap(
        reversal.matrices(rows(0)),
        (rows(seed) for seed in range(100, 140)),
        ((rows(seed), rows(seed + 500)) for seed in range(3)),
        triples,
    )
    noise = result["jensen_shannon"].noise
    assert noise.significant < 0.02
    assert noise.floor_keep == pytest.approx(0.5, abs=0.1)
    assert result["jensen_shannon"].low < result["jensen_shannon"].high
