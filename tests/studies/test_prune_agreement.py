"""Pruned image models and encoders against ablating each set by itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

import perpend
import tiny
from perpend.models.ablate import read_heads
from perpend.studies import prune_study
from perpend.studies.prune_agreement import evaluate_agreement
from perpend.studies.prune_sets import PruneSet

SETS = [((0, 1),), ((0, 1), (2, 3)), ((1, 0), (2, 0))]


def inputs(name: str) -> torch.Tensor:
    return tiny.pixels(5) if name in tiny.VISION else tiny.tokens(5, 14)


@pytest.mark.parametrize("name", ["vit", "bert"])
def test_models_with_classes_are_held_by_their_top_answer(name: str) -> None:
    model, data = tiny.build(name), inputs(name)
    found = evaluate_agreement(model, data, [*SETS, SETS[0], ()], batch=2)
    assert found.measure == "top1_agreement"
    assert len(found.sets) == 3
    with torch.no_grad():
        plain = torch.log_softmax(model(data).logits, -1).reshape(5, -1, model(data).logits.shape[-1])
    for heads in SETS:
        with torch.no_grad(), perpend.ablate(model, heads):
            logits = model(data).logits
        now = torch.log_softmax(logits, -1).reshape(plain.shape)
        same = (plain.argmax(-1) == now.argmax(-1)).double().mean(-1)
        kl = (plain.exp() * (plain - now)).sum(-1).mean(-1)
        np.testing.assert_array_equal(found.of(heads, "top1_agreement"), same)
        np.testing.assert_allclose(found.of(heads, "kl"), kl, atol=1e-5)
    assert found.of((), "kl").sum() == 0
    assert (found.of((), "top1_agreement") == 1).all()


@pytest.mark.parametrize("name", ["dinov2", "dinov2_registers", "bert_model"])
def test_models_without_a_head_are_held_by_their_embedding(name: str) -> None:
    if name == "bert_model":
        torch.manual_seed(0)
        config = BertConfig(**tiny._small(num_key_value_heads=None), initializer_range=0.3)
        model = BertModel(config, add_pooling_layer=False).eval()
    else:
        model = tiny.build(name)
    data = inputs(name)
    found = evaluate_agreement(model, data, SETS, batch=2)
    assert found.measure == "cosine"

    def embedding() -> torch.Tensor:
        with torch.no_grad():
            hidden = model(data).last_hidden_state
        return hidden.mean(1) if name == "bert_model" else hidden[:, 0]

    def nearest(x: torch.Tensor) -> torch.Tensor:
        close = torch.nn.functional.normalize(x.double(), dim=-1)
        return (close @ close.T - 9 * torch.eye(len(x))).argmax(-1)

    plain = embedding()
    for heads in SETS:
        with perpend.ablate(model, heads):
            now = embedding()
        cosine = torch.cosine_similarity(plain.double(), now.double())
        np.testing.assert_allclose(found.of(heads, "cosine"), cosine, atol=1e-6)
        kept = (nearest(plain) == nearest(now)).double()
        np.testing.assert_array_equal(found.of(heads, "neighbour_agreement"), kept)
    low, high = found.interval(SETS[0])
    assert low <= found.of(SETS[0], "cosine").mean() <= high


def test_sets_share_their_first_layers() -> None:
    found = evaluate_agreement(tiny.tiny("vit"), tiny.pixels(2), SETS)
    # layer 0: {}, {1}; layer 1: {} of the unpruned, {} of the first two, {0}; layer 2: four leaves
    assert found.cost == pytest.approx((2 + 3 + 4) / (4 * 3))


def test_resuming_uses_what_is_stored() -> None:
    model, data, kept = tiny.tiny("dinov2"), tiny.pixels(5), {}

    def store(name, compute):
        if name not in kept:
            kept[name] = compute()
        return kept[name]

    first = evaluate_agreement(model, data, SETS, batch=2, store=store)
    kept.pop(next(iter(kept)))
    again = evaluate_agreement(model, data, SETS, batch=2, store=store)
    np.testing.assert_array_equal(first.values["cosine"], again.values["cosine"])


def test_heads_that_added_nothing_are_named() -> None:
    model = tiny.build("vit")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "layers.1." in name and name.split(".")[-2] in ("value", "v_proj"):
                parameter[:8] = 0  # head 0 of layer 1
    found = evaluate_agreement(model, tiny.pixels(2), SETS)
    assert found.zero_anyway == ((1, 0),)


def test_a_cell_is_the_mean_over_seeds_and_higher_wins() -> None:
    found = evaluate_agreement(tiny.tiny("dinov2"), tiny.pixels(4), SETS)
    by_seed = {
        seed: [PruneSet("js", 0.2, heads), PruneSet("random_a", 0.2, SETS[2], fixed=True)]
        for seed, heads in enumerate(SETS[:2])
    }
    js, chance = prune_study.agreement_cells(found, by_seed)
    means = [found.of(heads, "cosine").mean() for heads in SETS[:2]]
    assert js["cosine"] == pytest.approx(np.mean(means))
    assert js["sd"] == pytest.approx(np.std(means))
    assert chance["sd"] is None
    wins = prune_study.random_wins([js, chance], "cosine", higher=True)
    assert wins == {"js": {"beaten": int(chance["cosine"] > js["cosine"]), "of": 1}}


def test_files_of_heads_are_read_back_sorted(tmp_path) -> None:
    file = tmp_path / "heads.json"
    file.write_text('{"heads": [[2, 1], [0, 3], [2, 1]], "criterion": "mine"}')
    assert read_heads(file) == ((0, 3), (2, 1))


def test_accuracy_is_that_of_the_pruned_classifier_on_the_labels() -> None:
    model, data = tiny.tiny("vit"), tiny.pixels(5)
    with torch.no_grad():
        own = model(pixel_values=data).logits.argmax(-1)
    labels = own.clone()
    labels[:2] = (labels[:2] + 1) % model.config.num_labels  # the unpruned model is wrong on two
    found = evaluate_agreement(model, data, SETS, labels=labels, batch=2)
    assert found.right.tolist() == [0, 0, 1, 1, 1]
    assert found.of((), "accuracy").tolist() == found.right.tolist()
    for heads in SETS:
        with torch.no_grad(), perpend.ablate(model, heads):
            answers = model(pixel_values=data).logits.argmax(-1)
        assert found.of(heads, "accuracy").tolist() == (answers == labels).double().tolist()
    assert "accuracy" not in evaluate_agreement(model, data, SETS).values
