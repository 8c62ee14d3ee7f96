"""Edits in value space against an attention written by hand, on every family."""

from __future__ import annotations

import math

import pytest
import torch
from oracle import Oracle, running_on

import perpend
import tiny
from attention_oracle import plain_gpt
from perpend.models.attention import attention_sites

# BLOOM computes its attention by itself; it has a test of its own below. Vision towers and encoders are here
# too.
ROUTED = [name for name in tiny.FAMILIES if name != "bloom"]
# one of each kind of attention; the rest differ in their blocks, which an edit of o does not see
KINDS = {"llama", "gpt2", "gemma2", "gemma3", "gpt_oss", "deepseek_v3", "qwen3_next", "bert", "vit"}
FAMILIES = [name if name in KINDS else pytest.param(name, marks=pytest.mark.slow) for name in ROUTED]
SITES = {"value.full": False, "value.exclude_self": True}
# The own implementation of these rounds its probabilities to fp32 whatever the model's dtype.
ROUNDS_TO_FP32 = {"gemma2", "gpt_oss"}


def logits(model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def as_double(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    inputs = tiny.inputs(name, count=1)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    model = tiny.build(name).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels have no float64
    return model, inputs


@pytest.mark.parametrize("name", FAMILIES)
def test_value_edits_match_the_hand_written_attention(name: str) -> None:
    model, inputs = as_double(name)
    tolerance = 1e-5 if name in ROUNDS_TO_FP32 else 1e-10
    layers = range(len(attention_sites(model)))
    plain = logits(model, **inputs)
    for site, exclude in SITES.items():
        for reference, pair in (("head", (0.0, 1.0)), ("head", (-1.0, 0.25)), ("token", (0.5, 2.0))):
            with running_on(model, Oracle(dict.fromkeys(layers, pair), exclude, reference)):
                expected = logits(model, **inputs)
            with perpend.edit(model, site, *pair, reference=reference):
                found = logits(model, **inputs)
            size = expected.abs().max()
            assert (found - expected).abs().max() < tolerance * size, (site, reference, pair)
            assert (plain - expected).abs().max() > 1e-3 * size


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("reference", ["head", "token"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_fp32_agrees_with_the_float64_oracle(name: str, reference: str, site: str) -> None:
    model, inputs = tiny.build(name), tiny.inputs(name)
    with perpend.edit(model, site, 0.25, 0.5, reference=reference):
        found = logits(model, **inputs)
    model, layers = model.double(), range(len(attention_sites(model)))
    with running_on(model, Oracle(dict.fromkeys(layers, (0.25, 0.5)), SITES[site], reference)):
        expected = logits(model, **inputs)
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()


@pytest.mark.parametrize("site", SITES)
def test_scales_by_layer_and_head(site: str) -> None:
    model, inputs = as_double("llama")
    parallel = torch.linspace(-1, 2, 12).reshape(3, 4)
    by_layer = [0.5, 1.0, 0.0]
    with perpend.edit(model, site, parallel.tolist(), by_layer):
        found = logits(model, **inputs)
    scales = {layer: (parallel[layer], by_layer[layer]) for layer in range(3)}
    with running_on(model, Oracle(scales, SITES[site])):
        expected = logits(model, **inputs)
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


@pytest.mark.parametrize("reference", ["head", "token"])
@pytest.mark.parametrize("site", SITES)
def test_chosen_layers_and_heads(site: str, reference: str) -> None:
    model, inputs = as_double("llama")
    with perpend.edit(model, site, 0.0, 0.5, layers=(0, 2), heads=(1, 2), reference=reference):
        found = logits(model, **inputs)
    ones = torch.ones(4)
    parallel, across = ones.clone(), ones.clone()
    parallel[[1, 2]], across[[1, 2]] = 0.0, 0.5
    with running_on(model, Oracle({0: (parallel, across), 2: (parallel, across)}, SITES[site], reference)):
        expected = logits(model, **inputs)
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


class BloomByHand:
    """BLOOM's attention from its definition: ALiBi slopes, T × T probabilities, the edit before `dense`."""

    def __init__(self, model: torch.nn.Module, oracle: Oracle) -> None:
        self.model, self.oracle, self.heads = model, oracle, model.config.n_head

    def attention(self, module: torch.nn.Module, layer: int):
        def forward(hidden_states, residual, *args, **kwargs):
            batch, length, width = hidden_states.shape
            mixed = module.query_key_value(hidden_states).view(batch, length, self.heads, 3, -1)
            q, k, v = mixed.permute(3, 0, 2, 1, 4)
            slopes = torch.tensor([2 ** (-8 * (h + 1) / self.heads) for h in range(self.heads)])
            scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            scores = scores + slopes.to(scores).view(-1, 1, 1) * torch.arange(length)
            hidden = torch.ones(length, length, dtype=torch.bool).triu(1)
            rows = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            o = rows @ v
            if layer in self.oracle.scales:
                o = self.oracle.edited(o, rows, v, *self.oracle.scales[layer])
            return module.dense(o.transpose(1, 2).reshape(batch, length, width)) + residual, rows

        return forward

    def logits(self, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        blocks = self.model.transformer.h
        for layer, block in enumerate(blocks):
            block.self_attention.forward = self.attention(block.self_attention, layer)
        try:
            return logits(self.model, **inputs)
        finally:
            for block in blocks:
                del block.self_attention.forward


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("reference", ["head", "token"])
def test_bloom(site: str, reference: str) -> None:
    model, inputs = as_double("bloom")
    model.config.dtype = torch.float64
    oracle = Oracle(dict.fromkeys(range(3), (0.0, 0.5)), SITES[site], reference)
    expected = BloomByHand(model, oracle).logits(inputs)
    with perpend.edit(model, site, 0.0, 0.5, reference=reference):
        found = logits(model, **inputs)
    assert (found - expected).abs().max() < 1e-6 * expected.abs().max()  # its softmax is in fp32


def test_a_model_of_ones_own() -> None:
    """A module without transformers: one layer's aggregate by hand."""
    model, ids = plain_gpt().double(), tiny.tokens(1, 12)
    with torch.no_grad(), perpend.edit(model, "value.exclude_self", 0.0, layers=[0]):
        found = model(ids)
    oracle, layer = Oracle({0: (0.0, 1.0)}), model.layers[0]

    def by_hand(x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(1, 12, 4, -1).transpose(1, 2) for part in layer.qkv(x).split(x.shape[-1], dim=2))
        mask = torch.full((12, 12), -torch.inf).triu(1).double()
        o, _ = oracle.attend(layer, q, k, v, mask)
        return layer.proj(o.reshape(1, 12, -1))

    layer.forward = by_hand
    with torch.no_grad():
        expected = model(ids)
    assert (found - expected).abs().max() < 1e-10 * expected.abs().max()


def test_the_first_token_keeps_its_self_message() -> None:
    """Nothing but itself to attend to: c_0 = 0, whatever the scales."""
    model, ids = tiny.tiny("llama"), tiny.tokens(2, 1)
    plain = logits(model, input_ids=ids)
    for pair in ((0.0, 1.0), (5.0, -3.0)):
        with perpend.edit(model, "value.exclude_self", *pair):
            assert torch.allclose(logits(model, input_ids=ids), plain, atol=1e-5)
    with perpend.edit(model, "value.full", 0.0):
        assert not torch.allclose(logits(model, input_ids=ids), plain, atol=1e-2)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("reference", ["head", "token"])
def test_values_of_zero_have_no_parallel_part(site: str, reference: str) -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight[:8] = 0  # KV head 0
    plain = logits(model, **tiny.inputs("llama"))
    with perpend.edit(model, site, 0.0, heads=[0, 1], reference=reference):
        found = logits(model, **tiny.inputs("llama"))
    assert found.isfinite().all()
    torch.testing.assert_close(found, plain)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("site", [*SITES, "residual.attn", "residual.mlp", "residual.block"])
def test_large_values_in_half_precision_stay_finite(site: str, dtype: torch.dtype) -> None:
    """Values near 1e4: a square sum or a product in fp16 (largest number 65504) would overflow."""
    model = tiny.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.mul_(3e3)
            layer.self_attn.o_proj.weight.mul_(1e-3)
    model = model.to(dtype)
    for pair in ((0.0, 1.0), (0.5, 0.5)):
        with perpend.edit(model, site, *pair):
            assert logits(model, **tiny.inputs("llama")).isfinite().all()
