"""Ablation against zeroing the columns of the output projection, on every family that has one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
import transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

import perpend
import tiny
from attention_oracle import falcon, gpt_neo, plain_gpt, t5
from perpend.errors import InputError, PerpendError
from perpend.models.ablate import _output_projections
from perpend.models.attention import attention_sites


def run(model: nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


@contextmanager
def zeroed_columns(model: nn.Module, heads: list[tuple[int, int]]) -> Iterator[None]:
    """The same model with the input columns of W_O set to zero: an ablation that needs no hook."""
    sites = attention_sites(model)
    projections = _output_projections(model, sites)
    before = {layer: projections[layer].weight.detach().clone() for layer, _ in heads}
    with torch.no_grad():
        for layer, head in heads:
            width = sites[layer].value_dim
            weight = projections[layer].weight
            columns = weight if isinstance(projections[layer], Conv1D) else weight.T
            columns[head * width : (head + 1) * width] = 0
    try:
        yield
    finally:
        with torch.no_grad():
            for layer, weight in before.items():
                projections[layer].weight.copy_(weight)


def some_heads(model: nn.Module) -> list[tuple[int, int]]:
    last = len(attention_sites(model)) - 1
    return [(0, 1), (last, 0), (last, 3)]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_ablation_is_zeroing_the_columns_of_the_output_projection(name: str) -> None:
    model, inputs = tiny.build(name), tiny.inputs(name)
    heads = some_heads(model)
    plain = run(model, **inputs)
    with zeroed_columns(model, heads):
        expected = run(model, **inputs)
    with perpend.ablate(model, heads) as ablation:
        found = run(model, **inputs)
    assert ablation.checked == {layer for layer, _ in heads}
    assert ablation.unchecked == ablation.zero_anyway == ()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert (found - plain).abs().max() > 1e-3
    assert torch.equal(run(model, **inputs), plain)


@pytest.mark.parametrize("build", [falcon, plain_gpt, gpt_neo, t5], ids=["falcon", "plain", "gpt_neo", "t5"])
def test_families_without_a_record_and_without_hooks(build: Callable[[], nn.Module]) -> None:
    model, ids, heads = build(), tiny.tokens(), [(0, 1), (1, 0), (1, 3)]
    inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :9]} if build is t5 else {"input_ids": ids}
    if build is plain_gpt:
        inputs = {"tokens": ids}

    def logits() -> torch.Tensor:
        with torch.no_grad():
            out = model(**inputs)
        return getattr(out, "logits", out)

    plain = logits()
    with zeroed_columns(model, heads):
        expected = logits()
    with perpend.ablate(model, heads) as ablation:
        found = logits()
    assert ablation.checked == {0, 1}
    assert ablation.unchecked == ablation.zero_anyway == ()
    torch.testing.assert_close(found, expected, atol=2e-6, rtol=1e-5)
    assert (found - plain).abs().max() > 1e-3
    assert torch.equal(logits(), plain)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "bloom", "qwen3_next", "gpt_oss"])
def test_ablation_holds_while_generating(name: str) -> None:
    model, ids = tiny.build(name), tiny.tokens(2, 10)
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    heads = some_heads(model)
    with zeroed_columns(model, heads):
        expected = model.generate(ids, **options)
    with perpend.ablate(model, heads):
        assert torch.equal(model.generate(ids, **options), expected)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2"])
def test_ablation_in_a_padded_batch_is_the_unpadded_one(name: str) -> None:
    model, ids = tiny.build(name), tiny.tokens(1, 12)
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.long), ids], 1)
    mask = (torch.arange(17) >= 5).long()[None]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with perpend.ablate(model, some_heads(model)):
        alone = run(model, input_ids=ids)
        together = run(model, input_ids=padded, attention_mask=mask, position_ids=positions)[:, 5:]
    torch.testing.assert_close(together, alone, atol=2e-5, rtol=1e-5)


def test_key_value_heads_that_nothing_reads_any_more_are_named() -> None:
    model = tiny.tiny("llama")  # four query heads, two KV heads
    with perpend.ablate(model, [(1, 0), (1, 1), (2, 1), (2, 2)]) as ablation:
        assert ablation.unused_kv_heads == ((1, 0),)


def test_heads_that_were_zero_anyway_are_named() -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[:8] = 0  # KV head 0: query heads 0 and 1
    with perpend.ablate(model, [(1, 0), (1, 2)]) as ablation:
        run(model, **tiny.inputs("llama"))
    assert ablation.zero_anyway == ((1, 0),)
    with torch.no_grad():
        model.model.layers[2].self_attn.o_proj.weight[:, 8:16] = 0  # query head 1
    with perpend.ablate(model, [(2, 1), (2, 2)]) as ablation:
        run(model, **tiny.inputs("llama"))
    assert ablation.zero_anyway == ((2, 1),)


def test_no_heads_is_no_change_and_repeats_count_once() -> None:
    model, inputs = tiny.tiny("llama"), tiny.inputs("llama")
    with perpend.ablate(model, []) as ablation:
        assert torch.equal(run(model, **inputs), run(model, **inputs))
        assert ablation.heads == ()
    with perpend.ablate(model, [(0, 1), (0, 1)]) as ablation:
        assert ablation.heads == ((0, 1),)


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ([(9, 0)], "layers 0 to 2"),
        ([(0, 4)], "heads 0 to 3"),
        ([(-1, 0)], "out of range"),
        ([3], "pair"),
        ([(0.5, 0)], "whole numbers"),
        (["01"], "whole numbers"),
    ],
)
def test_heads_that_are_not_there_are_refused(heads: list, message: str) -> None:
    with pytest.raises(InputError, match=message), perpend.ablate(tiny.tiny("llama"), heads):
        pass


def test_an_aggregate_that_comes_back_is_an_error() -> None:
    model = tiny.build("llama")
    leak = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    try:
        with pytest.raises(PerpendError, match="still reaches"), perpend.ablate(model, [(0, 1)]):
            run(model, **tiny.inputs("llama"))
    finally:
        leak.remove()


def test_an_attention_that_names_its_width_as_it_splits_it() -> None:
    config = transformers.OpenAIGPTConfig(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=4)
    torch.manual_seed(0)
    model, tokens = transformers.OpenAIGPTLMHeadModel(config).eval(), tiny.tokens(2, 12) % 64
    assert {(site.head_dim, site.value_dim) for site in attention_sites(model)} == {(8, 8)}
    with torch.no_grad():
        plain = model(tokens).logits
        with perpend.ablate(model, [(0, 1)]) as ablation:
            without = model(tokens).logits
        model.transformer.h[0].attn.c_proj.weight[8:16] = 0.0
        torch.testing.assert_close(without, model(tokens).logits)
    assert ablation.checked == {0}
    assert not torch.allclose(plain, without)
