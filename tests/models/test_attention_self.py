"""A_tt and log-sum-exps: from the fused kernel, equal to the eager definition, in prefill and in decoding."""

from __future__ import annotations

import dataclasses
import inspect

import pytest
import torch
import transformers

import tiny
from attention_oracle import falcon, padded, record, t5, weights
from perpend.errors import InputError
from perpend.models.attention import (
    attach,
    fused,
    log_sum_exp,
    own_key_index,
    row_logits,
    self_weight,
    valid_rows,
    visible,
)

TOLERANCE = 2e-6


def diagonal(call) -> torch.Tensor:
    """A_tt in float64 from the definition, [B, H, T]; the own key of the last queries is the last keys."""
    all_weights = weights(call)
    own = own_key_index(call).expand(all_weights.shape[0], -1)
    index = own[:, None, :, None].expand(-1, all_weights.shape[1], -1, 1)
    return all_weights.gather(-1, index)[..., 0]


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_self_weights_of_every_family(name: str) -> None:
    given = tiny.inputs(name, length=40)
    model = tiny.tiny(name)
    with torch.no_grad():
        plain = model(**given)[0]
    seen = record(model, **given, attach_options={"need_lse": True})
    assert torch.equal(plain, seen.result[0])
    for call in seen.calls:
        assert ("lse" in vars(call)) == (call.site.path == "registry")
        assert torch.allclose(self_weight(call).double(), diagonal(call), atol=TOLERANCE)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "bloom", "bert"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_weigh_nothing_and_real_ones_are_right(name: str, side: str) -> None:
    ids, mask, positions = padded(tiny.tokens(2, 40), 7, side)
    extra = {"position_ids": positions} if name == "bert" else {}
    seen = record(tiny.tiny(name), ids, attention_mask=mask, **extra, attach_options={"need_lse": True})
    for call in seen.calls:
        weight = self_weight(call)
        assert torch.equal(weight[0, :, ~mask[0].bool()], torch.zeros_like(weight[0, :, ~mask[0].bool()]))
        real = mask[:, None].bool().expand_as(weight)
        assert torch.allclose(weight.double()[real], diagonal(call)[real], atol=TOLERANCE)
        assert weight.max() <= 1.0


def test_other_models_and_dtypes() -> None:
    runs = [
        record(falcon(), tiny.tokens()),
        record(falcon(alibi=True), tiny.tokens()),
        record(t5(), input_ids=tiny.tokens(), decoder_input_ids=tiny.tokens()[:, :9]),
        record(tiny.build("llama").to(torch.bfloat16), tiny.tokens()),
        record(tiny.build("llama").to(torch.float16), tiny.tokens()),
    ]
    for seen in runs:
        for call in seen.calls:
            weight = self_weight(call)
            assert weight.dtype == torch.float32
            half = call.query.dtype != torch.float32  # the kernel's own log-sum-exp is coarser there
            assert torch.allclose(weight.double(), diagonal(call), atol=1e-3 if half else TOLERANCE)
    double = record(tiny.build("llama").double(), tiny.tokens())
    for call in double.calls:
        assert torch.allclose(self_weight(call), diagonal(call), atol=1e-12)


def steps(model, ids: torch.Tensor, mask: torch.Tensor, cut: list[int], static: bool) -> list[torch.Tensor]:
    """A_tt per layer [B, H, T] of a run in pieces with a cache."""
    cache = (
        transformers.StaticCache(config=model.config, max_cache_len=ids.shape[1] + 8)
        if static
        else transformers.DynamicCache(config=model.config)
    )
    parts: dict[int, list[torch.Tensor]] = {}
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"

    def look(call, output):
        parts.setdefault(call.layer, []).append(self_weight(call))

    with torch.no_grad(), attach(model, look, need_lse=True):
        for start, end in zip([0, *cut], [*cut, ids.shape[1]]):
            model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                **{name: cache},
                position_ids=(mask.cumsum(-1) - 1).clamp(min=0)[:, start:end],
            )
    return [torch.cat(parts[layer], -1) for layer in sorted(parts)]


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gemma3", "gpt_oss", "gpt2", "qwen3_next"])
@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("left", [0, 5])
def test_decoding_and_chunked_prefill_agree_with_one_pass(name: str, static: bool, left: int) -> None:
    if static and name == "qwen3_next":
        pytest.skip("linear-attention layers have no static cache")
    model = tiny.tiny(name)
    ids, mask, positions = padded(tiny.tokens(2, 30), left, "left") if left else (*_whole(), None)
    with torch.no_grad():
        one = [
            self_weight(call)
            for call in record(model, ids, attention_mask=mask, position_ids=positions).calls
        ]
    pieces = steps(model, ids, mask, [10, 20, 21, 22], static)
    for whole, cut in zip(one, pieces):
        assert torch.allclose(whole, cut, atol=3e-6)


def _whole() -> tuple[torch.Tensor, torch.Tensor]:
    ids = tiny.tokens(2, 30)
    return ids, torch.ones_like(ids)


def like_flash(module, query, key, value, attention_mask, scaling=None, sliding_window=None, **kwargs):
    """What flash attention computes, on a CPU: causal from the lower right, [B, S] padding, its window."""
    if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
        key, value = key[:, :, : attention_mask.shape[-1]], value[:, :, : attention_mask.shape[-1]]
    length, seen = query.shape[2], key.shape[2]
    distance = torch.arange(length)[:, None] + (seen - length) - torch.arange(seen)[None, :]
    mask = (distance >= 0) & (distance < (sliding_window or seen + 1))
    mask = mask.expand(query.shape[0], 1, length, seen)
    if attention_mask is not None:
        mask = mask & attention_mask[:, None, None, -seen:].bool()
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scaling, enable_gqa=True
    )
    return output.transpose(1, 2).contiguous(), None


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("side", ["whole", "left", "right"])
def test_masks_of_flash_attention_are_read_as_its_kernel_does(name: str, side: str, monkeypatch) -> None:
    """The kernel itself needs a GPU; its conventions do not."""
    interface = transformers.AttentionInterface
    monkeypatch.setitem(interface._global_mapping, "flash_attention_2", like_flash)
    ids, mask, positions = padded(tiny.tokens(2, 30), 5, side) if side != "whole" else (*_whole(), None)
    reference = record(tiny.tiny(name), ids, attention_mask=mask, position_ids=positions)
    model = tiny.build(name)
    model.config._attn_implementation_internal = "flash_attention_2"
    seen = record(model, ids, attention_mask=mask, position_ids=positions)
    real = mask.bool()
    assert torch.allclose(seen.result.logits[real], reference.result.logits[real], atol=1e-4)
    for call, other in zip(seen.calls, reference.calls):
        assert call.implementation == "flash_attention_2"
        assert call.mask is None
        assert torch.equal(valid_rows(call), real)
        chosen = real[:, None].expand(-1, 4, -1)
        assert torch.allclose(self_weight(call)[chosen], self_weight(other)[chosen], atol=1e-5)
        assert torch.equal(own_key_index(call), own_key_index(other))
    if side != "right":
        for static in (False, True):
            for cut, one in zip(steps(model, ids, mask, [10, 20, 21], static), reference.calls):
                assert torch.allclose(cut[chosen], self_weight(one)[chosen], atol=3e-6)


def test_one_kernel_call_gives_output_and_lse(monkeypatch) -> None:
    model = tiny.tiny("llama")
    record(model, tiny.tokens(), attach_options={"need_lse": True})  # the kind of call is compared once
    calls = []
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or own(*a, **k)
    )
    record(model, tiny.tokens(), attach_options={"need_lse": True})
    assert not calls
    record(model, tiny.tokens())
    assert len(calls) == 3


def test_a_kernel_that_does_not_agree_is_not_used(monkeypatch) -> None:
    model = tiny.tiny("llama")
    monkeypatch.setattr(fused, "_agrees", {})
    real = fused._cpu_kernel
    monkeypatch.setattr(
        fused, "_cpu_kernel", lambda call, value: (real(call, value)[0] + 1e-3, real(call, value)[1])
    )
    with torch.no_grad():
        plain = model(tiny.tokens()).logits
    for _ in range(2):
        assert torch.equal(
            plain, record(model, tiny.tokens(), attach_options={"need_lse": True}).result.logits
        )
    assert set(fused._agrees.values()) == {False}


def test_gradients_flow_through_the_output_and_not_through_the_lse() -> None:
    model, tokens = tiny.build("llama"), tiny.tokens()
    model(tokens).logits.square().sum().backward()
    plain = model.model.layers[0].self_attn.q_proj.weight.grad.clone()
    model.zero_grad()

    def look(call, output):
        assert not self_weight(call).requires_grad

    for _ in range(2):
        model.zero_grad()
        with attach(model, look, need_lse=True):
            model(tokens).logits.square().sum().backward()
        assert torch.equal(plain, model.model.layers[0].self_attn.q_proj.weight.grad)


def test_blocks_of_queries_equal_the_kernel() -> None:
    for name in ("llama", "deepseek_v3", "gpt_oss", "mistral"):
        for call in record(tiny.tiny(name), tiny.tokens(2, 40)).calls:
            blocks = fused.by_blocks(dataclasses.replace(call, sinks=None))
            assert torch.allclose(log_sum_exp(dataclasses.replace(call, sinks=None)), blocks, atol=1e-5)


def test_parts_of_rows_and_keys_equal_the_whole() -> None:
    for name in ("llama", "mistral", "gemma2", "bloom"):
        for call in record(tiny.tiny(name), tiny.tokens(2, 40)).calls:
            whole, seen = row_logits(call), visible(call)
            assert torch.equal(whole.isfinite(), seen.expand_as(whole))
            assert torch.allclose(
                whole[..., 20:30, :8], row_logits(call, slice(20, 30), slice(0, 8)), atol=1e-5
            )
            picked = torch.tensor([3, 39])
            assert torch.allclose(whole[..., picked, :], row_logits(call, picked), atol=1e-5)


def test_which_key_is_its_own_is_refused_where_nothing_says() -> None:
    call = record(tiny.tiny("vit"), **tiny.inputs("vit")).calls[0]
    prefix = dataclasses.replace(
        call, key=torch.cat([call.key, call.key], 2), value=torch.cat([call.value] * 2, 2)
    )
    with pytest.raises(InputError, match="not defined"):
        own_key_index(prefix)
    length = call.query.shape[2]
    with pytest.raises(InputError, match="fewer keys"):
        own_key_index(dataclasses.replace(call, key=call.key[:, :, : length - 1]))
    scattered = torch.rand(1, 1, length, 2 * length, generator=torch.Generator().manual_seed(0)) > 0.5
    with pytest.raises(InputError, match="cannot tell"):
        own_key_index(dataclasses.replace(prefix, mask=scattered))


def test_images_that_attend_both_ways_keep_their_own_key() -> None:
    call = record(tiny.tiny("llama"), tiny.tokens(2, 8)).calls[0]
    mask = torch.ones(8, 12, dtype=torch.bool).tril(4)
    mask[1:4, 5:8] = True  # three queries of one image, in the second chunk of a prefill
    chunk = dataclasses.replace(
        call,
        key=torch.cat([call.key, call.key[:, :, :4]], 2),
        value=torch.cat([call.value, call.value[:, :, :4]], 2),
        mask=mask[None, None],
        causal=False,
    )
    assert own_key_index(chunk).tolist() == list(range(4, 12))
    assert valid_rows(chunk).all()
