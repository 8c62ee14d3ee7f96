"""The family records, and the finding of blocks by them."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import transformers as t

import tiny
from perpend.errors import InputError
from perpend.models.families import FORMS, Family, known
from perpend.models.stream import blocks, contributions, family, parts_of

_SMALL = dict(
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=3,
    num_attention_heads=4,
    vocab_size=tiny.VOCAB,
    max_position_embeddings=64,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)

MORE = {
    "albert": lambda: t.AlbertForMaskedLM(t.AlbertConfig(embedding_size=16, **_SMALL)),
    "roberta": lambda: t.RobertaForMaskedLM(t.RobertaConfig(**_SMALL)),
    "electra": lambda: t.ElectraForMaskedLM(t.ElectraConfig(embedding_size=16, **_SMALL)),
    "distilbert": lambda: t.DistilBertForMaskedLM(
        t.DistilBertConfig(dim=32, hidden_dim=48, n_layers=3, n_heads=4, vocab_size=tiny.VOCAB)
    ),
    "gpt1": lambda: t.OpenAIGPTLMHeadModel(
        t.OpenAIGPTConfig(n_embd=32, n_layer=3, n_head=4, vocab_size=tiny.VOCAB, n_positions=64)
    ),
    "gemma": lambda: t.GemmaForCausalLM(t.GemmaConfig(**_SMALL, num_key_value_heads=2, head_dim=8)),
    "cohere": lambda: t.CohereForCausalLM(t.CohereConfig(**_SMALL, num_key_value_heads=2)),
    "starcoder2": lambda: t.Starcoder2ForCausalLM(t.Starcoder2Config(**_SMALL, num_key_value_heads=2)),
    "mixtral": lambda: t.MixtralForCausalLM(
        t.MixtralConfig(**_SMALL, num_key_value_heads=2, num_local_experts=4)
    ),
    "gpt_neo": lambda: t.GPTNeoForCausalLM(
        t.GPTNeoConfig(
            vocab_size=tiny.VOCAB,
            hidden_size=32,
            num_layers=3,
            num_heads=4,
            max_position_embeddings=64,
            attention_types=[[["global", "local", "global"], 1]],
            window_size=16,
        )
    ),
    "gpt_bigcode": lambda: t.GPTBigCodeForCausalLM(
        t.GPTBigCodeConfig(vocab_size=tiny.VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    ),
    "stablelm": lambda: t.StableLmForCausalLM(t.StableLmConfig(**_SMALL, num_key_value_heads=2)),
    "stablelm_parallel": lambda: t.StableLmForCausalLM(
        t.StableLmConfig(**_SMALL, num_key_value_heads=2, use_parallel_residual=True)
    ),
    "mpt": lambda: t.MptForCausalLM(
        t.MptConfig(vocab_size=tiny.VOCAB, d_model=32, n_layers=3, n_heads=4, max_seq_len=64)
    ),
    "modernbert": lambda: t.ModernBertForMaskedLM(
        t.ModernBertConfig(**_SMALL, cls_token_id=1, sep_token_id=2, global_attn_every_n_layers=2)
    ),
    "glm4": lambda: t.Glm4ForCausalLM(t.Glm4Config(**_SMALL, num_key_value_heads=2, head_dim=8)),
    "exaone4": lambda: t.Exaone4ForCausalLM(t.Exaone4Config(**_SMALL, num_key_value_heads=2)),
}


def more(name: str) -> torch.nn.Module:
    """A tiny model of a family beyond those of `tiny`, seeded."""
    torch.manual_seed(0)
    return MORE[name]().eval()


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_tiny_model_has_a_family_and_its_parts_are_found(name):
    model = tiny.tiny(name)
    record = family(model)
    assert record.form in FORMS
    assert parts_of(model) == ("attn", "mlp", "block")
    found = blocks(model)
    assert [block.index for block in found] == list(range(len(found)))
    for block in found:
        assert block.attention is not None
        assert block.out_proj is not None
        assert model.get_submodule(block.name) is block.module
        width = model.config.get_text_config().hidden_size
        weight = block.out_proj.weight
        assert width in weight.shape
        assert block.linears
        for group in block.scale_groups:
            assert block.find(group.source) is not None
            assert set(group.linears) <= set(block.linears)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_scale_groups_name_linears_that_read_one_tensor(name):
    """The input of every linear of a group is what its source made, up to what stands between them."""
    model = tiny.tiny(name)
    made, read = {}, {}
    handles = []
    for block in blocks(model):
        for group in block.scale_groups:
            source = block.find(group.source)
            if "norm" not in group.source and "ln_" not in group.source:
                continue  # between two linears stand attention or an activation
            key = (block.index, group.source)
            handles.append(source.register_forward_hook(lambda m, a, out, k=key: made.update({k: out})))
            for path in group.linears:
                handles.append(
                    block.linears[path].register_forward_pre_hook(
                        lambda m, a, k=(*key, path): read.update({k: a[0]})
                    )
                )
    try:
        with torch.no_grad():
            model(**tiny.inputs(name))
    finally:
        for handle in handles:
            handle.remove()
    for key, value in read.items():
        assert torch.equal(value.reshape(-1), made[key[:2]].reshape(-1)), key
    if name not in ("bert", "olmo2", "opt_post_ln"):  # post-norm: a scale cannot be folded into the stream
        assert read


def test_a_multimodal_wrapper_gives_the_decoder_not_the_vision_tower():
    model = tiny.tiny("gemma3_multimodal")
    assert len(blocks(model)) == model.config.text_config.num_hidden_layers
    assert all("language_model" in block.name for block in blocks(model))
    tower = {id(module) for module in model.model.vision_tower.modules()}
    assert not any(id(block.module) in tower for block in blocks(model))


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_the_base_model_alone_is_found_as_well(name):
    model = tiny.tiny(name)
    assert [b.module for b in blocks(model.base_model)] == [b.module for b in blocks(model)]


def test_the_record_follows_the_config():
    assert family(tiny.tiny("gpt_neox")).form == "parallel"
    assert family(tiny.tiny("gpt_neox_sequential")).form == "sequential"
    assert family(tiny.tiny("opt")).form == "sequential"
    assert family(tiny.tiny("opt_post_ln")).form == "post_norm"


@pytest.mark.parametrize("name", list(MORE))
def test_families_beyond_the_tiny_ones_hold_the_identity(name):
    model = more(name)
    seen = []
    with torch.no_grad():
        plain = model(tiny.tokens())[0]
        with contributions(model, lambda c: seen.append((c.layer, c.part))):
            watched = model(tiny.tokens())[0]
    assert torch.equal(plain, watched)
    assert seen == [(layer, part) for layer in range(3) for part in ("attn", "mlp", "block")]


@pytest.mark.parametrize("kind", ["CLIPVision", "SiglipVision"])
def test_vision_towers_as_models_of_their_own(kind):
    torch.manual_seed(0)
    config = getattr(t, f"{kind}Config")(
        hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4, image_size=28,
        patch_size=7,
    )  # fmt: skip
    model = getattr(t, f"{kind}Model")(config).eval()
    seen = []
    with torch.no_grad(), contributions(model, lambda c: seen.append((c.layer, c.part))):
        model(pixel_values=tiny.pixels())
    assert len(seen) == 9


def test_a_repeated_block_is_one_layer_a_pass():
    """ALBERT runs one block three times: watching its second pass edits that one alone."""
    model = more("albert")
    assert len({id(block.module) for block in blocks(model)}) == 1
    entries = {}
    with torch.no_grad():
        with contributions(model, lambda c: entries.update({c.layer: c.reference}), parts="block"):
            model(tiny.tokens())
        edited = {}

        def drop(c):
            return torch.zeros_like(c.update)

        with (
            contributions(model, drop, parts="block", layers=[1]),
            contributions(model, lambda c: edited.update({c.layer: c.reference}), parts="block"),
        ):
            model(tiny.tokens())
    assert torch.equal(edited[1], entries[1])
    assert torch.equal(edited[2], entries[1])  # the dropped pass left the stream as it was


def test_without_an_adapter_there_are_block_updates_and_a_word_how_to_add_one():
    torch.manual_seed(0)
    model = t.XGLMForCausalLM(
        t.XGLMConfig(vocab_size=tiny.VOCAB, d_model=32, ffn_dim=48, num_layers=3, attention_heads=4)
    ).eval()
    assert parts_of(model) == ("block",)
    assert len(blocks(model)) == 3
    with pytest.raises(InputError, match="perpend/models/families"):
        family(model)
    with (
        pytest.raises(InputError, match="no adapter for 'xglm'"),
        contributions(model, lambda c: None, parts=["attn"]),
    ):
        pass
    seen = []
    with (
        pytest.warns(UserWarning, match="block updates only"),
        contributions(model, lambda c: seen.append(c)),
        torch.no_grad(),
    ):
        model(tiny.tokens())
    assert [c.part for c in seen] == ["block"] * 3


def test_a_model_without_blocks_is_refused():
    with pytest.raises(InputError, match="no list of like modules"):
        blocks(torch.nn.Linear(3, 3))


def test_records_are_consistent():
    names = [record.name for record in known()]
    assert len(set(names)) == len(names)
    claims = [(kind, tuple(sorted(r.when.items()))) for r in known() for kind in r.model_types]
    assert len(set(claims)) == len(claims), "two records claim one model type"
    with pytest.raises(ValueError, match="mid"):
        dataclasses.replace(known()[0], form="parallel", mid="x", sums=("", ""))
    with pytest.raises(ValueError, match="form"):
        dataclasses.replace(known()[0], form="sideways")
    assert all(isinstance(record, Family) for record in known())
