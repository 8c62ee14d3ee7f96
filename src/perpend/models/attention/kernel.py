"""The path through torch's `scaled_dot_product_attention`, for models outside transformers' registry.

While something is attached, the function is wrapped wherever the attached modules look it up: a call made
inside an attached layer's forward is followed by that layer's hooks, any other call is the kernel's own.
Which layer is running is kept per thread. Plain modules (a GPT of one's own) and families such as Falcon come
this way.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.attention.call import AttentionCall, Tap, apply_taps
from perpend.models.attention.patches import patched
from perpend.models.attention.sites import KERNEL, functions

_kernel = torch.nn.functional.scaled_dot_product_attention
_running = threading.local()


@dataclass
class _Frame:
    """One attached layer whose forward is running in this thread."""

    module: nn.Module
    tap: Tap
    seen: int = 0


def _frames() -> list[_Frame]:
    if not hasattr(_running, "frames"):
        _running.frames = []
    return _running.frames


def _watched(*args: Any, **kwargs: Any) -> Tensor:
    """The kernel, followed by the hooks of the layer whose forward called it."""
    output = _kernel(*args, **kwargs)
    frames = _frames()
    if not frames:
        return output
    here = [frame for frame in frames if frame.module is frames[-1].module]
    for frame in here:
        frame.seen += 1
    taps = tuple(frame.tap for frame in here)
    call = _call(taps[0], frames[-1].module, *args, **kwargs)
    if call.query.ndim != 4:
        raise InputError(
            f"{call.site.name} calls scaled_dot_product_attention with {call.query.ndim} axes; perpend reads "
            "[batch, heads, tokens, width]"
        )
    before = output.transpose(1, 2)
    after = apply_taps(taps, call, before)
    return output if after is before else after.transpose(1, 2)


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


def _enter(tap: Tap) -> Any:
    def enter(module: nn.Module, args: Any) -> None:
        _frames().append(_Frame(module, tap))

    return enter


def _leave(tap: Tap) -> Any:
    def leave(module: nn.Module, args: Any, output: Any) -> None:
        frames = _frames()
        frame = next(f for f in reversed(frames) if f.tap is tap)
        frames.remove(frame)
        # after an exception there is no output, and nothing to complain about
        if frame.seen == 0 and output is not None:
            raise InputError(
                f"{tap.site.name} ({type(module).__name__}) ran without calling "
                "scaled_dot_product_attention; run it "
                "without attention weights (need_weights=False) and in eval mode"
            )

    return leave


def _lookups(module: nn.Module) -> list[dict[str, Any]]:
    """Where a module finds the kernel: torch.nn.functional, and its own file if imported there."""
    found = {id(vars(torch.nn.functional)): vars(torch.nn.functional)}
    for function in functions(type(module)):
        if KERNEL in function.__code__.co_names and KERNEL in function.__globals__:
            found[id(function.__globals__)] = function.__globals__
    return list(found.values())


def _patch(names: dict[str, Any]) -> Any:
    before = names[KERNEL]
    names[KERNEL] = _watched

    def undo() -> None:
        names[KERNEL] = before

    return undo


@contextmanager
def tapped(taps: dict[nn.Module, Tap]) -> Iterator[None]:
    """Hooks on modules that call torch's kernel, for as long as the block lasts."""
    places = {id(names): names for module in taps for names in _lookups(module)}
    handles: list[Any] = []
    with patched({(key, KERNEL): lambda names=names: _patch(names) for key, names in places.items()}):
        try:
            for module, tap in taps.items():
                handles.append(module.register_forward_pre_hook(_enter(tap)))
                handles.append(module.register_forward_hook(_leave(tap), always_call=True))
            yield
        finally:
            for handle in handles:
                handle.remove()
