"""A_tt and log-sum-exps from the fused kernels: one pass of the kernel that the model runs anyway.

torch's kernels return the log-sum-exp of each row beside their output, but not through
`scaled_dot_product_attention`. `output_and_lse` calls the kernel behind it, and uses its output in place of
the model's only where the two were seen to be bit-identical for that kind of call; else the log-sum-exp is
computed beside it. What no kernel covers (soft-caps, biases per head) goes through blocks of queries. Nothing
T x T.

These log-sum-exps carry no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perpend.models.attention.call import AttentionCall
from perpend.models.attention.support import ALL, own_key_index, own_visible, row_logits

BLOCK = 1 << 22  # logits held at once by the path through blocks of queries
# from this version on the CPU kernel was seen to take fewer key than query heads; before it they are repeated
_GROUPED_ON_CPU = tuple(int(part) for part in torch.__version__.split(".")[:2]) >= (2, 10)
_agrees: dict[tuple, bool] = {}  # kind of call -> the kernel's own output was bit-identical to the model's


def by_blocks(call: AttentionCall) -> Tensor:
    """Log-sum-exp [B, H, T] of the visible logits, without learned sinks, by blocks of queries."""
    batch, heads, length, _ = call.query.shape
    step = max(1, BLOCK // max(1, batch * heads * call.key.shape[2]))
    parts = [row_logits(call, slice(t, t + step)).logsumexp(-1) for t in range(0, length, step)]
    return torch.cat(parts, dim=-1)


def _float_mask(call: AttentionCall) -> Tensor | None:
    """The mask as the kernels want it, in the query's dtype; exactly what torch makes of a boolean one."""
    if call.mask is None or call.mask.dtype != torch.bool:
        return call.mask
    zero = torch.zeros((), dtype=call.query.dtype, device=call.mask.device)
    return torch.where(call.mask, zero, float("-inf"))


def _cpu_kernel(call: AttentionCall, value: Tensor) -> tuple[Tensor, Tensor]:
    query, key, mask = call.query, call.key, _float_mask(call)
    batch, heads, length, dim = query.shape
    if call.groups > 1 and not _GROUPED_ON_CPU:
        key, value = (x.repeat_interleave(call.groups, 1) for x in (key, value))
        output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, call.causal, attn_mask=mask, scale=call.scale
        )
        return output, lse
    packed = (
        length == 1 and call.groups > 1 and call.mask is not None and (mask is None or mask.shape[1] == 1)
    )
    if packed:  # a single query: transformers runs the groups of one key as queries
        query = query.reshape(batch, key.shape[1], call.groups, dim)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, call.causal, attn_mask=mask, scale=call.scale
    )
    if packed:
        output = output.reshape(batch, heads, 1, value.shape[-1])
        lse = lse.reshape(batch, heads, 1)
    return output, lse


def _cuda_kernel(call: AttentionCall, value: Tensor) -> tuple[Tensor, Tensor] | None:
    """The kernel that `scaled_dot_product_attention` would choose, where it returns a log-sum-exp."""
    query, key, mask = call.query, call.key, _float_mask(call)
    grouped = call.groups > 1
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask=mask, is_causal=call.causal, scale=call.scale, enable_gqa=grouped
    )
    aten, length = torch.ops.aten, query.shape[2]
    if choice == 1 and mask is None and query.shape[-1] % 8 == 0:  # flash
        found = aten._scaled_dot_product_flash_attention(
            query, key, value, 0.0, call.causal, False, scale=call.scale
        )
        return found[0], found[1][..., :length]
    if grouped:
        key, value = (x.repeat_interleave(call.groups, 1) for x in (key, value))
    if mask is not None:
        mask = mask.expand(query.shape[0], query.shape[1], length, key.shape[2])
        if mask.shape[-1] % 16:  # the kernel wants rows of the bias aligned
            mask = torch.nn.functional.pad(mask, (0, 16 - mask.shape[-1] % 16))[..., : mask.shape[-1]]
    found = aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, 0.0, call.causal, scale=call.scale
    )
    return found[0], found[1][..., :length]


def _kernel(call: AttentionCall) -> tuple[Tensor, Tensor] | None:
    """Output [B, H, T, d_v] and lse [B, H, T] of a fused kernel; None where none covers the call."""
    causal_elsewhere = call.causal and call.diagonal != 0
    if call.softcap is not None or call.bias is not None or call.rule is not None or causal_elsewhere:
        return None
    if call.padding is not None or call.enforce_window or call.query.shape[2] == 0:
        return None
    seen = call.key.shape[2]
    if call.causal and seen > call.query.shape[2]:  # a static cache at prefill: its keys come first
        seen = call.query.shape[2]
        call = _sliced(call, seen)
    value, width = call.value, call.value.shape[-1]
    if width > call.query.shape[-1]:
        return None
    if width < call.query.shape[-1]:  # latent attention: the kernels want one width
        value = torch.nn.functional.pad(value, (0, call.query.shape[-1] - width))
    device = call.query.device.type
    try:
        found = (
            _cpu_kernel(call, value)
            if device == "cpu"
            else _cuda_kernel(call, value)
            if device == "cuda"
            else None
        )
    except (
        RuntimeError,
        AttributeError,
        TypeError,
    ):  # this build's kernel refuses the shape, dtype or device
        return None
    if found is None or found[0].shape[-1] == width:
        return found
    return found[0][..., :width], found[1]


def _sliced(call: AttentionCall, seen: int) -> AttentionCall:
    import dataclasses

    return dataclasses.replace(call, key=call.key[:, :, :seen], value=call.value[:, :, :seen])


def _finish(call: AttentionCall, lse: Tensor) -> Tensor:
    """Learned sinks joined in, in fp32 or better."""
    if lse.dtype not in (torch.float32, torch.float64):
        lse = lse.float()
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.to(lse.dtype).view(1, -1, 1))
    return lse


def log_sum_exp(call: AttentionCall) -> Tensor:
    """Log-sum-exp of each row's logits [B, H, T], learned sinks included, from a fused kernel or by blocks.

    A row that sees no key is not told apart here (the kernels return 0 for it): `valid_rows` says which.
    """
    with torch.no_grad():
        found = _kernel(call)
        return _finish(call, by_blocks(call) if found is None else found[1])


def _kind(call: AttentionCall, needs_grad: bool) -> tuple:
    mask = None if call.mask is None else (call.mask.dtype, call.mask.shape[1] > 1)
    query = call.query
    return (
        query.device.type,
        query.dtype,
        query.shape[2] == 1,
        query.shape[2] == call.key.shape[2],
        query.shape[-1],
        call.value.shape[-1],
        call.groups,
        mask,
        call.causal,
        needs_grad,
    )


def output_and_lse(
    call: AttentionCall, run: Callable[[], tuple[Tensor, Any]], options: dict[str, Any] | None = None
) -> tuple[Tensor, Any]:
    """The model's own attention output [B, T, H, d_v] with `call.lse` filled, in one kernel call if possible.

    `run` is the own implementation; returns what it returns. The fused kernel's output stands for it only
    where the first call of that kind (device, dtype, shape class, mask) gave the same bits.
    """
    dropout = (options or {}).get("dropout", 0.0)
    if call.implementation != "sdpa" or dropout or call.value.shape[-1] != call.query.shape[-1]:
        output, rest = run()
        call.with_lse(log_sum_exp(call))
        return output, rest
    needs_grad = torch.is_grad_enabled() and (
        call.query.requires_grad or call.key.requires_grad or call.value.requires_grad
    )
    kind = _kind(call, needs_grad)
    agrees = _agrees.get(kind)
    if agrees is False:
        output, rest = run()
        call.with_lse(log_sum_exp(call))
        return output, rest
    found = _kernel(call)
    if found is None:
        _agrees[kind] = False
        return output_and_lse(call, run, options)
    lse = found[1].detach() if found[1].requires_grad else found[1]
    output, lse = found[0].transpose(1, 2).contiguous(), _finish(call, lse)
    call.with_lse(lse)
    if agrees is None:
        own, rest = run()
        _agrees[kind] = torch.equal(own, output)
        return own, rest
    return output, None


def decodes_alike(query: Tensor, key: Tensor, value: Tensor, scale: float, own: Tensor) -> bool:
    """Whether `decoded` gives the bits of the model's own output [B, 1, H, d_v], and may stand for it."""
    fits = query.is_cpu and query.dtype in (torch.float32, torch.float64) and query.dtype == key.dtype
    if not fits or not _GROUPED_ON_CPU or query.shape[3] != value.shape[3]:
        return False
    return torch.equal(decoded(query, key, value, scale)[0].transpose(1, 2), own)


def decoded(query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Output [B, H, 1, d_v] and lse [B, H, 1] of the CPU kernel for a decoded token that sees every key."""
    return _decoded(query, key, value, 0.0, False, attn_mask=None, scale=scale)


_decoded = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def own_logit(call: AttentionCall, own: Tensor | None = None) -> Tensor:
    """Each query's logit on its own key, [B, H, T] in fp32 or better, as the softmax sees it (unmasked)."""
    full = call.query.dtype if call.query.dtype == torch.float64 else torch.float32
    batch, heads, length, dim = call.query.shape
    kv = call.key.shape[1]
    added = call.bias is not None or (call.mask is not None and call.mask.dtype != torch.bool)
    key = call.key
    if own is None and (added or key.shape[2] != length):
        own = own_key_index(call)
    if own is not None and own.ndim == 2:
        key = key.gather(2, own[:, None, :, None].expand(batch, kv, -1, dim))
    elif own is not None and key.shape[2] != length:
        key = key.index_select(2, own)
    query = call.query.reshape(batch, kv, call.groups, length, dim)
    each = [
        (q.to(full) * k.to(full)[:, None]).sum(-1) for q, k in zip(query, key)
    ]  # one sequence at a time: the product stays small
    logit = (each[0] if batch == 1 else torch.stack(each)).reshape(batch, heads, length).mul_(call.scale)
    if call.softcap is not None:
        logit = logit.div_(call.softcap).tanh_().mul_(call.softcap)
    if call.bias is not None:
        logit = logit + _at_own(call.bias, own, length, call.key.shape[2])
    if call.mask is not None and call.mask.dtype != torch.bool:
        logit = logit + _at_own(call.mask, own, length, call.key.shape[2]).to(full)
    return logit


def _at_own(tensor: Tensor, own: Tensor, length: int, seen: int) -> Tensor:
    """tensor [B|1, H|1, T|1, S] at each row's own key, [B|1, H|1, T]."""
    wide = tensor.expand(*tensor.shape[:2], length, seen)
    batch = max(wide.shape[0], own.shape[0] if own.ndim == 2 else 1)
    index = own.reshape(-1, 1, length, 1).expand(batch, wide.shape[1], length, 1)
    return wide.expand(batch, -1, -1, -1).gather(-1, index)[..., 0]


def self_weight(call: AttentionCall) -> Tensor:
    """A_tt [B, H, T] in fp32 or better: each query's weight on its own key, exp(own logit - lse).

    0 for rows that are not real (they see no key of their own), at most 1. No gradient.
    """
    with torch.no_grad():
        if _decodes_plainly(call):
            return _single(call)
        hiding = call.mask is not None or call.padding is not None or call.rule is not None
        own = own_key_index(call) if hiding else None
        weight = own_logit(call, own).sub_(call.lse).clamp_(max=0.0).exp_()
        if hiding:
            weight = weight.masked_fill(~own_visible(call, own)[:, None, :], 0.0)
        return weight


def _decodes_plainly(call: AttentionCall) -> bool:
    """One query whose own key is the last, seen by every sequence: a decoding step without surprises."""
    if call.query.shape[2] != 1 or call.softcap is not None or call.bias is not None:
        return False
    if call.padding is not None or call.rule is not None:
        return False
    if call.mask is None:
        return True
    last = call.mask[..., -1]
    return call.mask.dtype == torch.bool and call.mask.shape[-1] == call.key.shape[2] and bool(last.all())


def _single(call: AttentionCall) -> Tensor:
    """A_tt [B, H, 1] of a decoding step, in few operations: they cost more than the arithmetic there."""
    query, lse = call.query, call.lse
    batch, heads, _, dim = query.shape
    kv = call.key.shape[1]
    key = call.key[:, :, -1].to(lse.dtype).reshape(batch * kv, dim, 1)
    query = query.to(lse.dtype).reshape(batch * kv, call.groups, dim)
    # scale·q·k − lse in one step
    weight = torch.baddbmm(lse.reshape(batch * kv, call.groups, 1), query, key, beta=-1.0, alpha=call.scale)
    return weight.clamp_(max=0.0).exp_().view(batch, heads, 1)


__all__ = ["ALL", "by_blocks", "log_sum_exp", "output_and_lse", "own_logit", "self_weight"]
