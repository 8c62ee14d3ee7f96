"""The path through transformers' attention functions: the model keeps its own, and hooks run after it.

While something is attached, the entry of the model's *own* implementation in `AttentionInterface` (sdpa,
flash, flex, a kernel from elsewhere) is a function that runs that implementation and then the hooks of the
module it was called for; a module without hooks, of any model, gets the implementation untouched. The eager
function is no entry but a global of each modeling file, and is wrapped there. The implementation keeps its
name and its registered mask function, so masks, padding and every choice a model makes by that name stay as
they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.attention.call import AttentionCall, Decode, Tap, apply_taps
from perpend.models.attention.fused import output_and_lse
from perpend.models.attention.patches import Put, Undo, lock, patched
from perpend.models.attention.sites import Routing, implementation, routing

_taps: dict[int, tuple[Tap, ...]] = {}  # by id of the module, which whoever attached to it holds


def _masks(
    own: str, module: nn.Module, mask: Any, query: Tensor, key: Tensor, kwargs: dict
) -> dict[str, Any]:
    """What a kernel makes of its mask argument: which keys each row may see, in AttentionCall's terms."""
    length, seen = query.shape[2], key.shape[2]
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    # a module's __getattr__ for a name it lacks costs as much as an operation on one token
    if "sliding_window" in kwargs:
        window = kwargs["sliding_window"]
    else:
        known = "sliding_window" in vars(module) or hasattr(type(module), "sliding_window")
        window = module.sliding_window if known else None
    window = window if isinstance(window, int) else None
    found: dict[str, Any] = {"mask": None, "causal": False, "window": window}
    if hasattr(mask, "mask_mod"):  # flex attention's BlockMask
        found["rule"] = mask.mask_mod
    elif "flash" in own:  # bottom-right aligned, padding as [B, S], the window applied by the kernel
        found |= {"causal": bool(causal), "diagonal": seen - length, "enforce_window": window is not None}
        found["padding"] = None if mask is None else mask[:, -seen:].bool()
    elif mask is not None:
        found["mask"] = mask[..., :seen] if mask.shape[-1] > seen else mask
    else:  # eager adds no mask of its own; the others take the upper-left causal one
        found["causal"] = bool(causal) and length > 1 and own != "eager"
    return found


def _call(
    own: str, tap: Tap, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, kwargs: dict
):
    scale = kwargs.get("scaling")
    if "flash" in own and mask is not None and mask.shape[-1] < key.shape[2]:
        # a static cache: the kernel reads as many of its slots as the mask has
        key, value = key[:, :, : mask.shape[-1]], value[:, :, : mask.shape[-1]]
    # sdpa ignores learned sinks and caps; a family that has them runs eager, flash or flex
    plain = own == "sdpa"
    sinks = None if plain else kwargs.get("s_aux", getattr(module, "sinks", None))
    return AttentionCall.of(
        site=tap.site,
        module=module,
        query=query,
        key=key,
        value=value,
        scale=float(query.shape[-1] ** -0.5 if scale is None else scale),
        softcap=None if plain else kwargs.get("softcap"),
        sinks=sinks,
        bias=kwargs.get("position_bias"),
        implementation=own,
        **_masks(own, module, mask, query, key, kwargs),
    )


def _with_hooks(own: str, function: Callable) -> Callable:
    """The own implementation, followed by the hooks of the module it is called for."""

    def attention(module, query, key, value, attention_mask, *args, **kwargs):
        taps = _taps.get(id(module))
        if not taps:
            return function(module, query, key, value, attention_mask, *args, **kwargs)
        if args:
            raise InputError(
                f"{taps[0].site.name} ({type(module).__name__}) passes attention options by position, which "
                "perpend cannot read; use a transformers version in which it names them"
            )

        def run() -> tuple[Tensor, Any]:
            return function(module, query, key, value, attention_mask, **kwargs)

        short = taps[0].decode if own == "sdpa" and attention_mask is None and len(taps) == 1 else None
        if short is not None and query.shape[2] == 1:
            output = _short_way(short, taps[0], query, key, value, kwargs, run)
            if output is not None:
                return output, None
        call = _call(own, taps[0], module, query, key, value, attention_mask, kwargs)
        rest: Any = None
        if taps[0].need_lse or any(tap.need_lse for tap in taps):
            output, rest = output_and_lse(call, run, kwargs)
        else:
            output, rest = run()
        return apply_taps(taps, call, output), rest

    attention.__wrapped__ = function
    return attention


def _short_way(
    decode: Decode, tap: Tap, query: Tensor, key: Tensor, value: Tensor, kwargs: dict, run: Callable
) -> Tensor | None:
    """A plain decoded token by the hook's own short way; None where the call is not that plain."""
    if kwargs.get("position_bias") is not None or kwargs.get("dropout"):
        return None
    scale = kwargs.get("scaling")
    return decode(tap.site, query, key, value, query.shape[-1] ** -0.5 if scale is None else scale, run)


def _patch_interface(interface: Any, own: str) -> Undo:
    before = interface._local_mapping.get(own)  # another's override of this file's interface, if any
    interface[own] = _with_hooks(own, interface[own])

    def undo() -> None:
        del interface[own]
        if before is not None:
            interface[own] = before

    return undo


def _patch_eager(names: dict[str, Any], eager: str) -> Undo:
    before = names[eager]
    names[eager] = _with_hooks("eager", before)

    def undo() -> None:
        names[eager] = before

    return undo


def _target(module: nn.Module, site_name: str) -> tuple[tuple[int, str], Put]:
    """The patch that a module needs: its key and the function that makes it."""
    route: Routing = routing(type(module))  # type: ignore[assignment]
    own = implementation(module)
    if own != "eager":
        return (id(route.interface), own), lambda: _patch_interface(route.interface, own)
    if getattr(module, "reorder_and_upcast_attn", False):
        raise InputError(
            f"{site_name} computes its own upcast attention (reorder_and_upcast_attn with eager); load the "
            "model with attn_implementation='sdpa'"
        )
    if route.eager is None:
        raise InputError(
            f"{site_name} ({type(module).__name__}) has an eager attention perpend cannot find; load the "
            "model with attn_implementation='sdpa'"
        )
    return (id(route.names), route.eager), lambda: _patch_eager(route.names, route.eager)


@contextmanager
def tapped(taps: dict[nn.Module, Tap]) -> Iterator[None]:
    """Hooks on routed modules for as long as the block lasts."""
    # one of each kind says where all of it look their function up: a config is slow to answer
    kinds = {(type(module), id(module.config)): (module, tap.site.name) for module, tap in taps.items()}
    with patched(dict(_target(module, name) for module, name in kinds.values())):
        try:
            for module, tap in taps.items():
                with lock:
                    _taps[id(module)] = (*_taps.get(id(module), ()), tap)
            yield
        finally:
            for module, tap in taps.items():
                _remove(module, tap)


def _remove(module: nn.Module, tap: Tap) -> None:
    with lock:
        left = tuple(other for other in _taps.get(id(module), ()) if other is not tap)
        if left:
            _taps[id(module)] = left
        else:
            _taps.pop(id(module), None)
