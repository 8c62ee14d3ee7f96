"""A GPT-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU. One file, no switches.

`Block.forward` is the layer's equation. Two places of it are objects that a finished model can have replaced
from outside, and `variants.py` replaces nothing else:

    attention.mix    (query, key, value, x) -> o    the value aggregate o_t = sum_{s<=t} A_ts v_s, before W_O
    block.add        (stream, update) -> stream     the residual addition z + Delta

Weights, rotation and norms follow Llama's conventions, so that `export.py` writes them out by renaming alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name


@dataclass(frozen=True)
class Shape:
    """The sizes of a decoder; `hidden` is the SwiGLU's width, `tied` shares the embedding with the output."""

    layers: int
    dim: int
    heads: int
    kv_heads: int
    hidden: int
    vocab: int = 50304
    context: int = 2048
    tied: bool = False
    rope_base: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % self.heads or (self.dim // self.heads) % 2:
            raise InputError(f"dim {self.dim} must be an even multiple of heads {self.heads}")
        if self.heads % self.kv_heads:
            raise InputError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    def parameters(self) -> int:
        """The number of parameters, by the formula; the tests hold it against the built model."""
        attention = 2 * self.dim**2 + 2 * self.dim * self.kv_heads * self.head_dim
        layer = attention + 3 * self.dim * self.hidden + 2 * self.dim
        return self.layers * layer + self.dim + (1 if self.tied else 2) * self.vocab * self.dim


# The paper gives the parameter counts, and layers, width and heads of the two largest only. Chosen here so
# that the counts come out: GPT-2's vocabulary padded to 50304, an untied output, 4 query heads to a key-value
# head everywhere, and a SwiGLU of three times the width (a little wider where the count asks for it).
SIZES: dict[str, Shape] = {
    "tiny": Shape(layers=2, dim=32, heads=4, kv_heads=2, hidden=64, vocab=256, context=64, tied=True),
    "toy": Shape(layers=4, dim=64, heads=4, kv_heads=2, hidden=192, vocab=1024, context=256, tied=True),
    "mini": Shape(layers=6, dim=128, heads=8, kv_heads=4, hidden=384, vocab=4096, context=256, tied=True),
    "small": Shape(layers=8, dim=384, heads=6, kv_heads=2, hidden=1152, vocab=8192, context=512, tied=True),
    "296M": Shape(layers=16, dim=1024, heads=16, kv_heads=4, hidden=3072),
    "436M": Shape(layers=24, dim=1024, heads=16, kv_heads=4, hidden=3664),
    "528M": Shape(layers=20, dim=1280, heads=20, kv_heads=5, hidden=4128),
    "1.4B": Shape(layers=24, dim=2048, heads=16, kv_heads=4, hidden=6144),
    "2.7B": Shape(layers=32, dim=2560, heads=32, kv_heads=8, hidden=7680),
}


def shape(size: str, **changes: int | bool | float) -> Shape:
    """The `Shape` named `size`, with some of its fields changed (`vocab=`, `context=`, ...)."""
    if size not in SIZES:
        raise unknown_name("size", size, SIZES)
    return replace(SIZES[size], **changes)


class Rotary(nn.Module):
    """Rotary positions in Llama's layout: the first half of a head is rotated against the second."""

    def __init__(self, head_dim: int, context: int, base: float) -> None:
        super().__init__()
        frequency = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
        angle = torch.outer(torch.arange(context, dtype=torch.float32), frequency)
        self.register_buffer("cos", torch.cat([angle.cos(), angle.cos()], -1), persistent=False)
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()], -1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Rotates `x` [B, H, T, d] by its positions 0..T-1."""
        length = x.shape[-2]
        swapped = torch.cat(x.chunk(2, -1)[::-1], -1)
        return (x * self.cos[:length] + swapped * self.sin[:length]).type_as(x)


class Mix(nn.Module):
    """The plain value aggregate, by the fused causal kernel."""

    # what a survey of a running training asks of the module that calls the kernel; set by Attention
    num_heads: int
    num_key_value_heads: int
    head_dim: int

    def forward(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor) -> Tensor:
        """query [B, H, T, d]; key, value [B, H_kv, T, d]; x the normalised input -> [B, H, T, d]."""
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width = shape.kv_heads * shape.head_dim
        self.head_dim = shape.head_dim
        self.query = nn.Linear(shape.dim, shape.dim, bias=False)
        self.key = nn.Linear(shape.dim, width, bias=False)
        self.value = nn.Linear(shape.dim, width, bias=False)
        self.out = nn.Linear(shape.dim, shape.dim, bias=False)
        self.mix = Mix()
        self.mix.num_heads, self.mix.num_key_value_heads = shape.dim // shape.head_dim, shape.kv_heads
        self.mix.head_dim = shape.head_dim

    def heads(self, x: Tensor) -> Tensor:
        """[B, T, H * d] -> [B, H, T, d]."""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, x: Tensor, rotate: Rotary) -> Tensor:
        query, key = rotate(self.heads(self.query(x))), rotate(self.heads(self.key(x)))
        aggregate = self.mix(query, key, self.heads(self.value(x)), x)
        return self.out(aggregate.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.up = nn.Linear(shape.dim, shape.hidden, bias=False)
        self.down = nn.Linear(shape.hidden, shape.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Add(nn.Module):
    """The plain residual addition."""

    def forward(self, stream: Tensor, update: Tensor) -> Tensor:
        return stream + update


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.attention = Attention(shape)
        self.mlp_norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.mlp = SwiGLU(shape)
        self.add = Add()

    def forward(self, z: Tensor, rotate: Rotary) -> Tensor:
        z = self.add(z, self.attention(self.attention_norm(z), rotate))
        return self.add(z, self.mlp(self.mlp_norm(z)))


class Decoder(nn.Module):
    """Tokens [B, T] -> logits [B, T, vocab].

    Initialised as GPT-2 is, at any width: normal with sd 0.02 sqrt(1024 / dim), the two projections into the
    stream sd / sqrt(2 layers). With 0.02 itself a narrow baseline sits on a plateau at first, which a variant
    leaves sooner: a comparison of initial scales rather than of variants.
    The same seed gives the same weights whatever variant is applied afterwards, so that runs can be paired.
    """

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.variant = "baseline"
        self.embedding = nn.Embedding(shape.vocab, shape.dim)
        self.rotary = Rotary(shape.head_dim, shape.context, shape.rope_base)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.dim, eps=shape.norm_eps)
        self.unembedding = nn.Linear(shape.dim, shape.vocab, bias=False)
        if shape.tied:
            self.unembedding.weight = self.embedding.weight
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draws the initial weights from torch's generator."""
        plain = 0.02 * math.sqrt(1024 / self.shape.dim)
        into_stream = plain / math.sqrt(2 * self.shape.layers)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                sd = into_stream if name.endswith(("out.weight", "down.weight")) else plain
                nn.init.normal_(parameter, std=sd)

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.shape[1] > self.shape.context:
            raise InputError(f"{tokens.shape[1]} tokens exceed the model's context of {self.shape.context}")
        z = self.embedding(tokens)
        for block in self.blocks:
            z = block(z, self.rotary)
        return self.unembedding(self.norm(z))


def build(size: str | Shape, *, seed: int = 0, **changes: int | bool | float) -> Decoder:
    """A freshly initialised decoder of a named size (see `SIZES`) or a `Shape`, weights drawn from `seed`."""
    wanted = shape(size, **changes) if isinstance(size, str) else replace(size, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Decoder(wanted)
