"""Edits of the residual stream against blocks written by hand."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import perpend
import tiny

SITES = ("residual.attn", "residual.mlp", "residual.block")
PAIRS = ((0.0, 1.0), (0.5, -0.5))


def scaled(update: Tensor, z: Tensor, parallel: float, across: float) -> Tensor:
    """s∥ Δ∥ + s⊥ Δ⊥ by one projection matrix per token."""
    square = (z * z).sum(-1)[..., None, None]
    project = z[..., :, None] * z[..., None, :] / torch.where(square == 0, 1.0, square)
    along = (project @ update[..., None])[..., 0]
    return parallel * along + across * (update - along)


@dataclass(frozen=True)
class Hand:
    """The edits of one block by hand: which site, with which scales."""

    site: str
    pair: tuple[float, float]

    def __call__(self, part: str, update: Tensor, z: Tensor) -> Tensor:
        return scaled(update, z, *self.pair) if self.site == f"residual.{part}" else update


def first(out: object) -> Tensor:
    return out if isinstance(out, Tensor) else out[0]


def sequential(norm1: str, attention: str, norm2: str, mlp: str, post1: str = "", post2: str = ""):
    """x + post1(attn(norm1 x)), then + post2(mlp(norm2 mid)); the names of the four or six modules."""

    def block(b: nn.Module, hand: Hand, x: Tensor, kwargs: dict) -> Tensor:
        def of(name: str, value: Tensor) -> Tensor:
            return getattr(b, name)(value) if name else value

        scale = getattr(b, "residual_multiplier", 1.0)
        a = of(post1, first(getattr(b, attention)(hidden_states=of(norm1, x), **kwargs))) * scale
        mid = x + hand("attn", a, x)
        m = of(post2, first(getattr(b, mlp)(of(norm2, mid)))) * scale
        return mid + hand("mlp", m, mid)

    return block


def parallel_block(norm1: str, attention: str, norm2: str, mlp: str):
    def block(b: nn.Module, hand: Hand, x: Tensor, kwargs: dict) -> Tensor:
        h = getattr(b, norm1)(x)
        a = first(getattr(b, attention)(hidden_states=h, **kwargs))
        m = getattr(b, mlp)(getattr(b, norm2)(x))
        return x + hand("attn", a, x) + hand("mlp", m, x)

    return block


def gpt2(b: nn.Module, hand: Hand, x: Tensor, kwargs: dict) -> Tensor:
    keep = {k: v for k, v in kwargs.items() if not k.startswith("encoder")}
    mid = x + hand("attn", first(b.attn(b.ln_1(x), **keep)), x)
    return mid + hand("mlp", b.mlp(b.ln_2(mid)), mid)


def bloom(b: nn.Module, hand: Hand, x: Tensor, kwargs: dict) -> Tensor:
    nothing = torch.zeros_like(x)  # its attention and MLP add the residual themselves
    a = first(b.self_attention(b.input_layernorm(x), nothing, **kwargs))
    mid = x + hand("attn", a, x)
    return mid + hand("mlp", b.mlp(b.post_attention_layernorm(mid), nothing), mid)


def bert(b: nn.Module, hand: Hand, x: Tensor, kwargs: dict) -> Tensor:
    own = b.attention.output
    a = own.dense(first(b.attention.self(x, **kwargs)))
    mid = own.LayerNorm(x + hand("attn", a, x))
    m = b.output.dense(b.intermediate(mid))
    return b.output.LayerNorm(mid + hand("mlp", m, mid))


LLAMA = sequential("input_layernorm", "self_attn", "post_attention_layernorm", "mlp")
SANDWICH = sequential(
    "input_layernorm",
    "self_attn",
    "pre_feedforward_layernorm",
    "mlp",
    "post_attention_layernorm",
    "post_feedforward_layernorm",
)
BY_HAND: dict[str, tuple[str, Callable]] = {
    "llama": ("model.layers", LLAMA),
    "qwen3": ("model.layers", LLAMA),
    "granite": ("model.layers", LLAMA),
    "gemma3": ("model.layers", SANDWICH),
    "olmo2": (
        "model.layers",
        sequential("", "self_attn", "", "mlp", "post_attention_layernorm", "post_feedforward_layernorm"),
    ),
    "phi": ("model.layers", parallel_block("input_layernorm", "self_attn", "input_layernorm", "mlp")),
    "gpt_neox": (
        "gpt_neox.layers",
        parallel_block("input_layernorm", "attention", "post_attention_layernorm", "mlp"),
    ),
    "gpt_neox_sequential": (
        "gpt_neox.layers",
        sequential("input_layernorm", "attention", "post_attention_layernorm", "mlp"),
    ),
    "gpt2": ("transformer.h", gpt2),
    "bloom": ("transformer.h", bloom),
    "bert": ("bert.encoder.layer", bert),
}


def by_hand(model: nn.Module, name: str, hand: Hand, inputs: dict[str, Tensor]) -> Tensor:
    """The model's output with every block's forward written by hand."""
    where, block = BY_HAND[name]
    modules = list(model.get_submodule(where))
    before = [module.__dict__.get("forward") for module in modules]

    def instead(module: nn.Module, own: Callable) -> Callable:
        names = list(inspect.signature(own).parameters)[1:]

        def forward(hidden_states: Tensor, *args: object, **kwargs: object) -> object:
            y = block(module, hand, hidden_states, kwargs | dict(zip(names, args)))
            y = hidden_states + hand("block", y - hidden_states, hidden_states)
            return (y, None) if name == "bloom" else y

        return forward

    for module in modules:
        module.forward = instead(module, module.forward)
    try:
        with torch.no_grad():
            return model(**inputs)[0]
    finally:
        for module, own in zip(modules, before):
            del module.forward
            if own is not None:
                module.forward = own


@pytest.mark.parametrize("name", BY_HAND)
def test_residual_edits_match_blocks_by_hand(name: str) -> None:
    model, inputs = tiny.build(name).double(), tiny.inputs(name, count=1, length=10)
    with torch.no_grad():
        plain = model(**inputs)[0]
    size = plain.abs().max()
    assert (by_hand(model, name, Hand("none", (1, 1)), inputs) - plain).abs().max() < 1e-6 * size
    tolerance = 1e-6 if name == "bloom" else 1e-10  # BLOOM's softmax is in fp32
    for site in SITES:
        for pair in PAIRS:
            expected = by_hand(model, name, Hand(site, pair), inputs)
            with perpend.edit(model, site, *pair), torch.no_grad():
                found = model(**inputs)[0]
            assert (found - expected).abs().max() < tolerance * expected.abs().max(), (site, pair)
            assert (found - plain).abs().max() > 1e-3 * size


def test_residual_scales_by_layer() -> None:
    model, inputs = tiny.tiny("llama"), tiny.inputs("llama")
    with torch.no_grad():
        with perpend.edit(model, "residual.mlp", [1.0, 0.0, 1.0], [1.0, 0.5, 1.0]):
            found = model(**inputs)[0]
        with perpend.edit(model, "residual.mlp", 0.0, 0.5, layers=[1]):
            assert torch.equal(model(**inputs)[0], found)
