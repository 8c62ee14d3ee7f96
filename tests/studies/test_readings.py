"""Readings of windows, conventions, weights, whole and single rows, against the same questions by hand."""

from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

import tiny
from attention_oracle import record, weights
from perpend.commands._reading_figures import figures
from perpend.errors import InputError
from perpend.geometry import entropy, pairwise
from perpend.studies import readings, resampling, reversal
from perpend.studies.attention import attention_study, block_sums
from perpend.studies.row_audit import COUNTED, rates, row_audit
from perpend.studies.whole_rows import whole_rows
from perpend.surveys.attention import survey_attention

W = 8


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return tiny.tokens(12, 30)


@pytest.fixture(scope="module")
def survey(tokens):
    return survey_attention(
        tiny.tiny("llama"),
        tokens,
        window=W,
        windows=(4, 12),
        value_weights=("value", "output"),
        whole_rows="log",
        row_sample=60,
        block=2,
    )


def test_windows_against_separate_surveys(survey, tokens) -> None:
    reading = readings.windows(survey, replicates=20)
    json.dumps(reading.results, allow_nan=False)
    content = {}
    for row in reading.results["by_window"]:
        alone = survey_attention(tiny.tiny("llama"), tokens, window=row["window"], block=2, retained=True)
        rows = alone.signatures.reshape(12, -1)
        content[row["window"]] = pairwise(rows, "content", sink=0, log=True)
        for metric, rate in row["reversal"].items():
            keep, drop = reversal.matrices(rows, 0, (metric,))[metric]
            assert rate["value"] == pytest.approx(reversal.exact_rates(keep, drop)[0].mean())
        assert row["retained"]["value"] == pytest.approx(alone.statistics["retained"].mean())
        assert row["retained"]["low"] < row["retained"]["value"] < row["retained"]["high"]
    upper = np.triu_indices(12, 1)
    between = reading.results["between"][0]
    rho = stats.spearmanr(content[4][upper], content[12][upper]).statistic
    assert between["spearman"]["value"] == pytest.approx(rho)
    flips = reversal.exact_rates(content[4], content[12])[0].mean()
    assert between["flips"]["value"] == pytest.approx(flips)
    assert reading.results["queries"] == "their own queries, t ≥ W"
    assert reading.undefined == {}


def test_one_further_window_has_no_other_to_be_compared_with() -> None:
    survey = survey_attention(tiny.tiny("llama"), tiny.tokens(4, 30), window=W, windows=(4,), block=2)
    reading = readings.windows(survey, replicates=0)
    assert reading.results["between"] == []
    run = SimpleNamespace(results={"windows": reading.results}, tables=reading.tables)
    made = figures(run)
    assert [figure.title for figure in made] == ["Windows", "Between windows"]
    assert set(made[1].table["window"]) == {"W = 4"}


def test_a_window_that_hides_a_layer_leaves_its_heads_out_of_all() -> None:
    """The layer's sliding window of 16 keys shows no query the first 20."""
    survey = survey_attention(tiny.tiny("gemma2"), tiny.tokens(6, 40), window=W, windows=(8, 20), block=2)
    reading = readings.windows(survey, replicates=5)
    narrow = sum(site.heads for site in survey.sites if site.window is not None)
    assert narrow > 0
    assert reading.results["heads"] == sum(site.heads for site in survey.sites) - narrow
    assert f"{narrow} heads have no signature in some reading (20:" in reading.undefined["heads"]


def test_weights_side_by_side(survey) -> None:
    reading = readings.weights(survey, replicates=20)
    json.dumps(reading.results, allow_nan=False)
    found = reading.results
    assert found["plain"]["row_mass"]["value"] == pytest.approx(survey.statistics["sink_mass"].mean())
    plain = pairwise(survey.signatures.reshape(12, W), "content", sink=0, log=True)
    upper = np.triu_indices(12, 1)
    for kind in ("value", "output"):
        rows = survey.weighted[kind].signatures.reshape(12, W)
        own = pairwise(rows, "content", sink=0, log=True)
        rho = stats.spearmanr(plain[upper], own[upper]).statistic
        assert found[kind]["spearman"]["value"] == pytest.approx(rho)
        assert found[kind]["signature_mass"]["value"] == pytest.approx(np.exp(rows[:, 0]).mean())
        assert found[kind]["total"]["value"] == pytest.approx(
            survey.weighted[kind].statistics["total"].mean()
        )
        keep, drop = reversal.matrices(rows, 0, ("euclidean",))["euclidean"]
        exact = reversal.exact_rates(keep, drop)[0].mean()
        assert found[kind]["reversal"]["euclidean"]["value"] == pytest.approx(exact)
    assert "spearman" not in found["plain"]
    assert len(reading.tables["weights_layers"]) == 9


def test_conventions_of_an_encoder() -> None:
    survey = survey_attention(tiny.tiny("bert"), tiny.tokens(8, 20), sink="cls", drop_both=True, block=2)
    found = readings.conventions(survey, replicates=20).results
    heads = int(np.prod(survey.signatures.shape[:2]))
    both = survey.variants["drop-both"].signatures.reshape(heads, -1)
    for metric, row in found.items():
        keep, drop = reversal.matrices(survey.signatures.reshape(heads, -1), 0, (metric,))[metric]
        third = pairwise(both, metric, sink=0, policy="drop", log=True)
        for name, pair in {
            "keep_drop": (keep, drop),
            "keep_drop_both": (keep, third),
            "drop_drop_both": (drop, third),
        }.items():
            assert row[name]["value"] == pytest.approx(reversal.exact_rates(*pair)[0].mean()), (metric, name)
    assert found["content"]["keep_drop"] == {"value": 0, "low": 0, "high": 0}
    assert found["content"]["drop_drop_both"]["value"] > 0


def test_whole_rows_beside_the_fixed_support(survey, tokens) -> None:
    reading = whole_rows(survey, replicates=20)
    json.dumps(reading.results, allow_nan=False)
    found = reading.results["same_queries"]
    totals, shares = [], []
    for sequence in tokens:
        for call in record(tiny.tiny("llama"), input_ids=sequence[None]).calls:
            for t in range(W, 30):
                row = weights(call)[0, :, t, : t + 1]
                totals.append(entropy(row).mean())
                shares.append(row[:, 0].mean())
    assert found["whole"]["total"]["value"] == pytest.approx(float(torch.stack(totals).mean()), abs=1e-5)
    assert found["whole"]["sink_mass"]["value"] == pytest.approx(float(torch.stack(shares).mean()), abs=1e-5)
    assert found["fixed"]["total"]["value"] == pytest.approx(survey.statistics["total"].mean())
    rank = stats.spearmanr(survey.whole.means(W)["total"].ravel(), survey.statistics["total"].ravel())
    assert found["spearman"]["value"] == pytest.approx(rank.statistic)
    assert found["whole"]["total"]["low"] < found["whole"]["total"]["value"] < found["whole"]["total"]["high"]
    assert reading.results["without_content"] == [12] * 3
    layers = reading.tables["whole_rows_layers"]
    split = layers["whole_binary"] + layers["whole_weighted_content"]
    np.testing.assert_allclose(layers["whole_total"], split, atol=1e-12)


def test_rows_are_judged_at_one_place(survey, tokens) -> None:
    """Rates on the eager rows of the sampled places, all triples, within the error of 1000 sampled ones."""
    reading = row_audit(survey, triples=1000, resamples=200)
    json.dumps(reading.results, allow_nan=False)
    every = [record(tiny.tiny("llama"), input_ids=sequence[None]).calls for sequence in tokens]
    exact = {metric: [] for metric in ("cosine", "content", "aitchison")}
    for sequence, query in zip(survey.picked.places.sequence, survey.picked.places.query):
        rows = np.concatenate([weights(call)[0, :, query, :W].log().numpy() for call in every[sequence]])
        for metric in exact:
            pair = reversal.matrices(rows, 0, (metric,))[metric]
            exact[metric].append(reversal.exact_rates(*pair)[0].mean())
    for metric, values in exact.items():
        number = reading.results["metrics"][metric]["reversal"]
        assert number["value"] == pytest.approx(np.mean(values), abs=0.01)
        assert number["low"] <= number["value"] <= number["high"]
    content = reading.results["metrics"]["content"]
    assert content["reversal"] == {"value": 0, "low": 0, "high": 0}
    assert content["agrees_keep"] == content["agrees_drop"]


def test_rows_all_alike_agree_with_their_signature() -> None:
    """One sequence over and over: its rows at one query are the signatures of that query, to the verdict."""
    tokens = tiny.tokens(1, 30).repeat(4, 1)
    survey = survey_attention(
        tiny.tiny("llama"), tokens, window=W, queries=(20, 21), row_sample=4, batch=1, block=1
    )
    metrics = row_audit(survey, triples=200, resamples=50).results["metrics"]
    for metric, found in metrics.items():
        assert found["agrees_keep"]["value"] == pytest.approx(1, abs=0.005), metric
        assert found["agrees_drop"]["value"] == pytest.approx(1, abs=0.005), metric
        assert found["reversal"]["value"] == pytest.approx(found["signatures"], abs=0.06)


def test_intervals_are_over_sequences_not_places() -> None:
    """Places of one sequence all alike: a hundred of them are worth one."""
    table = pd.DataFrame(
        [
            {"sequence": s, "triples": 10, **dict.fromkeys(COUNTED, 10 * (s % 2))}
            for s in range(10)
            for _ in range(100)
        ]
    )
    found = rates(table, 2000)["reversal"]
    assert found["value"] == 0.5
    assert found["high"] - found["low"] == pytest.approx(2 * 1.96 * 0.5 / np.sqrt(10), rel=0.2)
    assert rates(table[table["sequence"] == 1], 2000) == {name: {"value": 1.0} for name in COUNTED}


def test_what_a_survey_did_not_read_is_asked_for(tokens) -> None:
    plain = survey_attention(tiny.tiny("llama"), tokens, window=W)
    for ask, argument in (
        (readings.windows, "windows="),
        (readings.weights, "value_weights="),
        (readings.conventions, "drop_both="),
        (whole_rows, "whole_rows="),
        (row_audit, "row_sample="),
    ):
        with pytest.raises(InputError, match=argument):
            ask(plain)


def test_a_study_carries_the_readings_and_the_sums_per_block(survey) -> None:
    study = attention_study({0: survey}, triples=500, replicates=10, splits=2)
    assert {"windows", "weights", "whole_rows", "row_audit"} <= set(study.results)
    assert {"windows", "weights", "whole_rows", "row_audit"} <= set(study.tables)
    assert set(study.arrays) == {
        "signatures", "arithmetic", "block_logits", "block_arithmetic", "block_rows",
    }  # fmt: skip
    assert block_sums(survey_attention(tiny.tiny("llama"), tiny.tokens(4, 30), window=W)) == {}


def test_large_sums_per_block_are_left_out(survey, monkeypatch) -> None:
    from perpend.studies import attention

    monkeypatch.setattr(attention, "BLOCK_BYTES", 6 * 3 * 4 * W * 8 - 1)
    assert block_sums(survey) == {}
    monkeypatch.setattr(attention, "BLOCK_BYTES", 6 * 3 * 4 * W * 8)
    assert block_sums(survey)["block_logits"].shape == (6, 3, 4, W)


def test_basic_intervals() -> None:
    replicates = np.linspace(0.5, 0.7, 201)  # of an estimate of 0.55: resampling added 0.05
    low, high = resampling.basic_interval(0.55, 0.55, replicates)
    assert (low, high) == pytest.approx((0.405, 0.595))
    assert resampling.basic_interval(0.6, 0.55, replicates) == pytest.approx((0.455, 0.645))
    assert resampling.basic_interval(0.1, 0.1, np.array([0.0, 0.4]), (0.0, 1.0))[0] == 0
    assert resampling.basic_interval(0.5, 0.5, np.array([np.nan, 0.4])) is None
    found = resampling.intervals({"a": 0.5, "b": 0.2}, {"a": 0.5}, [{"a": 0.4}, {"a": 0.6}])
    assert set(found["a"]) == {"value", "low", "high"}
    assert found["b"] == {"value": 0.2}
    assert (
        resampling.said({"value": 0.5, "low": 0.25, "high": 0.75}) == "50.0% (95 % interval 25.0% to 75.0%)"
    )
    assert resampling.said({"value": None}) == "undefined"
