"""Ranking and dropping of blocks and modules, and the smaller model that plain transformers loads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM

import tiny
from perpend.errors import InputError
from perpend.evaluation.perplexity import perplexity, token_nll
from perpend.models.smaller import dropped, without
from perpend.models.stream import blocks, contributions
from perpend.models.verify import output_of
from perpend.studies.layer_drop import CRITERIA, evaluate, orders, rank
from perpend.surveys.updates import survey_updates


def logits(model, name):
    with torch.no_grad():
        return output_of(model(**tiny.inputs(name)))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "cohere2", "bert", "opt", "granite"])
def test_dropping_a_block_passes_its_input_on(name):
    model, entries = tiny.tiny(name), {}
    with (
        dropped(model, [(1, "block")]),
        contributions(model, lambda c: entries.update({c.layer: c.reference}), parts="block"),
    ):
        logits(model, name)
    assert torch.equal(entries[2], entries[1])


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_a_smaller_model_is_the_model_with_the_block_dropped(name, tmp_path):
    """Saved, loaded by plain transformers, and equal to dropping by hand."""
    model = tiny.build(name)
    with dropped(model, [(1, "block")]):
        expected = logits(model, name)
    smaller, notes = without(model, [(1, "block")])
    assert len(blocks(smaller)) == len(blocks(model)) - 1
    assert any("blocks left out" in note for note in notes)
    smaller.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path).eval()
    torch.testing.assert_close(logits(loaded, name), expected, rtol=1e-4, atol=1e-5)
    assert len(blocks(model)) == len(blocks(tiny.tiny(name)))  # the original is left as it was
    assert torch.equal(logits(model, name), logits(tiny.tiny(name), name))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_dropped_modules_are_zeroed_and_said_so(name, tmp_path):
    model = tiny.build(name)
    drops = [(0, "attn"), (2, "mlp")]
    with dropped(model, drops):
        expected = logits(model, name)
    smaller, notes = without(model, drops)
    assert "zero" in notes[0]
    torch.testing.assert_close(logits(smaller, name), expected, rtol=1e-4, atol=1e-5)


def test_per_layer_settings_follow_their_layers(tmp_path):
    """Sliding and full layers keep their kind, and generation with a cache works in the smaller model."""
    model = tiny.build("gemma3")
    smaller, _ = without(model, [(0, "block")])
    assert smaller.config.layer_types == model.config.layer_types[1:]
    smaller.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    ids = tiny.tokens(1, 20)
    written = loaded.generate(ids, max_new_tokens=4, do_sample=False)
    with torch.no_grad():
        assert torch.equal(loaded(written[:, :-1]).logits[:, 19:].argmax(-1), written[:, 20:])
    hybrid, _ = without(tiny.build("qwen3_next"), [(0, "block")])
    assert hybrid.config.layer_types == ["full_attention", "linear_attention", "full_attention"]
    experts, _ = without(tiny.build("deepseek_v3"), [(0, "block")])
    assert experts.config.first_k_dense_replace == 0  # the dense layer was the one dropped


def test_mixed_drops_and_the_wrapper_config():
    model = tiny.build("gemma3_multimodal")
    smaller, notes = without(model, [(3, "block"), (1, "mlp")])
    assert smaller.config.text_config.num_hidden_layers == 3
    assert len(smaller.config.text_config.layer_types) == 3
    assert len(notes) == 2


def test_impossible_drops_are_refused():
    model = tiny.build("llama")
    with pytest.raises(InputError, match="nothing is left"):
        without(model, [(i, "block") for i in range(3)])
    with pytest.raises(InputError, match="layer 3 does not exist"):
        without(model, [(3, "block")])
    with pytest.raises(InputError, match="unknown part"), dropped(model, [(0, "head")]):
        pass


def test_blocks_that_depend_on_their_number_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=tiny.VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64, initializer_range=0.5,
        scale_attn_by_inverse_layer_idx=True, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    with pytest.raises(InputError, match="depend on their number"):
        without(GPT2LMHeadModel(config).eval(), [(0, "block")])


def test_ranking_is_by_the_stated_numbers():
    tokens = tiny.tokens(6, 20)
    survey = survey_updates(tiny.tiny("qwen3"), tokens)
    ranking = rank(survey)
    cosine = {}

    def look(c):
        x = c.reference.double()
        cosine[c.layer, c.part] = float(1 - torch.cosine_similarity(x, x + c.update.double(), dim=-1).mean())

    with torch.no_grad(), contributions(tiny.tiny("qwen3"), look):
        tiny.tiny("qwen3")(tokens)
    for (layer, part), value in cosine.items():
        j = ranking.parts.index(part)
        assert ranking.scores["cosine"][layer, j] == pytest.approx(value, rel=1e-3)
        assert ranking.scores["influence"][layer, j] == pytest.approx(cosine[layer, "block"], rel=1e-3)
    for part in ("attn", "mlp", "block"):
        expected = sorted(((v, layer) for (layer, p), v in cosine.items() if p == part))
        assert [layer for layer, _ in ranking.order(part, "cosine")] == [layer for _, layer in expected]
    assert len(ranking.order("module", "rotation")) == 6
    table = ranking.table
    assert len(table) == 9
    row = table[(table.part == "mlp") & (table.cosine_rank == 0)].iloc[0]
    assert (row.layer, "mlp") == ranking.order("mlp", "cosine")[0]


def test_a_part_that_adds_nothing_goes_first():
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.zero_()
    ranking = rank(survey_updates(model, tiny.tokens()))
    for criterion in ("cosine", "rotation"):
        assert ranking.order("module", criterion)[0] == (1, "mlp")


def test_orders_hold_baselines_and_merge_what_is_one():
    ranking = rank(survey_updates(tiny.tiny("llama"), tiny.tokens()))
    found = orders(ranking, "block", seeds=(0, 1))
    assert found["last first"] == [(2, "block"), (1, "block"), (0, "block")]
    assert sum("cosine" in name and "influence" in name for name in found) == 1
    assert {"random 0", "random 1"} <= set(found)
    assert all(sorted(order) == sorted(found["last first"]) for order in found.values())
    assert orders(ranking, "block", seeds=(0,))["random 0"] == found["random 0"]


def test_evaluation_is_the_perplexity_of_the_smaller_model():
    model, tokens = tiny.build("llama"), tiny.tokens(6, 20)
    ranking = rank(survey_updates(model, tokens))
    kept = {}

    def store(name, compute):
        return kept.setdefault(name, compute())

    chosen = orders(ranking, "block", seeds=(0,))
    curve = evaluate(model, tokens, chosen, counts=(1, 2), store=store)
    assert len(curve) == 3 * len(chosen)
    assert curve[curve["count"] == 0].loss.nunique() == 1
    for row in curve[curve["count"] > 0].itertuples():
        order = chosen[row.order]
        smaller, _ = without(model, order[: row.count])
        assert row.loss == pytest.approx(perplexity("x", token_nll(smaller, tokens)).loss, rel=1e-5)
        assert row.low <= row.loss <= row.high
    assert len(kept) == curve.dropped.nunique()
    with pytest.raises(InputError, match="cannot be dropped"):
        evaluate(model, tokens, chosen, counts=(4,))


def test_rankings_refuse_what_they_do_not_have():
    ranking = rank(survey_updates(tiny.tiny("llama"), tiny.tokens(), parts="block"))
    with pytest.raises(InputError, match="not in the survey"):
        ranking.order("module", "cosine")
    with pytest.raises(InputError, match="unknown criterion"):
        ranking.order("block", CRITERIA[0] + "s")
    with pytest.raises(InputError, match="unknown unit"):
        ranking.order("layer", "cosine")
    assert np.isfinite(ranking.scores["rotation"]).all()


def test_base_models_are_saved_too(tmp_path):
    smaller, _ = without(tiny.build("bert").base_model, [(1, "block")])
    smaller.save_pretrained(tmp_path)
    assert len(AutoModel.from_pretrained(tmp_path).encoder.layer) == 2
