"""Verdicts keep their error rates, intervals their coverage; an edit that does nothing is equivalent."""

from __future__ import annotations

import math
from contextlib import contextmanager

import numpy as np
import pytest

from perpend.errors import InputError
from perpend.evaluation.intervals import Z90, Z95, Z_BOTH80, bootstrap, items_for, newcombe, verdict, wilson
from perpend.evaluation.paired import both, compare
from perpend.evaluation.result import Evaluation, TaskScores


def evaluation(scores, lls=None, **settings):
    scores = [float(one) for one in scores]
    items = {"item": list(range(len(scores))), "acc": scores}
    items["gold_ll"] = [float(one) for one in lls] if lls is not None else [math.nan] * len(scores)
    task = TaskScores("toy", "acc", ("acc",), items, 0.25, {"source": "toy", **settings})
    return Evaluation((task,), {})


def pairs(both_right, only_base, only_other, none):
    base = [1] * both_right + [1] * only_base + [0] * only_other + [0] * none
    other = [1] * both_right + [0] * only_base + [1] * only_other + [0] * none
    return np.array(base, float), np.array(other, float)


def test_newcombe_gives_the_published_example():
    """Newcombe (1998), table III, 36/12/2/0: 0.2 with [0.0569, 0.3404]."""
    base, other = pairs(36, 2, 12, 0)
    low, high = newcombe(base, other, Z95)
    assert (other - base).mean() == pytest.approx(0.2)
    assert low == pytest.approx(0.0569, abs=5e-5)
    assert high == pytest.approx(0.3404, abs=5e-5)
    back = newcombe(other, base, Z95)
    assert back == pytest.approx((-high, -low))


def test_no_changed_answer_is_no_proof_of_equality():
    base, other = pairs(20, 0, 0, 10)
    low, high = newcombe(base, other, Z95)
    assert low < -0.01
    assert high > 0.01


@pytest.mark.parametrize("flips", [(0.05, 0.05), (0.1, 0.02)])
def test_intervals_cover_as_often_as_they_say(flips):
    rng = np.random.default_rng(0)
    n, covered, trials = 150, 0, 400
    truth = 0.4 * flips[1] - 0.6 * flips[0]
    for _ in range(trials):
        base = (rng.random(n) < 0.6).astype(float)
        change = rng.random(n)
        other = np.where(base == 1, change > flips[0], change < flips[1]).astype(float)
        low, high = newcombe(base, other, Z95)
        covered += low <= truth <= high
    assert covered / trials > 0.93


def test_bootstrap_agrees_with_the_normal_interval_on_means():
    gap = np.random.default_rng(1).normal(0.3, 1.0, 400)
    (low, high), (narrow_low, narrow_high) = bootstrap(gap, (0.95, 0.90))
    half = 1.96 * gap.std() / 20
    assert low == pytest.approx(gap.mean() - half, abs=0.02)
    assert high == pytest.approx(gap.mean() + half, abs=0.02)
    assert low < narrow_low < narrow_high < high


def test_verdicts():
    assert verdict((-0.004, 0.004), (-0.005, 0.005), 0.005) == "equivalent"
    assert verdict((-0.02, 0.004), (-0.03, 0.01), 0.005) == "undecided"
    assert verdict((-0.09, -0.02), (-0.1, -0.01), 0.005) == "different"
    # a difference that is there and smaller than the margin counts as equivalent
    assert verdict((0.001, 0.004), (0.0005, 0.0045), 0.005) == "equivalent"


def test_two_hundred_items_cannot_show_half_a_point():
    base, other = pairs(100, 4, 4, 92)
    row = compare(evaluation(base), evaluation(other)).table.iloc[0]
    assert row["verdict"] == "undecided"
    assert row["items_for_equivalence"] > 5000
    text = compare(evaluation(base), evaluation(other)).findings[0]
    assert "undecided" in text
    assert "would take about" in text


def test_the_number_of_items_is_enough():
    """At that many items a null edit comes out equivalent in about 80 % of trials."""
    rng = np.random.default_rng(0)
    changed, margin = 0.06, 0.03
    n = int(items_for(changed, margin, Z90 + Z_BOTH80))
    wins, trials = 0, 300
    for _ in range(trials):
        base = (rng.random(n) < 0.5).astype(float)
        other = np.where(rng.random(n) < changed, 1 - base, base)
        wins += verdict(newcombe(base, other, Z90), newcombe(base, other, Z95), margin) == "equivalent"
    assert 0.7 < wins / trials < 0.92


def test_a_real_loss_is_different_and_needs_few_items():
    base, other = pairs(60, 40, 5, 95)
    row = compare(evaluation(base), evaluation(other)).table.iloc[0]
    assert row["verdict"] == "different"
    assert (row["better"], row["worse"]) == (5, 40)
    assert row["items_for_difference"] < 200
    assert row["interval"] == "Newcombe paired"


def test_likelihoods_see_what_accuracies_cannot():
    rng = np.random.default_rng(0)
    lls = rng.normal(-20, 8, 200)
    worse = lls - 0.2 + rng.normal(0, 0.3, 200)
    scores = (rng.random(200) < 0.5).astype(float)
    table = compare(evaluation(scores, lls), evaluation(scores, worse)).table
    assert list(table["quantity"]) == ["gold log-likelihood", "acc"]  # the sharper one first
    assert list(table["verdict"]) == ["different", "undecided"]


def test_a_floor_is_said():
    zeros = np.zeros(50)
    comparison = compare(evaluation(zeros), evaluation(zeros))
    assert bool(comparison.table.iloc[0]["base_at_floor"])
    assert "floor" in comparison.findings[0]
    high = np.ones(50)
    assert "floor" not in compare(evaluation(high), evaluation(high)).findings[0]


def test_only_the_same_items_are_paired():
    with pytest.raises(InputError, match="sha256"):
        compare(evaluation([1, 0], sha256="a"), evaluation([1, 0], sha256="b"))
    with pytest.raises(InputError, match="items"):
        compare(evaluation([1, 0]), evaluation([1, 0, 1]))
    for wrong in ({"margin": 0}, {"margin": math.nan}, {"margin_nats": math.nan}, {"margin_nats": math.inf}):
        with pytest.raises(InputError, match=f"{next(iter(wrong))}={next(iter(wrong.values()))}"):
            compare(evaluation([1]), evaluation([1]), **wrong)
    other = evaluation([1, 0])
    renamed = Evaluation((TaskScores("else", "acc", ("acc",), other.tasks[0].items, 0, {}),), {})
    with pytest.raises(InputError, match="different tasks"):
        compare(other, renamed)


def test_results_hold_no_nan():
    import json

    results = compare(evaluation([1, 1]), evaluation([1, 1])).results
    json.dumps(results, allow_nan=False)


def test_wilson():
    assert wilson(0, 10)[0] == 0.0
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(50, 100) == pytest.approx((0.4038, 0.5962), abs=1e-4)


def test_both_evaluates_inside_and_outside(model, tokenizer, tmp_path):
    import json

    records = [
        {"goal": f"make {i}", "sol1": f"cut {i} wood", "sol2": f"dig a {i}", "label": i % 2} for i in range(8)
    ]
    (tmp_path / "piqa_validation.jsonl").write_text("\n".join(map(json.dumps, records)))

    @contextmanager
    def nothing():
        yield

    @contextmanager
    def blunted():
        weight = model.lm_head.weight
        weight.data.mul_(0.1)
        try:
            yield
        finally:
            weight.data.div_(0.1)

    same = both(model, tokenizer, nothing, "piqa", data=tmp_path)
    assert set(same.table["difference"]) == {0.0}
    assert same.table.iloc[0]["verdict"] == "equivalent"  # the log-likelihood's
    other = both(model, tokenizer, blunted, "piqa", data=tmp_path, base=same.base)
    assert other.table.iloc[0]["verdict"] == "different"
    assert other.base is same.base


def test_a_broken_model_is_called_broken():
    lls = np.full(20, -3.0)
    broken = lls.copy()
    broken[4] = math.nan
    comparison = compare(evaluation([1] * 20, lls), evaluation([1] * 20, broken))
    assert comparison.table.iloc[0]["verdict"] == "different"
    assert "1 of 20 items no finite value" in comparison.findings[0]
    assert comparison.results["tasks"]["toy"]["gold log-likelihood"]["difference"] is None


def test_the_mean_over_tasks_is_paired_too():
    """A suite's mean is sharper than each task, and two lengths are two suites."""

    def suite(drop, seed):
        rng = np.random.default_rng(seed)
        made = []
        for name in ("a", "b", "c", "d"):
            for length in (1024, 2048):
                scores = (rng.random(100) < 0.8).astype(float)
                scores = np.where(np.arange(100) < drop, 0.0, scores)
                items = {"item": list(range(100)), "acc": list(scores), "gold_ll": [math.nan] * 100}
                made.append(TaskScores(name, "acc", ("acc",), items, 0.0, {"length": length}))
        return Evaluation(tuple(made), {})

    table = compare(suite(0, 1), suite(6, 1)).table
    means = table[table["task"].str.startswith("mean of 4 tasks")]
    assert list(means["task"]) == ["mean of 4 tasks@1024", "mean of 4 tasks@2048"]
    single = table[table["task"].str.endswith("@1024") & ~table["task"].str.startswith("mean")]
    mean = means.iloc[0]
    assert mean["difference"] == pytest.approx(single["difference"].mean())
    assert mean["base"] == pytest.approx(single["base"].mean())
    assert mean["high"] - mean["low"] < 0.7 * (single["high"] - single["low"]).min()
    assert mean["verdict"] == "different"


def test_the_interval_of_the_mean_covers():
    covered, trials = 0, 300
    rng = np.random.default_rng(0)
    for _ in range(trials):
        made = ([], [])
        for name in ("a", "b", "c"):
            base = (rng.random(80) < 0.7).astype(float)
            other = np.where(rng.random(80) < 0.1, 1 - base, base)
            for where, scores in zip(made, (base, other)):
                items = {"item": list(range(80)), "acc": list(scores), "gold_ll": [math.nan] * 80}
                where.append(TaskScores(name, "acc", ("acc",), items, 0.0, {}))
        row = compare(*(Evaluation(tuple(one), {}) for one in made)).table.iloc[-1]
        truth = 0.1 * (1 - 2 * 0.7)
        covered += row["low"] <= truth <= row["high"]
    assert covered / trials > 0.92


@pytest.mark.parametrize("now", [0, 1], ids=["all wrong", "all right still"])
def test_answers_that_all_change_alike_do_not_make_the_next_one_sure(now):
    """The variance is that of two more items, of which one changed; no count of items is negative."""
    row = compare(evaluation([1] * 4), evaluation([now] * 4)).rows[-1]
    variance = {0: 5 / 6 - (4 / 6) ** 2, 1: 1 / 6}[now]
    assert row["items_for_equivalence"] == items_for(variance, 0.005, Z90 + Z_BOTH80)
    assert row["items_for_equivalence"] > 4
    assert row["items_for_difference"] > 0
