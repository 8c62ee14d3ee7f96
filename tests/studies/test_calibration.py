"""The calibration curve: its points, a model's place on it, and the paper's ten models."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from perpend.errors import InputError
from perpend.papers import items, published
from perpend.studies.calibration import (
    calibration_curve,
    expected_rate,
    place,
    published_models,
    reversal_rates,
    tracking,
)
from perpend.studies.simulation.sampler import closed_content, rows

THREE = ("cosine", "jensen_shannon", "euclidean")


@pytest.fixture(scope="module")
def curve() -> pd.DataFrame:
    return calibration_curve(triples=1500, metrics=(*THREE, "hellinger", "content"))


def test_synthetic_rows_are_what_the_protocol_says():
    x = rows(np.random.default_rng(0), 4000, 0.7, 0.1)
    assert x.shape == (4000, 64)
    np.testing.assert_allclose(x.sum(1), 1, rtol=1e-12)
    assert x[:, 0].min() >= 0.02
    assert x[:, 0].max() <= 0.98
    assert x[:, 0].mean() == pytest.approx(0.7, abs=0.01)
    assert x[:, 0].std() == pytest.approx(0.1, abs=0.01)
    content = x[:, 1:] / (1 - x[:, :1])
    assert content.min() > 0.99e-12  # clipped at 1e-12 and re-closed
    assert (content < 2e-12).mean() > 0.02  # which Dirichlet(0.1) often needs
    np.testing.assert_allclose(closed_content(np.array([[0.5, 0.0, 0.5]])), [[0.5, 1e-12, 0.5]], rtol=1e-11)


def test_a_point_does_not_depend_on_the_grid_and_repeats_to_the_bit(curve):
    again = reversal_rates(0.5, triples=1500, metrics=("cosine",))["cosine"]
    there = curve[(curve["metric"] == "cosine") & np.isclose(curve["sink"], 0.5)].iloc[0]
    assert again == (there["rate"], there["ties"])
    assert reversal_rates(0.5, triples=1500, metrics=("cosine",), seed=8)["cosine"] != again


def test_the_curve_grows_with_the_sink_and_is_zero_for_content(curve):
    table = curve.pivot(index="sink", columns="metric", values="rate")
    assert (table["content"] == 0).all()
    for metric in THREE:
        assert np.corrcoef(table.index, table[metric])[0, 1] > 0.8
        assert table[metric].iloc[-1] > table[metric].iloc[0] + 0.1
    assert ((curve["low"] <= curve["rate"]) & (curve["rate"] <= curve["high"])).all()


def test_rows_without_convention_effect_have_rate_zero():
    """With the same sink in every row the content term alone decides d_A: nothing reverses."""
    generator = np.random.default_rng(1)
    from perpend.geometry import dissimilarity

    p, q, r = (np.c_[np.full(500, 0.6), 0.4 * generator.dirichlet(np.ones(9), 500)] for _ in range(3))
    verdicts = [
        np.sign(dissimilarity(p, q, "aitchison", 0, policy) - dissimilarity(p, r, "aitchison", 0, policy))
        for policy in ("keep", "drop")
    ]
    np.testing.assert_array_equal(*verdicts)


def test_fisher_rao_reverses_exactly_as_hellinger():
    found = reversal_rates(0.6, triples=1500, metrics=("hellinger", "fisher_rao"))
    assert found["hellinger"] == found["fisher_rao"]


def test_between_points_the_curve_is_linear_and_beyond_its_ends_flat(curve):
    rate = lambda sink: expected_rate(curve, sink, "euclidean")  # noqa: E731
    assert rate(0.55) == pytest.approx((rate(0.5) + rate(0.6)) / 2)
    assert rate(0.97) == rate(0.9)
    assert rate(0.01) == rate(0.1)


def test_a_model_is_placed_by_its_signature_sink(curve):
    placed = place(curve, 0.82, {"cosine": 0.439, "fisher_rao": 0.42, "aitchison": 0.1})
    assert placed["metric"].tolist() == ["cosine", "fisher_rao"]  # this curve has no points for d_A
    assert placed["expected"].tolist() == [
        expected_rate(curve, 0.82, "cosine"),
        expected_rate(curve, 0.82, "hellinger"),
    ]
    np.testing.assert_allclose(placed["deviation"], placed["rate"] - placed["expected"])


def test_the_papers_models_are_table_2():
    models = published_models()
    assert models["model"].nunique() == 10
    assert len(models) == 40
    llama = models[(models["model"] == "llama-3.2-1b") & (models["metric"] == "euclidean")].iloc[0]
    assert (llama["sink_row"], llama["sink_signature"]) == (0.84, 0.94)
    assert llama["rate"] == pytest.approx(0.472)
    assert llama["sd"] == pytest.approx(0.003)
    assert llama["collapse_disagreement"] == pytest.approx(0.467)
    three = models[models["metric"].isin(THREE)]["rate"]
    assert (three.min(), three.max()) == (pytest.approx(0.173), pytest.approx(0.472))  # "17–47 %"


def test_the_models_track_the_curve_as_printed(curve):
    deviation = tracking(curve)
    deviation = deviation[deviation["metric"].isin(THREE)]["deviation"].abs()
    assert len(deviation) == 30
    assert 100 * deviation.mean() == pytest.approx(4.8, abs=0.8)
    assert 100 * deviation.max() == pytest.approx(13, abs=3)
    # Against the *row* sink they do not: the paper's reading is the signature's.
    models = published_models()
    models = models[models["metric"].isin(THREE)]
    by_row = [
        abs(m.rate - expected_rate(curve, m.sink_row, m.metric)) for m in models.itertuples(index=False)
    ]
    assert 100 * np.mean(by_row) > 6


@pytest.mark.parametrize(
    "wrong", [{"sink": 0.0}, {"sink": 1.0}, {"sink": 0.5, "alpha": 0.0}, {"sink": 0.5, "triples": 0}]
)
def test_points_that_make_no_sense_are_refused(wrong):
    with pytest.raises(InputError, match="calibration point needs"):
        reversal_rates(**wrong)


def test_unknown_metrics_and_missing_points_are_named(curve):
    with pytest.raises(InputError, match="did you mean 'cosine'"):
        reversal_rates(0.5, metrics=("cosin",), triples=10)
    with pytest.raises(InputError, match="no points for 'cosine' at alpha 1"):
        expected_rate(curve, 0.5, "cosine", alpha=1.0)


def test_published_numbers_carry_their_digits():
    assert {"table-1", "table-2", "figure-2", "figure-3", "figure-6", "prose"} <= set(items("attention"))
    entry = published("attention", "figure-6")["cosine"]
    assert (entry.value, entry.trials) == (77.9, 20_000)
    assert entry.half_digit == pytest.approx(0.05)
    assert published("attention", "table-1")["cosine/keep/pq"].half_digit == pytest.approx(5e-5)
    with pytest.raises(InputError, match="unknown item"):
        published("attention", "figure-33")
    with pytest.raises(InputError, match="unknown entry"):
        published("attention", "figure-6")["sine"]
