"""What each variant of pretraining changes, as a function applied to a finished `Decoder` from outside.

With o_t = sum_{s<=t} A_ts v_s the aggregate of one head, v_t its own value (of its key-value head, so the
reference is per head), beta = <o, v> / |v|^2 its coefficient along v_t, and s the scale of the parallel part,
the full-aggregate edit and the exclude-self edit (c_t = o_t − A_tt v_t is edited, A_tt v_t added back) are

    y_t = o_t − (1 − s) (beta_t − a_t) v_t        a_t = 0: full;   a_t = A_tt: exclude-self

because A_tt v_t is along v_t itself. `residual` is z + Delta_perp, each update against
the stream it is added to.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name
from perpend.training.attention import causal_attention, wide
from perpend.training.model import Add, Decoder, Mix


class AddAcross(Add):
    """z + Delta_perp: what an update has along the stream is left out. Computed in float32 or better."""

    def forward(self, stream: Tensor, update: Tensor) -> Tensor:
        z, delta = wide(stream), wide(update)
        along = (delta * z).sum(-1, keepdim=True) / _nonzero((z * z).sum(-1, keepdim=True))
        return (z + (delta - along * z)).type_as(stream)


class MixScaled(Mix):
    """The aggregate, its part along the token's own value scaled by `scale`, or by 0 where none is given."""

    def __init__(self, *, exclude_self: bool, scale: nn.Module | None = None) -> None:
        super().__init__()
        self.exclude_self = exclude_self
        self.scale = scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, x: Tensor) -> Tensor:
        if self.exclude_self:
            output, own = causal_attention(query, key, value.type_as(query))
        else:
            output, own = super().forward(query, key, value, x), 0.0
        grouped = output.unflatten(1, (value.shape[1], -1))
        v = wide(value).unsqueeze(2)
        beta = (wide(grouped) * v).sum(-1) / _nonzero((v * v).sum(-1))
        removed = beta.flatten(1, 2) - own
        if self.scale is not None:
            removed = removed * (1 - self.scale(x))
        part = removed.unflatten(1, (value.shape[1], -1)).unsqueeze(-1) * v
        return (wide(grouped) - part).flatten(1, 2).type_as(output)


class Gate(nn.Module):
    """s = sigmoid(w x) per token (heads = 1) or per token and head; w starts at zero, so s at one half."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(heads, dim))

    def forward(self, x: Tensor) -> Tensor:
        """x [B, T, dim] -> s [B, heads, T], float32."""
        return torch.sigmoid(wide(F.linear(x, self.weight.to(x.dtype)))).transpose(1, 2)


def _nonzero(square: Tensor) -> Tensor:
    """A zero reference gets a zero parallel part: its coefficient is 0/1, and the vector is zero anyway."""
    return torch.where(square == 0, torch.ones_like(square), square)


def _baseline(model: Decoder) -> None:
    """Nothing changed."""


def _residual(model: Decoder) -> None:
    """Attention and MLP updates keep only what is across the stream they are added to."""
    for block in model.blocks:
        block.add = AddAcross()


def _value(model: Decoder, *, exclude_self: bool, gate: str | None = None) -> None:
    """The aggregate's part along the token's own value is left out, or scaled by a learned gate."""
    heads = {None: 0, "token": 1, "head": model.shape.heads}[gate]
    for block in model.blocks:
        scale = Gate(model.shape.dim, heads).to(model.embedding.weight.device) if heads else None
        block.attention.mix = MixScaled(exclude_self=exclude_self, scale=scale)


VARIANTS: dict[str, Callable[[Decoder], None]] = {
    "baseline": _baseline,
    "residual": _residual,
    "value-full": partial(_value, exclude_self=False),
    "value-exclude-self": partial(_value, exclude_self=True),
    "value-gate": partial(_value, exclude_self=True, gate="token"),
    "value-gate-head": partial(_value, exclude_self=True, gate="head"),
    "value-full-gate": partial(_value, exclude_self=False, gate="token"),
    "value-full-gate-head": partial(_value, exclude_self=False, gate="head"),
}


def apply_variant(model: Decoder, name: str) -> Decoder:
    """Turns a fresh baseline into the named variant, in place, and leaves its weights as they are.

    Raises:
        InputError: an unknown name, or a model that is a variant already.
    """
    if name not in VARIANTS:
        raise unknown_name("variant", name, VARIANTS)
    if model.variant != "baseline":
        raise InputError(
            f"the model is {model.variant!r} already; build a fresh one and apply {name!r} to that"
        )
    VARIANTS[name](model)
    model.variant = name
    return model
