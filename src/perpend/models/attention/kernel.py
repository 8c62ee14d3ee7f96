"""The path through torch's `scaled_dot_product_attention`, for models outside transformers' registry.

While a layer's forward runs, a function mode of this thread sees every call of the kernel made inside it, and
the hooks run on its output. Plain modules (a GPT of one's own) and families such as Falcon come this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from perpend.errors import InputError
from perpend.models.attention.call import AttentionCall, Tap, apply_taps

_KERNEL = torch.nn.functional.scaled_dot_product_attention


class _Watch(TorchFunctionMode):
    """Sees the kernel's calls inside one forward of one layer."""

    def __init__(self, module: nn.Module, tap: Tap) -> None:
        super().__init__()
        self.module, self.tap, self.seen = module, tap, 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is not _KERNEL:
            return output
        self.seen += 1
        call = _call(self.tap, self.module, *args, **(kwargs or {}))
        if call.query.ndim != 4:
            raise InputError(
                f"{self.tap.site.name} calls scaled_dot_product_attention with {call.query.ndim} axes; "
                "perpend reads [batch, heads, tokens, width]"
            )
        changed = apply_taps((self.tap,), call, output.transpose(1, 2))
        return changed.transpose(1, 2)


def _call(
    tap: Tap,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> AttentionCall:
    return AttentionCall(
        site=tap.site,
        module=module,
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        causal=is_causal,
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        window=tap.site.window,
    )


@contextmanager
def tapped(taps: dict[nn.Module, Tap]) -> Iterator[None]:
    """Hooks on modules that call torch's kernel, for as long as the block lasts."""
    handles: list[Any] = []
    try:
        for module, tap in taps.items():
            watching: list[_Watch] = []

            def enter(module, args, tap=tap, watching=watching):
                watch = _Watch(module, tap)
                watch.__enter__()
                watching.append(watch)

            def leave(module, args, output, tap=tap, watching=watching):
                watch = watching.pop()
                watch.__exit__(None, None, None)
                # after an exception there is no output, and nothing to complain about
                if watch.seen == 0 and output is not None:
                    raise InputError(
                        f"{tap.site.name} ({type(module).__name__}) ran without calling "
                        "scaled_dot_product_attention; run it without attention weights (need_weights=False) "
                        "and in eval mode"
                    )

            handles.append(module.register_forward_pre_hook(enter))
            handles.append(module.register_forward_hook(leave, always_call=True))
        yield
    finally:
        for handle in handles:
            handle.remove()
