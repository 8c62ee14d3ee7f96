"""The study of scale: what is measured of a model, rank agreement within families, predictions scored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import tiny
from perpend import survey_attention
from perpend.errors import InputError
from perpend.geometry import pairwise
from perpend.studies import predictions, taxonomy
from perpend.studies.reversal import all_triples
from perpend.studies.scale import CLASSICAL, Model, measure, rise, scale_study, tau


@pytest.fixture(scope="module")
def model() -> Model:
    survey = survey_attention(tiny.tiny("llama"), tiny.tokens(6, 24), window=8, batch=2, block=2)
    return measure(survey, name="one", parameters=1000, family="llama", weights="a", replicates=8)


def test_a_model_is_measured_as_by_hand(model: Model) -> None:
    survey = survey_attention(tiny.tiny("llama"), tiny.tokens(6, 24), window=8)
    rows = survey.signatures.reshape(-1, 8)
    keep, drop = (pairwise(rows, "jensen_shannon", sink=0, policy=p, log=True) for p in ("keep", "drop"))
    flipped = [(keep[p, q] - keep[p, r]) * (drop[p, q] - drop[p, r]) < 0 for p, q, r in all_triples(12)]
    assert model.values["reversal_jensen_shannon"] == pytest.approx(np.mean(flipped))
    assert model.values["reversal_content"] == 0
    assert model.values["ari_content"] == 1
    assert model.values["signature_mass"] == pytest.approx(np.exp(rows[:, 0]).mean(), rel=1e-6)
    expected = np.mean(
        [
            taxonomy.adjusted_rand(*(taxonomy.cut(taxonomy.merges(d), k) for d in (keep, drop)))
            for k in (4, 6, 8)
        ]
    )
    assert model.values["ari_jensen_shannon"] == pytest.approx(expected)
    low, high = model.intervals["row_mass"]
    assert low < model.values["row_mass"] < high
    assert high - low < 0.5


def like(
    model: Model,
    name: str,
    parameters: int,
    family: str,
    sink: float,
    rate: float,
    ari: float,
    half: float = 0.01,
) -> Model:
    values = {**model.values, "row_mass": sink, "signature_mass": sink, "reversal_jensen_shannon": rate}
    values |= {f"ari_{metric}": ari for metric in CLASSICAL}
    about = {key: (values[key] - half, values[key] + half) for key in ("row_mass", "reversal_jensen_shannon")}
    intervals = about if half else {}
    named = {"name": name, "weights": name, "family": family, "parameters": parameters}
    return replace(model, **named, values=values, intervals=intervals)


def scored(models: list[Model]) -> dict[str, dict]:
    written = predictions.write(lambda name, make: make(), predictions.SCALE)
    study = scale_study(models, written, curve_triples=200)
    return {one["name"]: one for one in study.results["predictions"]["scored"]}


def test_predictions_are_scored_within_families(model: Model) -> None:
    models = [
        like(model, "a1", 10, "a", 0.2, 0.30, 0.5),
        like(model, "a2", 100, "a", 0.5, 0.45, 0.3),
        like(model, "a3", 1000, "a", 0.8, 0.40, 0.1),
        like(model, "b1", 5, "b", 0.9, 0.48, 0.05),  # small and with a large sink: another family
    ]
    found = scored(models)
    assert found["sink-rises-with-size"]["outcome"] == "confirmed"
    assert found["sink-rises-with-size"]["numbers"]["pairs"] == 3
    assert found["reversal-rises-with-size"]["outcome"] == "mixed"
    assert found["reversal-rises-with-size"]["numbers"]["tau"] == pytest.approx(1 / 3)
    assert found["ari-falls-with-sink"]["outcome"] == "confirmed"
    assert found["ari-below-one"]["outcome"] == "confirmed"


def test_without_a_family_all_models_are_compared_and_it_is_said(model: Model) -> None:
    found = scored([like(model, "a", 10, "a", 0.8, 0.4, 0.95), like(model, "b", 20, "b", 0.2, 0.4, 0.5)])
    assert found["sink-rises-with-size"]["outcome"] == "refuted"
    assert "different families" in found["sink-rises-with-size"]["numbers"]["scope"]
    assert found["reversal-rises-with-size"]["outcome"] == "undecided"  # neither rising nor falling
    assert found["ari-below-one"]["outcome"] == "refuted"
    assert found["ari-falls-with-sink"]["outcome"] == "undefined"
    assert "needs three" in found["ari-falls-with-sink"]["why"]


def test_a_difference_within_its_interval_decides_nothing(model: Model) -> None:
    def outcome(*rows: tuple, half: float = 0.01) -> tuple[str, str]:
        models = [like(model, f"m{i}", 10**i, "a", s, 0.4, 0.5, half) for i, s in enumerate(rows)]
        found = scored(models)["sink-rises-with-size"]
        return found["outcome"], found["why"]

    assert outcome(0.015627, 0.015633)[0] == "undecided"
    assert "within their 95 % intervals" in outcome(0.015627, 0.015633)[1]
    assert "no interval" in outcome(0.2, 0.8, half=0)[1]
    assert outcome(0.2, 0.8) == (
        "undecided",
        "two models make one pair, whose tau is 1 or -1 whatever the cause; a trend needs three",
    )
    assert outcome(0.8, 0.2)[0] == "refuted", "one counterexample is enough"
    assert outcome(0.2, 0.5, 0.8)[0] == "confirmed"
    assert outcome(0.2, 0.5, 0.505)[0] == "undecided", "the last pair may have risen or fallen"
    assert outcome(0.8, 0.5, 0.2)[0] == "refuted"
    assert outcome(0.8, 0.5, 0.505)[0] == "refuted", "whichever way the last pair goes"


def test_the_interval_of_a_difference_adds_half_widths_in_squares(model: Model) -> None:
    small = replace(like(model, "s", 1, "a", 0.2, 0.4, 0.5), intervals={"row_mass": (0.17, 0.24)})
    large = replace(like(model, "l", 2, "a", 0.5, 0.4, 0.5), intervals={"row_mass": (0.47, 0.54)})
    assert rise(small, large, "row_mass") == pytest.approx((0.3, 0.3 - 0.05, 0.3 + 0.05))
    assert rise(small, large, "ari_cosine") is None


def test_rank_agreement_leaves_out_equal_sizes() -> None:
    assert tau([((1, 2), (2, 3)), ((1, 2), (1, 9)), ((1, 2), (3, 1))]) == 0
    assert tau([((1, 2), (1, 3))]) is None


def test_a_model_twice_and_a_model_alone_are_refused(model: Model) -> None:
    with pytest.raises(InputError, match="at least two"):
        scale_study([model])
    with pytest.raises(InputError, match="same weights"):
        scale_study([model, replace(model, name="copy")])
    survey = survey_attention(tiny.tiny("llama"), tiny.tokens(2, 24), window=8, layers=[0])
    assert measure(survey, name="x", parameters=1, replicates=0).values["ari_cosine"] == pytest.approx(
        1.0
    )  # four heads in four clusters
