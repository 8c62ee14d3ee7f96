"""Hooks on attention layers: every family, bit-identical logits, the call as the kernel reads it."""

from __future__ import annotations

import threading

import pytest
import torch
import transformers
from torch import nn

import perpend
import tiny
from attention_oracle import aggregate, falcon, gpt_neo, padded, plain_gpt, record, t5
from perpend.errors import InputError, PerpendError
from perpend.models.attention import (
    attach,
    attention_sites,
    check_parity,
    patches,
    registry,
    self_weight,
    sites,
    valid_rows,
)


def first_input(name: str) -> torch.Tensor:
    return next(iter(tiny.inputs(name).values()))


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_observing_leaves_the_logits_bit_identical(name: str) -> None:
    model = tiny.tiny(name)
    assert check_parity(model, first_input(name)) == len(attention_sites(model))


@pytest.mark.parametrize(
    "build", [plain_gpt, falcon, lambda: falcon(alibi=True)], ids=["plain", "falcon", "alibi"]
)
def test_models_outside_the_registry_are_seen_through_the_kernel(build) -> None:
    model = build()
    assert {site.path for site in attention_sites(model)} == {"sdpa"}
    assert check_parity(model, tiny.tokens()) == 2
    seen = record(model, tiny.tokens())
    for call, output in zip(seen.calls, seen.outputs):
        assert torch.allclose(output.double(), aggregate(call), atol=1e-5)


@pytest.mark.parametrize("name", tiny.LANGUAGE)
@pytest.mark.parametrize("side", ["none", "left", "right"])
def test_the_call_holds_what_the_kernel_computes_from(name: str, side: str) -> None:
    model = tiny.tiny(name)
    ids, mask, positions = padded(
        tiny.tokens(2, 40), 0 if side == "none" else 7, side if side != "none" else "left"
    )
    extra = {"position_ids": positions} if name in {"gpt2", "bert"} and side == "left" else {}
    if side != "none":
        extra["attention_mask"] = mask
    with torch.no_grad():
        plain = model(ids, **extra)
    seen = record(model, ids, **extra)
    assert torch.equal(plain[0], seen.result[0])
    assert len(seen.calls) == len(seen.sites)
    for call, output in zip(seen.calls, seen.outputs):
        real = valid_rows(call)
        assert torch.equal(real, mask.bool())
        assert torch.allclose(output.double()[real], aggregate(call)[real], atol=2e-5)


@pytest.mark.parametrize("name", tiny.VISION)
def test_image_models(name: str) -> None:
    seen = record(tiny.tiny(name), **tiny.inputs(name))
    assert all(not call.causal and call.mask is None for call in seen.calls)
    for call, output in zip(seen.calls, seen.outputs):
        assert torch.allclose(output.double(), aggregate(call), atol=1e-5)


def test_relative_positions_of_an_encoder_decoder_and_no_cross_attention() -> None:
    model, tokens = t5(), tiny.tokens()
    sites = attention_sites(model)
    assert len(sites) == 4
    assert not any("EncDec" in site.name for site in sites)
    assert check_parity(model, tokens, decoder_input_ids=tokens[:, :9]) == 4
    seen = record(model, input_ids=tokens, decoder_input_ids=tokens[:, :9])
    for call, output in zip(seen.calls, seen.outputs):
        assert call.bias is not None
        assert torch.allclose(output.double(), aggregate(call), atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    model = tiny.build("llama").to(dtype)
    assert check_parity(model, tiny.tokens()) == 3
    seen = record(model, tiny.tokens())
    tolerance = {torch.float16: 5e-3, torch.bfloat16: 4e-2, torch.float64: 1e-12}[dtype]
    for call, output in zip(seen.calls, seen.outputs):
        assert torch.allclose(output.double(), aggregate(call), atol=tolerance)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_the_own_implementation_stays_the_kernel(implementation: str) -> None:
    model = tiny.build("llama")
    model.set_attn_implementation(implementation)
    ids, mask, _ = padded(tiny.tokens(), 5, "right")
    with torch.no_grad():
        plain = model(ids, attention_mask=mask).logits
    seen = record(model, ids, attention_mask=mask)
    assert torch.equal(plain, seen.result.logits)
    assert model.config._attn_implementation == implementation
    for call, output in zip(seen.calls, seen.outputs):
        assert call.implementation == implementation
        real = valid_rows(call)
        assert torch.equal(real, mask.bool())
        assert torch.allclose(output.double()[real], aggregate(call)[real], atol=1e-5)


@pytest.mark.slow
def test_flex_attention_stays_the_kernel_and_its_mask_is_read() -> None:
    model, tokens = tiny.build("llama"), tiny.tokens(2, 128)  # below 128 tokens torch's own CPU kernel errs
    with torch.no_grad():
        reference = record(model, tokens)
        model.set_attn_implementation("flex_attention")
        plain = model(tokens).logits
    seen = record(model, tokens)
    assert torch.equal(plain, seen.result.logits)
    for call, output, other in zip(seen.calls, seen.outputs, reference.calls):
        assert call.implementation == "flex_attention"
        assert call.rule is not None
        assert valid_rows(call).all()
        assert torch.allclose(output.double(), aggregate(other), atol=1e-4)
        assert torch.allclose(self_weight(call), self_weight(other), atol=1e-5)


def test_only_the_decoder_of_a_multimodal_model_unless_its_vision_is_asked_for() -> None:
    model = tiny.tiny("gemma3_multimodal")
    text = attention_sites(model)
    assert len(text) == 4
    assert all("language_model" in site.name for site in text)
    vision = attention_sites(model, tower="vision")
    assert vision
    assert all("vision" in site.name for site in vision)
    assert len(attention_sites(model, tower="all")) == len(text) + len(vision)
    with pytest.raises(InputError, match="tower"):
        attention_sites(model, tower="audio")


@pytest.mark.parametrize(
    "context",
    [
        lambda model: attach(model, lambda call, output: None),
        lambda model: perpend.edit(model, "value.full", 0.0),
        lambda model: perpend.ablate(model, [(0, 1), (1, 2)]),
    ],
    ids=["attach", "edit", "ablate"],
)
def test_a_context_looks_for_the_attention_layers_once(context, monkeypatch) -> None:
    looked: list[nn.Module] = []
    own = sites.attention_modules

    def look(model, tower="text"):
        looked.append(model)
        return own(model, tower)

    monkeypatch.setattr(sites, "attention_modules", look)
    model = tiny.tiny("llama")
    with context(model):
        model(tiny.tokens())
    assert looked == [model]


def test_sites_say_sizes_windows_and_blocks() -> None:
    site = attention_sites(tiny.tiny("gemma3"))[2]
    assert (site.heads, site.kv_heads, site.head_dim, site.window, site.path) == (4, 2, 8, 16, "registry")
    latent = attention_sites(tiny.tiny("deepseek_v3"))[0]
    assert (latent.head_dim, latent.value_dim) == (12, 6)
    assert [site.block for site in attention_sites(tiny.tiny("qwen3_next"))] == [
        1,
        3,
    ]  # the others are linear
    assert {site.path for site in attention_sites(tiny.tiny("bloom"))} == {"adapter"}
    for name in tiny.FAMILIES:
        seen = record(tiny.tiny(name), **tiny.inputs(name))
        for call in seen.calls:
            assert call.query.shape[1::2] == (call.site.heads, call.site.head_dim)
            assert call.key.shape[1] == call.site.kv_heads
            assert call.value.shape[-1] == call.site.value_dim


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "bert", "vit", "falcon"])
def test_a_returned_tensor_replaces_the_aggregate_and_only_in_the_chosen_layers(name: str) -> None:
    model = falcon() if name == "falcon" else tiny.tiny(name)
    given = {"input_ids": tiny.tokens()} if name == "falcon" else tiny.inputs(name)
    with torch.no_grad():
        plain = model(**given)[0]
        with attach(model, lambda call, output: output * 0.5, layers=[1]):
            halved = model(**given)[0]
        with attach(model, lambda call, output: output.clone()):
            same = model(**given)[0]
        after = model(**given)[0]
    assert torch.equal(plain, after)
    assert torch.equal(plain, same)
    assert not torch.allclose(plain, halved)


@pytest.mark.parametrize("name", ["llama", "bloom", "falcon"])
def test_nested_hooks_run_outermost_first(name: str) -> None:
    model = falcon() if name == "falcon" else tiny.tiny(name)
    order: list[str] = []

    def double(call, output):
        order.append("outer")
        return output * 2

    def add(call, output):
        order.append("inner")
        return output + 1

    with torch.no_grad():
        with attach(model, double, layers=[0]), attach(model, add, layers=[0]):
            nested = model(tiny.tokens())[0]
        with attach(model, lambda call, output: output * 2 + 1, layers=[0]):
            together = model(tiny.tokens())[0]
    assert order == ["outer", "inner"]
    assert torch.equal(nested, together)


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "falcon"])
def test_an_exception_restores_the_model(name: str) -> None:
    model = falcon() if name == "falcon" else tiny.tiny(name)
    with torch.no_grad():
        plain = model(tiny.tokens())[0]

        def fail(call, output):
            raise RuntimeError("stop here")

        with pytest.raises(RuntimeError, match="stop here"), attach(model, fail):
            model(tiny.tokens())
        assert torch.equal(plain, model(tiny.tokens())[0])
    assert not patches.installed
    assert not registry._taps
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert transformers.AttentionInterface()["sdpa"].__module__.startswith("transformers.")


def test_another_model_is_not_touched_while_one_is_attached() -> None:
    model, other = tiny.tiny("llama"), tiny.tiny("qwen2")
    seen: list[str] = []
    with torch.no_grad():
        plain = other(tiny.tokens()).logits
        with attach(model, lambda call, output: seen.append(call.site.name)):
            assert torch.equal(other(tiny.tokens()).logits, plain)
    assert not seen


def test_two_threads_with_hooks_of_their_own() -> None:
    models = [tiny.build("llama", seed) for seed in range(2)]
    with torch.no_grad():
        plain = [model(tiny.tokens()).logits for model in models]
    counts, same = [0, 0], [True, True]

    def work(index: int) -> None:
        def look(call, output):
            counts[index] += call.module in set(models[index].modules())

        for _ in range(10):
            with torch.no_grad(), attach(models[index], look):
                same[index] &= torch.equal(models[index](tiny.tokens()).logits, plain[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts == [30, 30]
    assert same == [True, True]


def test_a_hook_that_returns_something_else_is_told() -> None:
    model = tiny.tiny("llama")
    hook = attach(model, lambda call, output: output[:, :1])
    with torch.no_grad(), hook, pytest.raises(ValueError, match="returned"):
        model(tiny.tokens())


def test_layers_that_are_not_there() -> None:
    words = "layer 7 is not there: the model has attention layers 0 to 2"
    with pytest.raises(InputError, match=words), attach(tiny.tiny("llama"), print, layers=[0, 7]):
        pass


def test_probabilities_only_families_say_so() -> None:
    assert {site.path for site in attention_sites(gpt_neo())} == {"probabilities"}
    with (
        pytest.raises(InputError, match="only its probabilities"),
        attach(gpt_neo(), lambda call, output: None),
    ):
        pass
    eager = falcon(attn="eager")
    assert {site.path for site in attention_sites(eager)} == {"probabilities"}


def test_the_fast_path_of_multihead_attention_is_refused_by_name() -> None:
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, batch_first=True), 2).eval()
    with pytest.raises(InputError, match=r"layers\.0\.self_attn is a torch\.nn\.MultiheadAttention"):
        attention_sites(encoder)
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        x, seen = torch.randn(2, 10, 32), []
        with torch.no_grad(), attach(encoder, lambda call, output: seen.append((call, output))):
            encoder(x)
        assert len(seen) == 2
        for call, output in seen:
            assert torch.allclose(output.double(), aggregate(call), atol=1e-5)
        attention = encoder.layers[0].self_attn
        with attach(attention, lambda call, output: None), pytest.raises(InputError, match="need_weights=F"):
            attention(x, x, x, need_weights=True)
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_differential_attention_and_models_without_attention_are_refused() -> None:
    config = transformers.DiffLlamaConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4
    )
    with pytest.raises(InputError, match="differential attention"):
        attention_sites(transformers.DiffLlamaForCausalLM(config))
    with pytest.raises(InputError, match="no self-attention layer"):
        attention_sites(nn.Linear(3, 3))
    upcast = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=4, reorder_and_upcast_attn=True)
    )
    upcast.set_attn_implementation("eager")
    with (
        pytest.raises(InputError, match="reorder_and_upcast_attn"),
        attach(upcast, lambda call, output: None),
    ):
        pass


def test_parity_notices_a_layer_that_does_not_run_and_a_model_that_changes() -> None:
    model = t5()
    with pytest.raises(PerpendError, match="did not run"):
        check_parity(_Half(model), tiny.tokens())
    noisy = tiny.build("llama")
    noisy.lm_head.register_forward_hook(lambda module, args, output: output + torch.rand(()))
    with pytest.raises(PerpendError, match="changes its logits"):
        check_parity(noisy, tiny.tokens())


class _Half(nn.Module):
    """A model that runs its encoder only."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.whole.encoder(tokens).last_hidden_state
