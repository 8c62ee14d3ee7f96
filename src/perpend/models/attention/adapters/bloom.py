"""BLOOM: eager attention with ALiBi written out in the module, seen through its two projections.

q comes from `query_key_value`, k and v from there or from the cache, ALiBi and the mask from the module's
arguments; the aggregate is what `dense` reads, so a hook's answer takes its place there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from perpend.errors import InputError
from perpend.models.attention.call import AttentionCall, Tap, apply_taps


def matches(kind: type[nn.Module]) -> bool:
    """Whether this is BLOOM's attention."""
    return kind.__name__ == "BloomAttention"


def _watch(module: nn.Module, tap: Tap) -> list[Any]:
    if module.pretraining_tp > 1 and module.slow_but_exact:
        raise InputError(
            f"{tap.site.name} slices its projection by hand (slow_but_exact); set config.slow_but_exact=False"
        )
    seen: dict[str, Any] = {}

    def arguments(module, args, kwargs):
        seen.update(zip(("hidden_states", "residual", "alibi", "attention_mask", "layer_past"), args))
        seen.update(kwargs)

    def projected(linear, args, output):
        seen["q"], seen["k"], seen["v"] = module._reshape(output)

    def aggregate(linear, args):
        query, cache = seen["q"], seen.get("layer_past")
        key, value = seen["k"], seen["v"]
        if cache is not None:
            key, value = cache.layers[module.layer_idx].keys, cache.layers[module.layer_idx].values
        batch, heads, length, dim = query.shape
        call = AttentionCall(
            site=tap.site,
            module=module,
            query=query,
            key=key,
            value=value,
            mask=seen.get("attention_mask"),
            causal=False,
            scale=float(module.inv_norm_factor),
            bias=seen["alibi"].view(batch, heads, 1, -1)[..., : key.shape[2]],
            implementation="eager",
        )
        seen.clear()
        before = args[0].view(batch, length, heads, dim)
        after = apply_taps((tap,), call, before)
        return None if after is before else (after.reshape(args[0].shape), *args[1:])

    return [
        module.register_forward_pre_hook(arguments, with_kwargs=True),
        module.query_key_value.register_forward_hook(projected),
        module.dense.register_forward_pre_hook(aggregate),
    ]


@contextmanager
def tapped(taps: dict[nn.Module, Tap]) -> Iterator[None]:
    """Hooks on BLOOM's attention modules for as long as the block lasts."""
    handles: list[Any] = []
    try:
        for module, tap in taps.items():
            handles += _watch(module, tap)
        yield
    finally:
        for handle in handles:
            handle.remove()
