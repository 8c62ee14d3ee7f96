"""The records that every hook sees: where an attention layer sits, and one call of it as the model made it.

A hook is a plain function of a call and of the value aggregate that the model's own kernel returned:

    def hook(call: AttentionCall, output: Tensor) -> Tensor | None

`output` is o [B, T, H, d_v], before the output projection. A returned tensor of the same shape and dtype
takes its place; None leaves it. Nothing here knows transformers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

PATHS = ("registry", "adapter", "sdpa", "probabilities")


@dataclass(frozen=True)
class AttentionSite:
    """One self-attention layer of a model.

    `index`: position in `attention_sites(model)`, what users call the layer. `name`: the module's own name.
    `block`: number of the block it sits in (differs from `index` where some blocks have no attention rows).
    `heads`, `kv_heads`, `head_dim`, `value_dim`: sizes. `window`: sliding window in keys, None when the layer
    sees all. `path`: how its calls are seen: `registry` (transformers' attention functions), `adapter` (a
    family's own), `sdpa` (torch's scaled_dot_product_attention), `probabilities` (observed only, T x T rows).
    """

    index: int
    name: str
    block: int
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    window: int | None
    path: str


@dataclass(frozen=True)
class AttentionCall:
    """One attention layer's call, as the model made it.

    query [B, H, T, d] after positions and norms, what the kernel gets; key [B, H_kv, S, d] and value
    [B, H_kv, S, d_v] not repeated over query groups. mask [B|1, H|1, T|1, S] is boolean (True = may attend)
    or additive; `causal` says that row t sees keys up to t + `diagonal`. `softcap` c caps a scaled logit x at
    c·tanh(x/c); `sinks` [H] are learned sink logits that join each row's softmax; `bias` (broadcastable to
    [B, H, T, S]) is added to the logits (ALiBi, relative positions). `padding` [B, S] (True = real key) and
    `rule` (an index function of batch, head, query, key) stand for `mask` in kernels that take no 4-D mask.
    `window` is what the layer says of itself; `enforce_window` that the kernel, not the mask, applies it.
    """

    site: AttentionSite
    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    causal: bool
    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    window: int | None = None
    bias: Tensor | None = None
    padding: Tensor | None = None
    rule: Callable[..., Tensor] | None = None
    diagonal: int = 0
    enforce_window: bool = False
    implementation: str = "sdpa"

    @classmethod
    def of(cls, **fields: Any) -> AttentionCall:
        """A call from its fields without the dataclass setting each: one is made per layer and token."""
        call = object.__new__(cls)
        call.__dict__.update(fields)
        return call

    @property
    def layer(self) -> int:
        """Index in `attention_sites(model)`."""
        return self.site.index

    @property
    def groups(self) -> int:
        """Query heads per key-value head."""
        return self.query.shape[1] // self.key.shape[1]

    @cached_property
    def lse(self) -> Tensor:
        """Log-sum-exp of each row's logits [B, H, T], fp32 or better, learned sinks included.

        Comes with the kernel's output under `attach(need_lse=True)` where the kernel gives it away, and is
        computed on first use otherwise. -inf for a row that sees no key (and has no learned sink).
        """
        from perpend.models.attention.fused import log_sum_exp

        return log_sum_exp(self)

    def with_lse(self, lse: Tensor) -> AttentionCall:
        """The same call, knowing its log-sum-exp."""
        self.__dict__["lse"] = lse
        return self

    def at(self, site: AttentionSite) -> AttentionCall:
        """The same call under another numbering of the sites."""
        if site is self.site:
            return self
        other = dataclasses.replace(self, site=site)
        if "lse" in self.__dict__:
            other.__dict__["lse"] = self.__dict__["lse"]
        return other


Hook = Callable[[AttentionCall, Tensor], "Tensor | None"]
Decode = Callable[[AttentionSite, Tensor, Tensor, Tensor, float, Callable[[], Any]], "Tensor | None"]
"""Kernel and hook of one decoded token in one, since making a call costs as much as all the arithmetic there:
(site, query [B, H, 1, d], key, value [B, H_kv, S, d], scale, run) -> the hook's output [B, 1, H, d_v]; None
to go the long way. Every key is seen, the last is the token's own; `run()[0]` is the model's own output.
"""


@dataclass(frozen=True, eq=False)
class Tap:
    """One hook on one site: what `attach` leaves on a module for as long as its `with` lasts."""

    site: AttentionSite
    hook: Hook
    need_lse: bool = False

    @cached_property
    def decode(self) -> Decode | None:
        """The hook's own short way for a decoded token, `hook.decode`, None where it has none."""
        return getattr(self.hook, "decode", None)


def apply_taps(taps: tuple[Tap, ...], call: AttentionCall, output: Tensor) -> Tensor:
    """Run the hooks of one call, outermost first, each on what the one before left. output [B, T, H, d_v]."""
    for tap in taps:
        changed = tap.hook(call if tap.site is call.site else call.at(tap.site), output)
        if changed is not None:
            if changed.shape != output.shape or changed.dtype != output.dtype:
                raise ValueError(
                    f"a hook on {tap.site.name} returned {_describe(changed)} in place of "
                    f"{_describe(output)}: return o [B, T, H, d_v] with the shape and dtype it came in"
                )
            output = changed
    return output


def _describe(value: Any) -> str:
    return f"{value.dtype} {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__
