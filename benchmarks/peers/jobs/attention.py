"""Every layer's mean sink mass, row entropy, content entropy and content dispersion over its heads.

Rows of queries 64 and later, on the first 64 keys, re-closed. The other tools hand out rows T × T, and the
statistics are taken from them as someone writes it by hand, in fp32.
"""

from __future__ import annotations

from typing import Any

from peers.jobs import Job, Run, Setting, mean
from peers.tools import bridge, hooked, nnsight_model, perpend_model, transformers_model

WINDOW = 64


def statistics(probabilities: Any) -> Any:
    """[B, heads, T, T] rows -> means of sink mass, H, H(π) and C_A⊥, [4]."""
    import torch

    rows = probabilities[:, :, WINDOW:, :WINDOW].float()
    rows = rows / rows.sum(-1, keepdim=True)
    sink, rest = rows[..., 0], rows[..., 1:].clamp_min(1e-30)
    content = rest / rest.sum(-1, keepdim=True)
    logs = content.log()
    clr = logs - logs.mean(-1, keepdim=True)
    whole = -torch.special.xlogy(rows, rows).sum(-1)
    values = (sink, whole, -(content * logs).sum(-1), clr.norm(dim=-1))
    return torch.stack([value.mean() for value in values])


def _stacked(layers: list[Any]) -> Any:
    import torch

    return torch.stack(layers)


def _plain(setting: Setting) -> Run:
    trunk, batches = transformers_model(setting.folder).model, setting.batches

    def run() -> None:
        for ids in batches:
            trunk(ids, use_cache=False)

    return run


def _perpend(setting: Setting) -> Run:
    import numpy as np
    import torch

    import perpend

    model, batch = perpend_model(setting.folder), setting.sizes["sequences"]
    ids = torch.cat(setting.batches)

    def run() -> Any:
        # no single rows, and no importance as a sink, which are taken from other rows
        survey = perpend.survey_attention(model, ids, window=WINDOW, sample=0, importance=False, batch=batch)
        by_head = survey.statistics
        return np.stack(
            [by_head[name].mean(-1) for name in ("sink_mass", "total", "content", "dispersion")], -1
        )

    return run


def _eager(setting: Setting) -> Run:
    trunk, batches = transformers_model(setting.folder, "eager").model, setting.batches

    def one(ids: Any) -> Any:
        rows = trunk(ids, use_cache=False, output_attentions=True).attentions
        return _stacked([statistics(of_layer) for of_layer in rows])

    return lambda: mean(map(one, batches))


def _hooks(setting: Setting) -> Run:
    trunk, batches = transformers_model(setting.folder, "eager").model, setting.batches

    def run() -> Any:
        done: list[Any] = []
        keep = [
            layer.self_attn.register_forward_hook(lambda m, a, output: done.append(statistics(output[1])))
            for layer in trunk.layers
        ]
        with hooked(keep):
            for ids in batches:
                trunk(ids, use_cache=False)
        return _stacked(done).unflatten(0, (len(batches), -1)).mean(0)

    return run


def _names(setting: Setting) -> list[str]:
    return [f"blocks.{layer}.attn.hook_pattern" for layer in range(setting.sizes["layers"])]


def _lens_cache(setting: Setting) -> Run:
    model, names, batches = bridge(setting.folder), _names(setting), setting.batches

    def one(ids: Any) -> Any:
        _, cache = model.run_with_cache(ids, return_type=None, names_filter=names)
        return _stacked([statistics(cache[name]) for name in names])

    return lambda: mean(map(one, batches))


def _lens_hooks(setting: Setting) -> Run:
    model, names, batches = bridge(setting.folder), _names(setting), setting.batches

    def one(ids: Any) -> Any:
        done: list[Any] = []
        hooks = [(name, lambda pattern, hook: done.append(statistics(pattern))) for name in names]
        model.run_with_hooks(ids, return_type=None, fwd_hooks=hooks)
        return _stacked(done)

    return lambda: mean(map(one, batches))


def _nnsight(setting: Setting) -> Run:
    import nnsight

    model, batches = nnsight_model(setting.folder, "eager"), setting.batches

    def one(ids: Any) -> Any:
        with model.trace(ids):
            done = nnsight.save([])
            for layer in model.model.layers:
                done.append(statistics(layer.self_attn.output[1]))
        return _stacked(done)

    return lambda: mean(map(one, batches))


JOB = Job(
    name="attention",
    title="Attention survey",
    about="Every layer's mean sink mass, H, H(π) and C_A⊥ over heads, on the first 64 keys. perpend takes "
    "them head by head, with each head's mean rows, as every survey does.",
    baseline="plain",
    by_hand=("transformers hooks",),
    contenders={
        "plain": _plain,
        "perpend": _perpend,
        "transformers eager": _eager,
        "transformers hooks": _hooks,
        "TransformerLens cache": _lens_cache,
        "TransformerLens hooks": _lens_hooks,
        "nnsight": _nnsight,
        "pyvene": "it reads the first output of a module, and rows are the second of attention",
    },
)
