"""The arithmetic of an edit: projections in fp32 or better, and no copy of what the edit leaves alone.

With y = c = o − A_tt v, or y = o and A_tt = 0 for the full aggregate, an edit in value space is

    o' = s⊥ o + [(s∥ − s⊥) α + (1 − s⊥) A_tt] v,      α = ⟨y, v⟩/‖v‖² = ⟨o, v⟩/‖v‖² − A_tt

one number per row and head times the value itself. The values are neither normalised nor repeated over query
heads, and the one tensor as large as o that the product needs becomes the result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perpend.models.attention import AttentionCall, own_key_index
from perpend.progress import note


def scale_parts(
    update: Tensor, reference: Tensor, parallel: float | Tensor, perpendicular: float | Tensor
) -> Tensor:
    """s∥·Δ∥ + s⊥·Δ⊥ over the last axis, in fp32 (float64 stays), returned in the dtype of `update`."""
    y = _wide(update)
    z = reference if reference.dtype is y.dtype else reference.to(y.dtype)
    product = y * z
    weight, change = _quotient(product, z), parallel - perpendicular
    if isinstance(change, Tensor):
        weight, change = weight * change, 1.0
    scaled = _scaled(y, perpendicular, weight, z, product, change)
    return scaled if y is update else scaled.to(update.dtype)


def coefficient_along(y: Tensor, z: Tensor) -> Tensor:
    """⟨y, z⟩/‖z‖² over the last axis (kept); 0 where z = 0."""
    return _quotient(y * z, z)


def _wide(tensor: Tensor) -> Tensor:
    """A tensor in fp32 or better."""
    return tensor if tensor.dtype in _WIDE else tensor.float()


def _quotient(product: Tensor, z: Tensor) -> Tensor:
    """Σ product / ‖z‖² over the last axis (kept), `product` being y·z; 0 where z = 0. Uses `product` up."""
    dot = product.sum(-1, keepdim=True)
    square = torch.mul(z, z, out=_room(product, z)).sum(-1, keepdim=True)
    return dot.div_(square.clamp_(min=_TINY[z.dtype]))


def _room(product: Tensor, like: Tensor, *others: float | Tensor) -> Tensor | None:
    """A tensor whose numbers are used up, for a result of another's size, to which `others` go too.

    None where it is still needed: where one of them has a gradient.
    """
    given = (product, *others)
    tracked = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in given)
    return None if tracked or product.shape != like.shape or torch.compiler.is_compiling() else product


def _scaled(
    y: Tensor,
    perpendicular: float | Tensor,
    weight: Tensor,
    z: Tensor,
    product: Tensor,
    change: float = 1.0,
) -> Tensor:
    """s⊥ y + change · weight · z, in the room of `product`, a tensor of the size of y that is used up."""
    room = _room(product, y, weight, perpendicular)
    if not isinstance(perpendicular, float) or perpendicular != 1.0:
        y = torch.mul(y, torch.as_tensor(perpendicular, dtype=y.dtype, device=y.device), out=room)
    return torch.addcmul(y, weight, z, value=change, out=room)


def own_value(call: AttentionCall) -> Tensor:
    """Each query's own value by KV head, v_t [B, T, H_kv, d_v] (a view where no mask is involved)."""
    value, length = call.value, call.query.shape[2]
    if value.shape[2] == length:
        return value.transpose(1, 2)
    if length == 1 and call.mask is None and call.rule is None and call.padding is None:
        return value[:, :, -1:].transpose(1, 2)
    own = own_key_index(call)
    if own.ndim == 2:
        index = own[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[3])
        value = value.expand(len(own), -1, -1, -1).gather(2, index)
    elif value.shape[2] != len(own):
        value = value.index_select(2, own)
    return value.transpose(1, 2)


def value_coefficient(
    output: Tensor, value: Tensor, self_mass: Tensor | None, reference: str = "head"
) -> Tensor:
    """α of the aggregate against the own value, [B, T, H] in fp32 or better; 0 where the value is 0.

    `output` o [B, T, H, d_v]; `value` v [B, T, H_kv, d_v]; `self_mass` A_tt [B, T, H], or None for the full
    aggregate: since c = o − A_tt v, ⟨c, v⟩/‖v‖² = ⟨o, v⟩/‖v‖² − A_tt. Under `token` both products are summed
    over heads first, and every head gets the common α.
    """
    o, v = _grouped(output, value)
    square = (v * v).sum(-1, keepdim=True)  # [B, T, H_kv, 1, 1]
    if reference == "token":
        square = square.sum(2, keepdim=True).expand_as(square)
    along = _along((o * v).sum(-1, keepdim=True), square, _by_group(self_mass, value), reference, v)
    return along.masked_fill(square == 0, 0.0).flatten(2)


def scale_aggregate(
    output: Tensor,
    value: Tensor,
    self_mass: Tensor | None,
    parallel: float | Tensor,
    perpendicular: float | Tensor,
    reference: str = "head",
) -> Tensor:
    """The edited aggregate o' [B, T, H, d_v] in the dtype of o; arguments as in `value_coefficient`.

    `parallel`, `perpendicular`: s∥ and s⊥, numbers or tensors [H].
    """
    o, v = _grouped(output, value)
    groups = o.shape[3]
    parallel, perpendicular = (
        s.to(o.dtype).unflatten(0, (-1, groups))[..., None] if isinstance(s, Tensor) and s.ndim else s
        for s in (parallel, perpendicular)
    )  # [H_kv, groups, 1], against [B, T, H_kv, groups, 1]
    product = o * v
    square = (v * v).sum(-1, keepdim=True)
    mass = _by_group(self_mass, value)
    along = _along(product.sum(-1, keepdim=True), square, mass, reference, v)
    weight = (parallel - perpendicular) * along
    if mass is not None and not (isinstance(perpendicular, float) and perpendicular == 1.0):
        weight = weight + (1.0 - perpendicular) * mass
    return _scaled(o, perpendicular, weight, v, product).flatten(2, 3).to(output.dtype)


def _grouped(output: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """o [B, T, H_kv, groups, d_v] and v [B, T, H_kv, 1, d_v], views in fp32 or better."""
    o, heads = _wide(output), value.shape[2]
    return o.unflatten(2, (heads, o.shape[2] // heads)), value.to(o.dtype).unsqueeze(3)


def _by_group(self_mass: Tensor | None, value: Tensor) -> Tensor | None:
    """A_tt [B, T, H] as [B, T, H_kv, groups, 1]."""
    return None if self_mass is None else self_mass.unflatten(2, (value.shape[2], -1)).unsqueeze(-1)


def _along(dot: Tensor, square: Tensor, mass: Tensor | None, reference: str, v: Tensor) -> Tensor:
    """α [B, T, H_kv, groups, 1] of ⟨o, v⟩ and ‖v‖²; where v = 0 it is finite, and multiplies 0."""
    if reference == "token":
        own = (v * v).sum(-1, keepdim=True)
        if mass is not None:
            dot = dot - mass * own
        total = (dot.shape[3] * own.sum((2, 3), keepdim=True)).clamp(min=_TINY[dot.dtype])
        return (dot.sum((2, 3), keepdim=True) / total).expand_as(dot)
    along = dot / square.clamp(min=_TINY[dot.dtype])
    return along if mass is None else along - mass


def is_step(
    call: AttentionCall,
    output: Tensor,
    parallel: float | Tensor,
    perpendicular: float | Tensor,
    reference: str,
) -> bool:
    """Whether a call is one token of plain decoding, where every operation costs more than its arithmetic."""
    return (
        output.shape[1] == 1
        and call.mask is None
        and call.padding is None
        and call.rule is None
        and call.bias is None
        and call.softcap is None
        and reference == "head"
        and isinstance(parallel, float)
        and perpendicular.__class__ is float
        and perpendicular == 1.0
        and output.dtype in _WIDE
        and call.query.dtype is output.dtype
        and call.key.dtype is output.dtype
        and not torch.is_grad_enabled()
    )


def step(
    output: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lse: Tensor | None,
    scale: float,
    parallel: float,
) -> Tensor:
    """o − (1 − s∥) α v [B, 1, H, d_v] of one token a sequence, whose own key and value are the last.

    `output` [B, 1, H, d_v] or [B, H, 1, d_v]; `lse` [B, H, 1] for exclude-self, None for the full aggregate.
    v = 0 adds nothing. Few operations and no reshaped copies: each costs more than its arithmetic here.
    """
    batch, kv, seen, width = value.shape
    heads, last, rows = query.shape[1], seen - 1, batch * kv
    v = value.select(2, last).reshape(rows, 1, width)
    o = output.reshape(rows, -1, width)  # [B H_kv, groups, d_v]
    dot = (o * v).sum(-1, True)
    square = (v * v).sum(-1, True).clamp_(min=_TINY[v.dtype])
    if lse is None:
        weight = dot.div_(square).mul_(parallel - 1.0)
    else:
        q, k = query.reshape(rows, heads // kv, -1), key.select(2, last).reshape(rows, -1, 1)
        lse = lse.reshape(rows, -1, 1)
        weight = torch.baddbmm(lse, q, k, beta=-1.0, alpha=scale).exp_()  # A_tt = exp(scale q·k - lse)
        weight.addcdiv_(dot, square, value=-1)
        if parallel != 0.0:
            weight.mul_(1.0 - parallel)
    return torch.addcmul(o, weight, v).view(batch, 1, heads, width)


_WIDE = (torch.float32, torch.float64)
_TINY = {dtype: torch.finfo(dtype).tiny for dtype in (*_WIDE, torch.float16, torch.bfloat16)}


@functools.cache
def compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` through torch.compile, or as it is where this machine cannot compile, which is said once."""
    made = torch.compile(function, dynamic=True)
    broken = False

    def run(*args: Any) -> Tensor:
        nonlocal broken
        if not broken:
            try:
                return made(*args)
            except torch._dynamo.exc.TorchDynamoException as problem:
                broken = True
                first = (
                    str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
                )
                note(
                    f"torch.compile does not work here ({first}); edits run uncompiled, with the same result"
                )
        return function(*args)

    return run
