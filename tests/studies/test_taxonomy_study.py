"""The taxonomy study: blocks of heads that are the sink, protocols, and Clark et al.'s summed divergences."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.spatial.distance import jensenshannon

import tiny
from perpend.errors import InputError, PerpendError
from perpend.studies import predictions
from perpend.studies.summed_js import summed_jensen_shannon
from perpend.studies.taxonomy_study import CLARK, TABLE_5, best_cluster, protocol_named, taxonomy_study


def heads_by_sink(generator: np.random.Generator) -> np.ndarray:
    """(4, 6, 12) log-signatures whose content has four groups by layer; the sink at 11 groups other heads."""
    content = generator.normal(0, 2, (4, 1, 11)) + generator.normal(0, 0.05, (4, 6, 11))
    content -= np.log(np.exp(content).sum(-1, keepdims=True))
    sink = np.where(np.arange(6) % 2, 0.98, 0.03)[None, :] + generator.uniform(-0.01, 0.01, (4, 6))
    return np.concatenate([np.log1p(-sink)[..., None] + content, np.log(sink)[..., None]], -1)


def test_a_block_that_is_the_sink_is_found_with_it_and_lost_without() -> None:
    rows = heads_by_sink(np.random.default_rng(0))
    study = taxonomy_study(rows, [11], CLARK, roles={"cls": [0], "sep": [11]})
    assert study.results["majority"]["sep"] == 12
    js = {
        policy: [r["jaccard"] for r in study.results["blocks"]["sep"]
                 if r["metric"] == "jensen_shannon" and r["policy"] == policy and r["clusters"] < 6]
        for policy in ("keep", "drop")
    }  # fmt: skip
    assert min(js["keep"]) > 0.99
    assert max(js["drop"]) <= 0.5
    aris = study.results["between_conventions"]
    assert aris["content"]["mean"] == 1
    assert set(aris["content"]["by_clusters"]) == {"4", "5", "6", "8"}
    assert aris["jensen_shannon"]["mean"] < 0.5
    # the content's own groups are the layers
    labels = study.tables["heads"]["content_keep_cluster"]
    assert study.tables["heads"]["layer"].groupby(labels).nunique().max() == 1


def test_a_block_of_fewer_than_two_heads_is_undefined_in_words() -> None:
    rows = heads_by_sink(np.random.default_rng(0))
    study = taxonomy_study(rows, [11], CLARK, roles={"cls": [3], "sep": [11]})
    expected = int((np.exp(rows[..., 3]) > 0.5).sum())
    assert study.results["majority"]["cls"] == expected
    if expected < 2:
        assert "needs two" in study.undefined["cls_block"]
        assert "cls" not in study.results["blocks"]
    with pytest.raises(InputError, match="needs two"):
        best_cluster(np.array([True, False, False]), np.array([0, 1, 1]))


def test_replicates_give_intervals_and_the_same_text_none() -> None:
    rows = heads_by_sink(np.random.default_rng(0))
    study = taxonomy_study(rows, [11], TABLE_5, roles={"sep": [11]}, replicates=[rows] * 4)
    for record in study.results["between_conventions"].values():
        assert record["low"] == pytest.approx(record["mean"])
        assert record["high"] == pytest.approx(record["mean"])
    assert "low" in study.tables["blocks"]
    alone = taxonomy_study(rows, [11], TABLE_5)
    assert "low" not in alone.results["between_conventions"]["cosine"]
    assert alone.results["blocks"] == {}


def test_bad_input_names_the_remedy() -> None:
    rows = heads_by_sink(np.random.default_rng(0))
    with pytest.raises(InputError, match="make no 4 clusters"):
        taxonomy_study(rows[:1, :3], [11], CLARK)
    with pytest.raises(InputError, match="not of 24"):
        taxonomy_study(rows, [11], CLARK, summed=(np.zeros((3, 3)), np.zeros((3, 3))))
    with pytest.raises(InputError, match="table-5"):
        protocol_named("table5")


def test_summed_divergences_against_scipy_row_by_row() -> None:
    model = tiny.tiny("bert")
    tokens = tiny.tokens(3, 10)
    sink, smoothing = (0, 9), 1e-3
    found = summed_jensen_shannon(model, tokens, sink, smoothing=smoothing, batch=2)
    apart = summed_jensen_shannon(model, tokens, sink, smoothing=smoothing, batch=2, block=1)
    np.testing.assert_allclose(apart.keep, found.keep, rtol=1e-6, atol=1e-9)
    assert len({keep[0, 1] for keep, _ in apart.replicates(6)}) > 1  # resampled sequences differ
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = torch.stack(model(tokens, output_attentions=True).attentions).double().numpy()
    model.set_attn_implementation("sdpa")
    heads = rows.transpose(0, 2, 1, 3, 4).reshape(-1, 30, 10)  # every token's row
    dropped = heads[..., 1:9] / heads[..., 1:9].sum(-1, keepdims=True)
    for got, each in ((found.keep, heads), (found.drop, dropped)):
        smooth = smoothing / each.shape[-1] + (1 - smoothing) * each
        expected = np.array([[np.square(jensenshannon(a, b, axis=-1)).sum() for b in smooth] for a in smooth])
        np.testing.assert_allclose(got, expected, atol=2e-5)
        assert np.array_equal(got, got.T)
    assert found.heads[5] == (1, 1)
    assert found.tokens == 30


def test_summed_divergences_refuse_what_has_no_common_support() -> None:
    with pytest.raises(InputError, match="see every key"):
        summed_jensen_shannon(tiny.tiny("llama"), tiny.tokens(2, 10), (0,))
    with pytest.raises(InputError, match="leaves no content"):
        summed_jensen_shannon(tiny.tiny("bert"), tiny.tokens(2, 10), (10,))


def test_predictions_are_written_first_and_none_is_dropped() -> None:
    kept: dict[str, object] = {}
    written = predictions.write(lambda name, make: kept.setdefault(name, make()), predictions.CHECKPOINTS)
    assert kept["predictions"] is written
    score = predictions.falls_flat(-1.0, 0.3, 0.1)
    told = predictions.told(written, [score])
    assert told["scored"][0]["outcome"] == "confirmed"
    assert told["scored"][0]["rule"] == predictions.ENTROPY_FALLS.rule
    assert "Outcome: confirmed" in predictions.sentences(told)[0]
    for bad in (predictions.falls_flat(-1.0, 0.3, 0.57), predictions.never_fell(0.3)):
        assert bad.outcome == "refuted"
    for idle in (predictions.falls_flat(-1.0, -0.1, 0.0), predictions.never_fell(-0.1)):
        assert idle.outcome == "undefined"  # no sink emerged: the premise is missing
        assert "sink" in idle.why
    with pytest.raises(PerpendError, match="scored as"):
        predictions.told(written, [])
    outcomes = [predictions.by_order("x", tau, -1, {}, "").outcome for tau in (-1.0, -0.3, 0.0, 1.0, None)]
    assert outcomes == ["confirmed", "mixed", "refuted", "refuted", "undefined"]
