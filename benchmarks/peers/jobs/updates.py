"""Every layer's mean α and mean ‖Δ∥‖/‖Δ⊥‖ of what attention and MLP add, against the stream they add to."""

from __future__ import annotations

from typing import Any

from peers.jobs import Job, Run, Setting, mean
from peers.jobs.attention import _plain
from peers.tools import bridge, hooked, nnsight_model, perpend_model, pyvene_model, transformers_model


def profile(update: Any, reference: Any) -> Any:
    """Means over tokens of α and ‖Δ∥‖/‖Δ⊥‖, [2], as someone writes it by hand."""
    import torch

    square = reference.square().sum(-1)
    alpha = (update * reference).sum(-1) / square
    across = (update - alpha[..., None] * reference).norm(dim=-1)
    return torch.stack([alpha.mean(), (alpha.abs() * square.sqrt() / across).mean()])


def _stacked(attn: list[Any], mlp: list[Any]) -> Any:
    """[layers, parts, 2]"""
    import torch

    return torch.stack([torch.stack(attn), torch.stack(mlp)], 1)


def _perpend(setting: Setting) -> Run:
    import numpy as np
    import torch

    import perpend

    model, batch = perpend_model(setting.folder), setting.sizes["sequences"]
    ids = torch.cat(setting.batches)

    def run() -> Any:
        survey = perpend.survey_updates(model, ids, parts=("attn", "mlp"), batch=batch)
        return np.stack([survey.mean("alpha"), survey.mean("ratio")], -1)

    return run


def _hooks(setting: Setting) -> Run:
    trunk, batches = transformers_model(setting.folder).model, setting.batches

    def run() -> Any:
        attn: list[Any] = []
        mlp: list[Any] = []
        stream: dict[str, Any] = {}
        keep = []
        for layer in trunk.layers:
            keep += [
                layer.register_forward_pre_hook(lambda m, args: stream.update(before=args[0])),
                layer.self_attn.register_forward_hook(
                    lambda m, a, output: attn.append(profile(output[0], stream["before"]))
                ),
                layer.post_attention_layernorm.register_forward_pre_hook(
                    lambda m, args: stream.update(middle=args[0])
                ),
                layer.mlp.register_forward_hook(
                    lambda m, a, output: mlp.append(profile(output, stream["middle"]))
                ),
            ]
        with hooked(keep):
            for ids in batches:
                trunk(ids, use_cache=False)
        return _stacked(attn, mlp).unflatten(0, (len(batches), -1)).mean(0)

    return run


def _lens_cache(setting: Setting) -> Run:
    model, batches, layers = bridge(setting.folder), setting.batches, range(setting.sizes["layers"])
    points = ("hook_resid_pre", "hook_attn_out", "hook_resid_mid", "hook_mlp_out")
    names = [f"blocks.{layer}.{point}" for layer in layers for point in points]

    def one(ids: Any) -> Any:
        _, cache = model.run_with_cache(ids, return_type=None, names_filter=names)
        attn, mlp = [], []
        for layer in layers:
            before, added, middle, last = (cache[f"blocks.{layer}.{point}"] for point in points)
            attn.append(profile(added, before))
            mlp.append(profile(last, middle))
        return _stacked(attn, mlp)

    return lambda: mean(map(one, batches))


def _lens_hooks(setting: Setting) -> Run:
    model, batches, layers = bridge(setting.folder), setting.batches, range(setting.sizes["layers"])

    def one(ids: Any) -> Any:
        attn: list[Any] = []
        mlp: list[Any] = []
        stream: dict[str, Any] = {}
        acts = {
            "hook_resid_pre": lambda x, hook: stream.update(before=x),
            "hook_attn_out": lambda x, hook: attn.append(profile(x, stream["before"])),
            "hook_resid_mid": lambda x, hook: stream.update(middle=x),
            "hook_mlp_out": lambda x, hook: mlp.append(profile(x, stream["middle"])),
        }
        hooks = [(f"blocks.{layer}.{point}", act) for layer in layers for point, act in acts.items()]
        model.run_with_hooks(ids, return_type=None, fwd_hooks=hooks)
        return _stacked(attn, mlp)

    return lambda: mean(map(one, batches))


def _nnsight(setting: Setting) -> Run:
    import nnsight

    model, batches = nnsight_model(setting.folder), setting.batches

    def one(ids: Any) -> Any:
        with model.trace(ids):
            attn, mlp = nnsight.save([]), nnsight.save([])
            for layer in model.model.layers:
                before = layer.input
                attn.append(profile(layer.self_attn.output[0], before))
                middle = layer.post_attention_layernorm.input
                mlp.append(profile(layer.mlp.output, middle))
        return _stacked(attn, mlp)

    return lambda: mean(map(one, batches))


def _pyvene(setting: Setting) -> Run:
    attn: list[Any] = []
    mlp: list[Any] = []
    stream: dict[str, Any] = {}

    def kept(act: Any) -> Any:
        return lambda base, source: (act(base), base)[1]  # what it is given goes on as it is

    acts = {
        "input": kept(lambda x: stream.update(before=x)),
        "self_attn.output": kept(lambda x: attn.append(profile(x, stream["before"]))),
        "post_attention_layernorm.input": kept(lambda x: stream.update(middle=x)),
        "mlp.output": kept(lambda x: mlp.append(profile(x, stream["middle"]))),
    }
    model = pyvene_model(
        setting.folder,
        [
            (f"model.layers[{layer}].{point}", act)
            for layer in range(setting.sizes["layers"])
            for point, act in acts.items()
        ],
    )
    batches = setting.batches

    def one(ids: Any) -> Any:
        attn.clear()
        mlp.clear()
        model({"input_ids": ids})
        return _stacked(attn, mlp)

    return lambda: mean(map(one, batches))


JOB = Job(
    name="updates",
    title="Updates profile",
    about="Every layer's mean α and mean ‖Δ∥‖/‖Δ⊥‖ of what attention and MLP add, against the stream.",
    baseline="plain",
    by_hand=("transformers hooks",),
    contenders={
        "plain": _plain,
        "perpend": _perpend,
        "transformers eager": "its outputs are rows and the stream between blocks, not what each part adds",
        "transformers hooks": _hooks,
        "TransformerLens cache": _lens_cache,
        "TransformerLens hooks": _lens_hooks,
        "nnsight": _nnsight,
        "pyvene": _pyvene,
    },
)
