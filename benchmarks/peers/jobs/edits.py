"""Edits of every layer at s∥ = 0, and a head's ablation; each contender's logits must be perpend's.

`value.full`: each head's aggregate before W_O less its part along the query's own value. `residual.attn`:
what attention adds less its part along the block's input. Ablation: head 3 of layer 0 is zero before W_O.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peers.jobs import Job, Run, Setting
from peers.tools import (
    bridge,
    by_head,
    hooked,
    nnsight_model,
    perpend_model,
    pyvene_model,
    some,
    transformers_model,
    without,
)

LAYER, HEAD = 0, 3


def _plain(setting: Setting) -> Run:
    model, batches = transformers_model(setting.folder), setting.batches

    def run() -> None:
        for ids in batches:
            model(ids, use_cache=False)

    return run


def _perpend(change: Callable[[Any, Any], Any]) -> Callable[[Setting], Run]:
    """`change(perpend, model)`: the context in which the model runs."""

    def make(setting: Setting) -> Run:
        import perpend

        model, batches = perpend_model(setting.folder), setting.batches

        def run() -> Any:
            with change(perpend, model):
                return some(model(ids, use_cache=False).logits for ids in batches)

        return run

    return make


def _hooks(register: Callable[[Any, Any], list[Any]]) -> Callable[[Setting], Run]:
    """`register(layers, config)`: handles of the hooks that make the edit."""

    def make(setting: Setting) -> Run:
        model, batches = transformers_model(setting.folder), setting.batches

        def run() -> Any:
            with hooked(register(model.model.layers, model.config)):
                return some(model(ids, use_cache=False).logits for ids in batches)

        return run

    return make


def _lens(hooks: Callable[[Any, int], list[Any]]) -> Callable[[Setting], Run]:
    """`hooks(config, layers)`: TransformerLens' (name, hook) pairs."""

    def make(setting: Setting) -> Run:
        model, batches, layers = bridge(setting.folder), setting.batches, setting.sizes["layers"]
        return lambda: some(model.run_with_hooks(ids, fwd_hooks=hooks(model.cfg, layers)) for ids in batches)

    return make


def _pyvene(components: Callable[[Any, int], list[Any]]) -> Callable[[Setting], Run]:
    """`components(config, layers)`: pyvene's (component, function) pairs."""

    def make(setting: Setting) -> Run:
        config = transformers_model(setting.folder).config
        model = pyvene_model(setting.folder, components(config, setting.sizes["layers"]))
        batches = setting.batches
        return lambda: some(model({"input_ids": ids})[1].logits for ids in batches)

    return make


# --- value.full ---


def _own(v: Any, o: Any, kv_heads: int) -> Any:
    """Each query head's own value: v [B, T, kv_heads · d] as o [B, T, heads, d] is."""
    v = by_head(v, kv_heads) if v.ndim == 3 else v
    return v.repeat_interleave(o.shape[-2] // kv_heads, dim=-2)


def _value_by_hooks(layers: Any, config: Any) -> list[Any]:
    heads, kv_heads, kept, handles = config.num_attention_heads, config.num_key_value_heads, {}, []

    def keep(module: Any, args: Any, output: Any) -> None:
        kept["v"] = output

    def change(module: Any, args: Any) -> Any:
        o = by_head(args[0], heads)
        return (without(o, _own(kept["v"], o, kv_heads)).flatten(-2),)

    for layer in layers:
        handles.append(layer.self_attn.v_proj.register_forward_hook(keep))
        handles.append(layer.self_attn.o_proj.register_forward_pre_hook(change))
    return handles


def _value_by_lens(config: Any, layers: int) -> list[Any]:
    kept: dict[str, Any] = {}
    acts = {
        "hook_v": lambda v, hook: kept.update(v=v),
        "hook_z": lambda z, hook: without(z, _own(kept["v"], z, config.n_key_value_heads)),
    }
    return [(f"blocks.{layer}.attn.{point}", act) for layer in range(layers) for point, act in acts.items()]


def _value_by_nnsight(setting: Setting) -> Run:
    model, batches = nnsight_model(setting.folder), setting.batches
    heads, kv_heads = model.config.num_attention_heads, model.config.num_key_value_heads

    def one(ids: Any) -> Any:
        with model.trace(ids):
            for layer in model.model.layers:
                attention = layer.self_attn
                v = attention.v_proj.output
                o = by_head(attention.o_proj.input, heads)
                attention.o_proj.input = without(o, _own(v, o, kv_heads)).flatten(-2)
            logits = model.lm_head.output.save()
        return logits

    return lambda: some(map(one, batches))


def _value_by_pyvene(config: Any, layers: int) -> list[Any]:
    heads, kv_heads, kept = config.num_attention_heads, config.num_key_value_heads, {}

    def keep(base: Any, source: Any) -> Any:
        kept["v"] = base
        return base

    def change(base: Any, source: Any) -> Any:
        o = by_head(base, heads)
        return without(o, _own(kept["v"], o, kv_heads)).flatten(-2)

    acts = {"v_proj.output": keep, "o_proj.input": change}
    return [
        (f"model.layers[{layer}].self_attn.{point}", act)
        for layer in range(layers)
        for point, act in acts.items()
    ]


# --- residual.attn ---


def _residual_by_hooks(layers: Any, config: Any) -> list[Any]:
    kept: dict[str, Any] = {}
    handles = []

    def keep(module: Any, args: Any) -> None:
        kept["x"] = args[0]

    def change(module: Any, args: Any, output: Any) -> Any:
        return (without(output[0], kept["x"]), *output[1:])

    for layer in layers:
        handles.append(layer.register_forward_pre_hook(keep))
        handles.append(layer.self_attn.register_forward_hook(change))
    return handles


def _residual_by_lens(config: Any, layers: int) -> list[Any]:
    kept: dict[str, Any] = {}
    acts = {
        "hook_resid_pre": lambda x, hook: kept.update(x=x),
        "hook_attn_out": lambda y, hook: without(y, kept["x"]),
    }
    return [(f"blocks.{layer}.{point}", act) for layer in range(layers) for point, act in acts.items()]


def _residual_by_nnsight(setting: Setting) -> Run:
    model, batches = nnsight_model(setting.folder), setting.batches

    def one(ids: Any) -> Any:
        with model.trace(ids):
            for layer in model.model.layers:
                x = layer.input
                y, rows = layer.self_attn.output
                layer.self_attn.output = (without(y, x), rows)
            logits = model.lm_head.output.save()
        return logits

    return lambda: some(map(one, batches))


def _residual_by_pyvene(config: Any, layers: int) -> list[Any]:
    kept: dict[str, Any] = {}

    def keep(base: Any, source: Any) -> Any:
        kept["x"] = base
        return base

    acts = {"input": keep, "self_attn.output": lambda base, source: without(base, kept["x"])}
    return [(f"model.layers[{layer}].{point}", act) for layer in range(layers) for point, act in acts.items()]


# --- a head's ablation ---


def _head(config: Any) -> slice:
    width = config.hidden_size // config.num_attention_heads
    return slice(HEAD * width, (HEAD + 1) * width)


def _zeroed(x: Any, where: Any) -> Any:
    x = x.clone()
    x[..., where] = 0
    return x


def _zero_by_hooks(layers: Any, config: Any) -> list[Any]:
    def zero(module: Any, args: Any) -> Any:
        return (_zeroed(args[0], _head(config)),)

    return [layers[LAYER].self_attn.o_proj.register_forward_pre_hook(zero)]


def _zero_by_lens(config: Any, layers: int) -> list[Any]:
    def zero(z: Any, hook: Any) -> Any:
        z[:, :, HEAD] = 0
        return z

    return [(f"blocks.{LAYER}.attn.hook_z", zero)]


def _zero_by_nnsight(setting: Setting) -> Run:
    model, batches = nnsight_model(setting.folder), setting.batches
    head = _head(model.config)

    def one(ids: Any) -> Any:
        with model.trace(ids):
            model.model.layers[LAYER].self_attn.o_proj.input[..., head] = 0
            logits = model.lm_head.output.save()
        return logits

    return lambda: some(map(one, batches))


def _zero_by_pyvene(config: Any, layers: int) -> list[Any]:
    return [
        (f"model.layers[{LAYER}].self_attn.o_proj.input", lambda base, source: _zeroed(base, _head(config)))
    ]


def _job(
    name: str, title: str, about: str, change: Any, hooks: Any, lens: Any, nnsight: Any, pyvene: Any
) -> Job:
    return Job(
        name=name,
        title=title,
        about=about,
        baseline="plain",
        by_hand=("transformers hooks",),
        contenders={
            "plain": _plain,
            "perpend": _perpend(change),
            "transformers eager": "it has no way to edit short of hooks: `head_mask` is gone or ignored",
            "transformers hooks": _hooks(hooks),
            "TransformerLens cache": "a cache is for reading; its hooks edit",
            "TransformerLens hooks": _lens(lens),
            "nnsight": nnsight,
            "pyvene": _pyvene(pyvene),
        },
    )


VALUE = _job(
    "edit-value",
    "Edit of `value.full`",
    "Every head's aggregate before W_O without its part along the query's own value, in every layer.",
    lambda perpend, model: perpend.edit(model, "value.full", 0.0),
    _value_by_hooks,
    _value_by_lens,
    _value_by_nnsight,
    _value_by_pyvene,
)
RESIDUAL = _job(
    "edit-residual",
    "Edit of `residual.attn`",
    "What attention adds without its part along the block's input, in every layer.",
    lambda perpend, model: perpend.edit(model, "residual.attn", 0.0),
    _residual_by_hooks,
    _residual_by_lens,
    _residual_by_nnsight,
    _residual_by_pyvene,
)
ABLATE = _job(
    "ablate",
    "Ablation of a head",
    f"Head {HEAD} of layer {LAYER} zero before W_O. perpend also looks, in every pass, whether it is.",
    lambda perpend, model: perpend.ablate(model, [(LAYER, HEAD)]),
    _zero_by_hooks,
    _zero_by_lens,
    _zero_by_nnsight,
    _zero_by_pyvene,
)
