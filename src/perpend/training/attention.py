"""Causal attention that also returns the self weight A_tt, with its gradient.

The fused kernels hand out the log-sum-exp of each row, hence A_tt = exp(scale q_t·k_t − lse_t), without a
T×T matrix; but their log-sum-exp carries no gradient, and autograd says nothing about it. Here the gradient
is put in through the kernel's own backward. With S the scaled scores, g = ∂L/∂o and gamma_t = A_tt ∂L/∂A_tt,

    ∂L/∂S_ts = A_ts (<g_t, v_s> − <g_t, o_t> − gamma_t) + gamma_t [s = t]

The kernel computes A_ts (<g_t, v_s> − <g_t, o_t>) from the g, v and o that it is handed. Handed an o whose
product with g is larger by gamma, o + gamma g / ‖g‖², it computes the first term, exactly and at no further
cost; the second is elementwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perpend.errors import InputError

aten = torch.ops.aten


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The value aggregate and the self weight of causal attention, both differentiable.

    Args:
        query: [B, H, T, d]; key, value: [B, H_kv, T, d] with H a multiple of H_kv. Scale 1/sqrt(d).

    Returns:
        o [B, H, T, d] in the type of `value`, from the kernel that scaled_dot_product_attention uses;
        A_tt [B, H, T] in float32 (float64 for double inputs).

    Raises:
        InputError: on a device or a type whose fused kernel has no log-sum-exp with a backward.
    """
    return _CausalAttention.apply(query, key, value)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        scale = query.shape[-1] ** -0.5
        forward, _ = _kernel(query)
        output, lse, *rest = forward(query, key, value, scale)
        own = _grouped(query, key) * wide(key).unsqueeze(2)
        self_weight = torch.exp(torch.clamp(own.sum(-1).flatten(1, 2) * scale - lse, max=0.0))
        ctx.is_tensor = [torch.is_tensor(r) for r in rest]
        tensors = [r for r in rest if torch.is_tensor(r)]
        ctx.save_for_backward(query, key, value, output, lse, self_weight, *tensors)
        ctx.others = [r for r in rest if not torch.is_tensor(r)]
        ctx.scale = scale
        return output, self_weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_self: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value, output, lse, self_weight, *tensors = ctx.saved_tensors
        tensors, others = iter(tensors), iter(ctx.others)
        rest = [next(tensors if is_tensor else others) for is_tensor in ctx.is_tensor]
        _, backward = _kernel(query)
        gamma = grad_self * self_weight
        grad_output, raised = _raise_product(grad_output, output, gamma.unsqueeze(-1))
        grad_query, grad_key, grad_value = backward(
            grad_output, query, key, value, raised, lse, ctx.scale, *rest
        )
        weight = (gamma * ctx.scale).unflatten(1, (key.shape[1], -1)).unsqueeze(-1)
        grad_query = grad_query + (weight * wide(key).unsqueeze(2)).flatten(1, 2).type_as(query)
        grad_key = grad_key + (weight * _grouped(query, key)).sum(2).type_as(key)
        return grad_query, grad_key, grad_value


def wide(x: Tensor) -> Tensor:
    """At least float32, the precision of every projection here."""
    return x if x.dtype == torch.float64 else x.float()


def _grouped(query: Tensor, key: Tensor) -> Tensor:
    """[B, H, T, d] -> [B, H_kv, H / H_kv, T, d], at least float32."""
    return wide(query).unflatten(1, (key.shape[1], -1))


def _raise_product(grad: Tensor, output: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
    """(grad, output), <grad, output> larger by `gamma` [..., 1] in each row; both in the type of `output`.

    A row of grad that is zero beside its gamma, which no output could raise, gets 1e-12 gamma in its first
    column: what that adds to the gradient of the values is far below rounding.
    """
    g = wide(grad)
    largest, least = g.abs().amax(-1, keepdim=True), 1e-12 * gamma.abs()
    lost = largest < least
    first = (torch.arange(g.shape[-1], device=g.device) == 0).to(g.dtype)
    g = torch.where(lost, least * first, g)
    size = torch.where(lost, least, torch.where(largest > 0, largest, 1.0))
    unit = g / size  # its squares neither overflow nor vanish
    square = (unit * unit).sum(-1, keepdim=True)
    raised = wide(output) + gamma / (size * torch.where(square > 0, square, 1.0)) * unit
    return g.type_as(output), raised.type_as(output)


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple:
    return aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, True, scale=scale)


def _cpu_backward(
    grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor, scale: float
):
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, lse, 0.0, True, scale=scale
    )


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple:
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    out = aten._scaled_dot_product_flash_attention(query, key, value, 0.0, True, False, scale=scale)
    return out[:8]  # output, lse, cum_seq_q and _k (None here), max_q and _k, two of the dropout; then debug


def _cuda_backward(grad, query, key, value, out, lse, scale, cum_q, cum_k, max_q, max_k, seed, offset):
    groups, kv_heads = query.shape[1] // key.shape[1], key.shape[1]
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    grad_query, grad_key, grad_value = aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, cum_q, cum_k, max_q, max_k, 0.0, True, seed, offset, scale=scale
    )
    return grad_query, *(g.unflatten(1, (kv_heads, -1)).sum(2) for g in (grad_key, grad_value))


_KERNELS = {"cpu": (_cpu_forward, _cpu_backward), "cuda": (_cuda_forward, _cuda_backward)}


def _kernel(query: Tensor) -> tuple:
    device = query.device.type
    if device not in _KERNELS:
        raise InputError(
            f"exclude-self training has a kernel with a gradient for A_tt on cpu and cuda, not on {device}; "
            "train there with value-full, residual or baseline"
        )
    if device == "cuda" and (query.dtype != torch.bfloat16 or query.shape[-1] % 8):
        raise InputError(
            "exclude-self training on CUDA needs bfloat16 and a head width divisible by 8; "
            f"got {query.dtype} and {query.shape[-1]}; pass dtype=bfloat16"
        )
    return _KERNELS[device]
