"""Regimes side by side: order, relations, the sentence, surgery and plans on a trained model."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from perpend.compression import compress, regime
from perpend.errors import InputError
from perpend.evaluation.losses import token_nll
from perpend.evaluation.windows import as_windows
from perpend.studies.compression import (
    Setting,
    correlations,
    layer_table,
    ordering,
    regime_table,
    relations,
    run_regime,
    sentence,
)
from perpend.studies.compression_surgery import VARIANTS, plan, surgery
from perpend.training.export import copied


@pytest.fixture(scope="module")
def trained(shared):
    from perpend import load
    from perpend.texts import read_text, sequences

    model, tokenizer = load(shared / "data/models/stories260K", device="cpu")
    text = read_text(shared / "data/text/tinystories.txt")
    return model, sequences(text, tokenizer, length=96).tokens


@pytest.fixture(scope="module")
def study(trained):
    base, ids = trained
    evaluated = ids[20:26]
    setting = Setting(ids[:6], evaluated[:3], as_windows(evaluated), layer_sequences=2)
    nll = token_nll(base, setting.windows)
    names = ["rtn:group=4", "wanda:sparsity=0.3", "wanda", "wanda:2:4"]
    made = {name: run_regime(base, regime(name), setting, nll) for name in names}
    return base, setting, {name: outcome for name, (outcome, _) in made.items()}, made["wanda:2:4"][1]


def test_regimes_of_a_trained_model_rise_in_loss_and_in_error_across(study):
    _, _, outcomes, _ = study
    table = regime_table(outcomes, "local", "mlp")
    assert list(table["regime"]) == list(outcomes)
    assert table["change"].is_monotonic_increasing
    assert table["perpendicular"].is_monotonic_increasing
    assert (table["kappa"].iloc[1:] < 0).all(), "pruning shrinks updates"
    order = ordering(layer_table(outcomes), list(outcomes), "local", "mlp")
    assert order["perpendicular"]["mean"]
    assert order["perpendicular"]["layers"] == 1.0
    backwards = ordering(layer_table(outcomes), list(outcomes)[::-1], "local", "mlp")
    assert not backwards["perpendicular"]["mean"]
    assert backwards["perpendicular"]["pairs"] == 0.0


def test_relations_are_correlations_of_what_the_tables_hold(study):
    _, _, outcomes, _ = study
    related = relations(outcomes)
    table = regime_table(outcomes, "propagated", "block")
    row = related[
        (related["mode"] == "propagated") & (related["part"] == "block") & (related["over"] == "regimes")
        & (related["measure"] == "total")
    ].iloc[0]  # fmt: skip
    assert row["pearson"] == pytest.approx(np.corrcoef(table["total"], table["change"])[0, 1])
    assert row["spearman"] == pytest.approx(1.0)
    layered = related[related["over"] == "layers of wanda:2:4"]
    assert set(layered["measure"]) == {"perpendicular", "parallel", "total", "kappa", "angle"}
    assert (layered["points"] == 5).all()


def test_downstream_scores_enter_the_relations(study):
    _, _, outcomes, _ = study
    scored = {
        name: {**outcome, "scores": {"piqa": -outcome["change"]["difference"]}}
        for name, outcome in outcomes.items()
    }
    related = relations(scored)
    row = related[(related["target"] == "piqa") & (related["measure"] == "total")].iloc[0]
    assert row["spearman"] == pytest.approx(1.0), "a fall of the score is a cost"
    partly = {**scored, "rtn:group=4": outcomes["rtn:group=4"]}
    assert "piqa" not in set(relations(partly)["target"])


def _made_up(perpendicular, parallel, change):
    total = np.hypot(perpendicular, parallel)
    rows = [
        {
            "mode": "local", "along": "update", "layer": layer, "part": "block",
            "perpendicular": perpendicular, "parallel": parallel, "total": total, "kappa": -parallel,
            "rotation": 0.9, "energy_share": 0.9,
            "isotropy": 3.0, "r_perpendicular_total": 0.99, "r_isotropic": 0.999,
        }
        for layer in range(2)
    ]  # fmt: skip
    return {"error": pd.DataFrame(rows), "change": {"difference": change}, "loss": {"perplexity": 1.0}}


@pytest.mark.parametrize(
    ("errors", "verdict"),
    [
        ([(0.1, 0.1), (0.2, 0.15), (0.3, 0.2), (0.4, 0.3)], "geometry"),
        ([(0.1, 0.5), (0.2, 0.3), (0.3, 0.1), (0.4, 0.02)], "better than the whole error"),
        ([(0.4, 0.1), (0.3, 0.5), (0.2, 0.9), (0.1, 1.2)], "worse than the whole error"),
    ],
)
def test_the_sentence_says_what_the_numbers_say(errors, verdict):
    outcomes = {f"r{i}": _made_up(a, b, float(i)) for i, (a, b) in enumerate(errors)}
    said = sentence(outcomes, relations(outcomes), "local", "block")
    assert verdict in said
    assert "0.999 for an error without direction" in said


def test_two_regimes_say_nothing_of_the_loss():
    outcomes = {f"r{i}": _made_up(0.1 * i, 0.1, float(i)) for i in (1, 2)}
    assert "nothing is said" in sentence(outcomes, relations(outcomes), "local", "block")


def test_correlations_without_spread_are_none():
    assert correlations(np.ones(5), np.arange(5.0))["pearson"] is None
    assert correlations(np.arange(2.0), np.arange(2.0))["spearman"] is None
    assert correlations(np.array([1, 2, 3, np.nan]), np.arange(4.0))["points"] == 3


def test_surgery_orders_parts_and_its_whole_is_the_compressed_model(study):
    base, setting, outcomes, other = study
    table = surgery(base, other, setting.windows).set_index(["component", "norm"])
    assert len(table) == 1 + len(VARIANTS)
    whole = table.loc[("both", "own")]
    assert whole["change"] == pytest.approx(outcomes["wanda:2:4"]["change"]["difference"], abs=1e-4)
    for part in ("perpendicular", "parallel"):
        assert 0 < table.loc[(part, "own")]["change"] < whole["change"]


def test_a_plan_stays_within_the_bytes_of_the_uniform_setting(study, trained):
    base, setting, _, _ = study
    _, ids = trained
    before = [p.clone() for p in base.parameters()]
    made = plan(
        base,
        regime("wanda"),
        setting,
        option="sparsity",
        values=[0.4, 0.6],
        map_tokens=ids[6:10],
        caution=0.0,
    )
    assert made["plan"]["bytes"] <= made["uniform"]["bytes"]
    assert {c["sparsity"] for c in made["choice"]} <= {0.4, 0.5, 0.6}
    assert len(made["choice"]) == 10
    assert made["predicted"] <= 0, "keeping everything uniform is one of the choices"
    assert made["difference"]["low"] <= made["difference"]["loss"] <= made["difference"]["high"]
    assert all(torch.equal(a, b) for a, b in zip(before, base.parameters()))
    for more, message in (
        ({"option": "bits", "values": [3]}, "setting of wanda"),
        ({"option": "sparsity", "values": [0.5]}, "besides 0.5"),
        ({"option": "sparsity", "values": [0.4], "component": "parallel"}, "ranks sites"),
    ):
        with pytest.raises(InputError, match=message):
            plan(base, regime("wanda"), setting, map_tokens=ids[:2], **more)


def test_the_gain_brings_a_shrunken_model_back(trained):
    """Magnitude pruning at 30 % shrinks updates evenly enough for one scalar a projection to help."""
    base, ids = trained
    windows = as_windows(ids[20:32])
    setting = Setting(ids[:8], ids[20:22], windows)
    nll = token_nll(base, windows)
    plain, _ = run_regime(base, regime("magnitude:sparsity=0.3"), setting, nll)
    repaired, _ = run_regime(base, regime("magnitude:sparsity=0.3+gain"), setting, nll)
    assert repaired["loss"]["loss"] < plain["loss"]["loss"]
    refitted, _ = run_regime(base, regime("magnitude:sparsity=0.3+refit"), setting, nll)
    assert refitted["loss"]["loss"] < repaired["loss"]["loss"]


def test_a_plan_counts_the_scales_that_stay_at_run_time(study, trained):
    base, setting, _, _ = study
    _, ids = trained
    awq = regime("awq:group=4")
    whole = compress(copied(base), setting.calibration, awq, batch=setting.batch, keep=setting.keep)
    scales = sum(facts["extra_bytes"] for facts in whole.facts.values())
    assert scales > 0
    made = plan(base, awq, setting, option="bits", values=[3], map_tokens=ids[6:8], caution=0.0)
    assert made["uniform"]["bytes"] == whole.bytes  # codes, steps and zero points, and the scales
    bits = {(c["layer"], c["part"]): {"bits": c["bits"]} for c in made["choice"]}
    again = compress(
        copied(base), setting.calibration, awq, batch=setting.batch, keep=setting.keep, plan=bits
    )
    assert made["plan"]["bytes"] == again.bytes
