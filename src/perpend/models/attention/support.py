"""Which keys a query row sees, which rows are real, which key is a row's own, and the logits of chosen rows.

Everything is read from the mask the model made, never from values: a padded query row looks like any other
(its weights come back uniform), and only the mask says that it is none. Nothing T x T is formed beyond that
mask.
"""

from __future__ import annotations

import torch
from torch import Tensor

from perpend.errors import InputError
from perpend.models.attention.call import AttentionCall

ALL = slice(None)


def _cut(tensor: Tensor, rows: slice | Tensor, keys: slice | Tensor) -> Tensor:
    """tensor[..., rows, keys] of a [.., T|1, S|1] tensor; an axis of size one stays (it broadcasts)."""
    if tensor.shape[-2] != 1:
        tensor = tensor[..., rows, :]
    return tensor[..., keys] if tensor.shape[-1] != 1 else tensor


def _positions(length: int, chosen: slice | Tensor, device: torch.device) -> Tensor:
    if isinstance(chosen, Tensor):
        return chosen.to(device)
    return torch.arange(*chosen.indices(length), device=device)


def lowest(dtype: torch.dtype) -> float:
    """At or below this an additive mask hides its key: models write -inf or the minimum, plus a bias."""
    return torch.finfo(dtype).min / 2


def visible(call: AttentionCall, rows: slice | Tensor = ALL, keys: slice | Tensor = ALL) -> Tensor | None:
    """Which keys each row may attend to, [B|1, H|1, t|1, s|1] boolean; None when all see all.

    `rows` and `keys` choose queries of 0..T-1 and keys of 0..S-1, so that a part costs no more than that
    part.
    """
    device = call.query.device
    parts: list[Tensor] = []
    if call.mask is not None:
        part = _cut(call.mask, rows, keys)
        parts.append(part if part.dtype == torch.bool else part > lowest(part.dtype))
    if call.padding is not None:
        parts.append(call.padding[:, None, None, keys])
    if call.causal or call.enforce_window or call.rule is not None:
        query = _positions(call.query.shape[2], rows, device)
        key = _positions(call.key.shape[2], keys, device)
        distance = (query[:, None] + call.diagonal) - key[None, :]
        if call.causal:
            parts.append((distance >= 0)[None, None])
        if call.enforce_window and call.window is not None:
            parts.append((distance < call.window)[None, None])
        if call.rule is not None:
            batch = torch.arange(call.query.shape[0], device=device)[:, None, None, None]
            head = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
            parts.append(call.rule(batch, head, query[None, None, :, None], key[None, None, None, :]))
    if not parts:
        return None
    together = parts[0]
    for part in parts[1:]:
        together = together & part
    return together


def additive(call: AttentionCall, rows: slice | Tensor = ALL, keys: slice | Tensor = ALL) -> Tensor | None:
    """What is added to the scaled logits of visible keys, broadcastable [B|1, H|1, t|1, s]; None for nothing.

    Position biases, and the values of an additive mask where it hides nothing (0 there for a plain mask).
    """
    total = None
    if call.bias is not None:
        total = _cut(call.bias, rows, keys)
    if call.mask is not None and call.mask.dtype != torch.bool:
        part = _cut(call.mask, rows, keys)
        part = part.masked_fill(part <= lowest(part.dtype), 0)
        total = part if total is None else total + part
    return total


def _full(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype == torch.float64 else torch.float32


def row_logits(
    call: AttentionCall, rows: slice | Tensor = ALL, keys: slice | Tensor = ALL, *, hide: bool = True
) -> Tensor:
    """The logits that the model's softmax sees, [B, H, t, s] in fp32 (float64 for float64 models).

    Scaled, capped, with position biases, -inf where a key is hidden (`hide`); learned sinks apart. Half
    precision is widened before the product, so nothing overflows or underflows.
    """
    full = _full(call.query.dtype)
    query = call.query[:, :, rows].to(full)
    key = call.key[:, :, keys].to(full)
    batch, heads, length, dim = query.shape
    folded = query.reshape(batch * key.shape[1], call.groups * length, dim)
    nothing = folded.new_zeros(1, 1, 1)  # of it no part is taken: the product is scaled as it is made
    logits = torch.baddbmm(nothing, folded, key.flatten(0, 1).mT, beta=0, alpha=call.scale)
    logits = logits.view(batch, heads, length, key.shape[2])
    if call.softcap is not None:
        logits = logits.div_(call.softcap).tanh_().mul_(call.softcap)
    extra = additive(call, rows, keys)
    if extra is not None:
        logits = logits.add_(extra)
    seen = visible(call, rows, keys) if hide else None
    return logits if seen is None else torch.where(seen, logits, float("-inf"))


def own_key_index(call: AttentionCall) -> Tensor:
    """Which key is each query's own, [T] or, where it differs over the batch, [B, T] (indices into S).

    With as many keys as queries, and with any dynamic or sliding cache, the queries are the last keys: S - T
    + t. A mask-free prefill into a static cache has its keys first: t. With a mask over a static cache it is
    the last visible key of the row. Raises InputError where none of these holds.
    """
    length, seen = call.query.shape[2], call.key.shape[2]
    step = torch.arange(length, device=call.query.device)
    if seen == length:
        return step
    if seen < length:
        raise InputError(
            f"{call.site.name} has fewer keys ({seen}) than queries ({length}): no key is its own"
        )
    if call.mask is None and call.rule is None and call.padding is None:
        if length == 1 or call.diagonal:
            return step + (seen - length)
        if call.causal:
            return step
        raise InputError(
            f"{call.site.name} attends without a mask from {length} queries to {seen} keys (a prefix, or "
            "another sequence's keys): which key is a query's own is not defined"
        )
    return _last_visible(call, step)


def _last_visible(call: AttentionCall, step: Tensor) -> Tensor:
    length, seen = call.query.shape[2], call.key.shape[2]
    rows = visible(call)
    rows = rows.expand(*rows.shape[:2], length, seen).any(1)  # type: ignore[union-attr]  # [B|1, T, S]
    index = torch.arange(seen, device=rows.device)
    last = torch.where(rows, index, -1).amax(-1)  # [B|1, T]; -1 for a row that sees nothing
    alive = last >= 0
    tail = step + (seen - length)
    if bool(((last == tail) | ~alive).all()) and bool(alive.any()):
        return tail
    # one key further for each query is what a growing sequence looks like, wherever the cache puts it
    first = (last - step).masked_fill(~alive, -1).amax(-1, keepdim=True)
    if bool(((last - step == first) | ~alive).all()):
        own = (first + step).clamp_(0, seen - 1)
        return own[0] if own.shape[0] == 1 else own
    # blocks that attend both ways inside themselves (images): the last query still ends the sequence
    own_seen = rows.gather(-1, tail.expand(rows.shape[0], -1)[..., None])[..., 0]
    if bool((own_seen | ~alive).all()) and bool((last[:, -1] == seen - 1).all()):
        return tail
    raise InputError(
        f"{call.site.name}: with {length} queries, {seen} keys and this mask perpend cannot tell which key "
        "is a query's own; run it with a dynamic cache or without one"
    )


def valid_rows(call: AttentionCall) -> Tensor:
    """Which query rows are real, [B, T] boolean: the ones that see their own key.

    A padded query's own key is padding, so its row is none, whatever its weights look like.
    """
    batch, length = call.query.shape[0], call.query.shape[2]
    if call.mask is None and call.padding is None and call.rule is None:
        return torch.ones(batch, length, dtype=torch.bool, device=call.query.device)
    return own_visible(call, own_key_index(call)).expand(batch, length)


def own_visible(call: AttentionCall, own: Tensor) -> Tensor:
    """Whether each row sees the key `own` ([T] or [B, T]), [B|1, T]."""
    if (
        call.padding is not None and call.mask is None and call.rule is None
    ):  # causal kernels always see their own
        return call.padding.gather(1, own.expand(call.padding.shape[0], -1))
    length, seen = call.query.shape[2], call.key.shape[2]
    if call.rule is not None:
        batch = torch.arange(call.query.shape[0], device=own.device)[:, None]
        return call.rule(batch, torch.zeros_like(batch), torch.arange(length, device=own.device)[None], own)
    mask = call.mask
    mask = mask.expand(*mask.shape[:2], length, seen)  # type: ignore[union-attr]
    index = own.expand(mask.shape[0], -1) if own.ndim == 2 else own[None].expand(mask.shape[0], -1)
    found = mask.gather(-1, index[:, None, :, None].expand(-1, mask.shape[1], -1, 1))[..., 0]
    found = found if found.dtype == torch.bool else found > lowest(found.dtype)
    return found.any(1)
