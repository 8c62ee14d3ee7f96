"""Which modules of a model are self-attention layers, and by which path their calls can be seen.

Read off the model's classes without running it: a module routes through transformers' attention functions
when its code looks them up, through torch's kernel when it calls `scaled_dot_product_attention`, and through
an adapter when one in `adapters/` knows it. What is left over with "Attention" in its class name and
projections of its own can be observed only as probabilities.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import nn

from perpend.errors import InputError
from perpend.models.attention.call import AttentionSite

TOWERS = ("text", "vision", "all")
_CROSS = re.compile(r"cross_?attn|cross_?attention|encoder_attn|EncDecAttention|enc_dec", re.IGNORECASE)
_REGISTRY = "ALL_ATTENTION_FUNCTIONS"
KERNEL = "scaled_dot_product_attention"


@dataclass(frozen=True)
class Routing:
    """Where a class looks its attention function up: the globals of its code and its own eager function."""

    names: dict[str, Any]
    eager: str | None

    @property
    def interface(self) -> Any:
        return self.names[_REGISTRY]


def functions(kind: type) -> Iterator[Any]:
    """The Python functions of a class and its bases, nearest first, without the frameworks' own."""
    for base in kind.__mro__:
        if base is nn.Module:
            return
        if base.__module__.startswith("transformers.") and not base.__module__.startswith(
            "transformers.models."
        ):
            continue
        for member in vars(base).values():
            if callable(member):
                function = inspect.unwrap(member)
                if hasattr(function, "__code__"):
                    yield function


@cache
def routing(kind: type) -> Routing | None:
    """How a module class reaches transformers' attention functions, None when it does not."""
    for function in functions(kind):
        names = function.__code__.co_names
        if _REGISTRY in names and _REGISTRY in function.__globals__:
            eager = next((name for name in names if name.endswith("eager_attention_forward")), None)
            return Routing(function.__globals__, eager)
    return None


@cache
def _calls_kernel(kind: type) -> bool:
    return any(KERNEL in function.__code__.co_names for function in functions(kind))


@cache
def adapters() -> tuple[ModuleType, ...]:
    """The families with an attention of their own that perpend knows: the modules in `adapters/`."""
    from perpend.models.attention import adapters as folder

    return tuple(
        importlib.import_module(f"{folder.__name__}.{found.name}")
        for found in pkgutil.iter_modules(folder.__path__)
    )


@cache
def adapter_of(kind: type) -> ModuleType | None:
    """The adapter for the modules of this class, if one knows it."""
    return next((adapter for adapter in adapters() if adapter.matches(kind)), None)


def implementation(module: nn.Module) -> str:
    """The name of the attention function that a routed module uses now."""
    return getattr(module.config, "_attn_implementation", None) or "eager"


@cache
def _may_attend(kind: type) -> bool:
    """Whether modules of a class can be attention at all: most of a model's cannot, and are passed by."""
    return (
        "Attention" in kind.__name__
        or issubclass(kind, nn.MultiheadAttention)
        or routing(kind) is not None
        or adapter_of(kind) is not None
        or _calls_kernel(kind)
    )


def _path(module: nn.Module) -> str | None:
    kind = type(module)
    if routing(kind) is not None and hasattr(module, "config"):
        return "registry"
    if adapter_of(kind) is not None:
        return "adapter"
    if isinstance(module, nn.MultiheadAttention):
        return "multihead"
    if _calls_kernel(kind):
        own = getattr(getattr(module, "config", None), "_attn_implementation", "sdpa")
        return "sdpa" if own in ("sdpa", None) else "probabilities"
    if "Attention" not in kind.__name__:
        return None
    projections = [child for child in module.children() if hasattr(child, "weight")]
    weights = [p for p in module.parameters(recurse=False) if p.ndim >= 2]
    return "probabilities" if len(projections) + len(weights) >= 2 else None


def _is_cross(name: str, module: nn.Module) -> bool:
    flag = _has(module, "is_cross_attention") and module.is_cross_attention
    return bool(flag) or bool(_CROSS.search(name)) or "Cross" in type(module).__name__


def _in_tower(model: nn.Module, tower: str, modules: Iterable[nn.Module]) -> Callable[[nn.Module], bool]:
    """Which of these modules belong to the asked part of a multimodal model (all of any other model)."""
    config = getattr(model, "config", None)
    if tower == "all" or not hasattr(config, "get_text_config"):
        return lambda module: True
    alone = all(getattr(module, "config", config) is config for module in modules)
    if tower == "text" and alone and not getattr(config, "sub_configs", None):
        return lambda module: True
    text = config.get_text_config(decoder=True)
    others = tuple(
        type(part)
        for key in getattr(config, "sub_configs", {})
        if (part := getattr(config, key, None)) is not None and type(part) is not type(text)
    )
    if text is config and not others:
        return lambda module: True

    def inside(module: nn.Module) -> bool:
        own = getattr(module, "config", None)
        is_text = own is text or (type(own) is type(text)) or (text is config and not isinstance(own, others))
        return own is None or is_text == (tower == "text")

    return inside


def _may_attend_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The modules of `model.named_modules()` that can be attention at all, without naming all the others."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[nn.Module] = set()

    def visit(name: str, module: nn.Module) -> None:
        if module in seen:
            return
        seen.add(module)
        if _may_attend(type(module)):
            found.append((name, module))
        for child_name, child in module._modules.items():
            if child is not None:
                visit(f"{name}.{child_name}" if name else child_name, child)

    visit("", model)
    return found


def _has(module: nn.Module, name: str) -> bool:
    """Whether a module or its class has an attribute: to ask a module for one that it lacks is slow."""
    return name in vars(module) or name in module._parameters or hasattr(type(module), name)


def _first(owner: Any, names: tuple[str, ...]) -> int | None:
    module = issubclass(type(owner), nn.Module)
    for name in names:
        value = getattr(owner, name, None) if not module or _has(owner, name) else None
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


_HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "num_heads_per_layer")
_DIMS = ("qk_head_dim", "head_dim", "attention_head_size", "key_value_proj_dim", "dim_head")


def _sizes(name: str, module: nn.Module) -> tuple[int, int, int, int]:
    """Heads, key-value heads, head width and value width, from the module's attributes or its config's."""
    config = getattr(module, "config", None)
    heads = _first(module, _HEADS) or _first(config, _HEADS)
    dim = _first(module, _DIMS)
    if heads is None:
        raise InputError(
            f"perpend cannot read the number of heads of {name} ({type(module).__name__}); give the module "
            "an attribute num_heads"
        )
    groups = _first(module, ("num_key_value_groups",))
    kv = heads // groups if groups else _first(module, ("num_key_value_heads", "num_kv_heads", "n_kv_heads"))
    if dim is None:
        width = _first(module, ("hidden_size", "embed_dim", "all_head_size", "n_embd", "split_size", "dim"))
        width = width or _first(config, ("hidden_size", "n_embd", "d_model"))
        dim = _first(config, ("head_dim",)) or (width // heads if width else 0)
    return heads, kv or heads, dim, _first(module, ("v_head_dim",)) or dim


def _window(module: nn.Module) -> int | None:
    """The sliding window that a layer's attributes or config give it, None when it sees everything."""
    if _has(module, "sliding_window"):
        return module.sliding_window if isinstance(module.sliding_window, int) else None
    config, layer = getattr(module, "config", None), getattr(module, "layer_idx", None)
    window = getattr(config, "sliding_window", None)
    if not isinstance(window, int) or getattr(config, "use_sliding_window", True) is False:
        return None
    kinds = getattr(config, "layer_types", None)
    if kinds is not None and isinstance(layer, int) and layer < len(kinds):
        return window if kinds[layer] == "sliding_attention" else None
    uses = any(
        "sliding_window" in (*f.__code__.co_names, *f.__code__.co_consts) for f in functions(type(module))
    )
    return window if uses else None


def path_to(model: nn.Module, name: str) -> list[nn.Module]:
    """The modules from `model` to the one of this name; none is asked for an attribute, which is slow."""
    found = [model]
    for part in name.split(".") if name else ():
        found.append(found[-1]._modules[part])  # type: ignore[arg-type]
    return found


def module_of(model: nn.Module, site: AttentionSite) -> nn.Module:
    """The attention module of a site."""
    return path_to(model, site.name)[-1]


def _refuse(name: str, module: nn.Module) -> None:
    """Layers whose rows are not compositions, or whose path hides q and k, by name."""
    if _has(module, "lambda_q1"):
        raise InputError(
            f"{name} ({type(module).__name__}) is differential attention: its rows are differences of two "
            "softmaxes, not compositions, so perpend does not read or edit them"
        )
    if isinstance(module, nn.MultiheadAttention) and torch.backends.mha.get_fastpath_enabled():
        raise InputError(
            f"{name} is a torch.nn.MultiheadAttention, whose fast path hides queries and keys; call "
            "torch.backends.mha.set_fastpath_enabled(False) first, and let it run with need_weights=False"
        )


def attention_modules(model: nn.Module, tower: str = "text") -> dict[str, tuple[nn.Module, str]]:
    """Name -> (module, path) of each self-attention layer, in the model's own order."""
    if tower not in TOWERS:
        raise InputError(f"tower is one of {', '.join(TOWERS)}, not {tower!r}")
    candidates = _may_attend_modules(model)
    inside = _in_tower(model, tower, (module for _, module in candidates))
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in candidates:
        path = _path(module)
        if path and not _is_cross(name, module) and inside(module):
            found[name] = (module, path)
    # the best path that exists decides: a routed model's other modules (poolers, resamplers) are no layers of
    # it
    for best in (("registry", "adapter"), ("sdpa",), ("multihead",), ("probabilities",)):
        chosen = {name: pair for name, pair in found.items() if pair[1] in best}
        if chosen:
            break
    for name, (module, _) in chosen.items():
        _refuse(name, module)
    return {name: (m, "sdpa" if path == "multihead" else path) for name, (m, path) in chosen.items()}


def cross_attention(model: nn.Module) -> tuple[str, ...]:
    """The names of a model's cross-attention layers, which are no sites."""
    return tuple(
        name for name, module in _may_attend_modules(model) if _path(module) and _is_cross(name, module)
    )


def attention_sites(model: nn.Module, tower: str = "text") -> tuple[AttentionSite, ...]:
    """The self-attention layers of a model, in its own order.

    Cross-attention and linear-attention layers are no sites. `tower` picks the part of a multimodal model:
    `text` (its decoder), `vision` (everything else), `all`. Raises InputError when there are none, or when a
    layer is of a kind perpend refuses (differential attention, nn.MultiheadAttention's fast path).
    """
    modules = attention_modules(model, tower)
    if not modules:
        raise InputError(
            f"perpend found no self-attention layer in {type(model).__name__}: none routes through "
            "transformers' attention functions or torch's scaled_dot_product_attention, and no adapter "
            "knows its classes"
        )
    sites = []
    for index, (name, (module, path)) in enumerate(modules.items()):
        number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", name)
        sites.append(
            AttentionSite(
                index, name, int(number[1]) if number else index, *_sizes(name, module), _window(module), path
            )
        )
    return tuple(sites)
