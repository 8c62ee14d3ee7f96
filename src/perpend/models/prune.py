"""Write a model without some of its heads, as plain transformers loads it.

Where every layer loses whole KV groups in equal number, and the config can say so (`num_attention_heads`,
`num_key_value_heads`, an explicit `head_dim`), the projections are cut: rows of Q, K, V and columns of W_O
go. Elsewhere no config can express the result, and the columns of W_O that read the heads are set to zero,
which computes the same. Which was done is said.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from perpend.errors import PerpendError
from perpend.evaluation.losses import token_nll
from perpend.evaluation.windows import Windows
from perpend.models.ablate import _output_projections, ablate, heads_by_layer
from perpend.models.attention import AttentionSite, attention_sites
from perpend.models.inputs import model_inputs
from perpend.models.placement import as_placed, held
from perpend.models.smaller import check_free
from perpend.models.verify import output_of

Head = tuple[int, int]
SEEN_AGAIN = 8  # images, or sequences of an encoder, on which a saved model is held against the ablated one


def save_pruned(
    model: nn.Module,
    tokenizer: Any,
    heads: Sequence[Head],
    folder: str | Path,
    inputs: Windows | torch.Tensor,
) -> dict[str, Any]:
    """Save `model` without `heads`; loads it again and measures it on `inputs`.

    Returns `how` in words, `heads_removed`, `parameters`, and what was seen after loading: for `Windows`
    `perplexity_after_loading`, for a tensor (images, or token ids of an encoder) `error_after_loading`, the
    relative difference of its output from that of the ablated model. Raises InputError for a folder that
    exists and is not empty, PerpendError where a layer's output projection is not known.
    """
    from perpend.models.load import load
    from perpend.training.export import write_variant

    check_free(folder)
    smaller, how = pruned(model, heads)
    smaller.save_pretrained(folder)
    write_variant(smaller, folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    again, _ = load(os.fspath(folder), dtype=str(model.dtype).removeprefix("torch."), **as_placed(model))
    report = {
        "how": how,
        "heads_removed": len({(int(layer), int(head)) for layer, head in heads}),
        "parameters": sum(p.numel() for p in smaller.parameters()),
    }
    if isinstance(inputs, Windows):
        loss = token_nll(again, inputs).values.double().mean()
        return {**report, "perplexity_after_loading": float(loss.exp())}
    few = inputs[:SEEN_AGAIN]
    with torch.no_grad(), ablate(model, heads):
        expected = output_of(model(**model_inputs(model, few))).double()
    with torch.no_grad():
        error = output_of(again(**model_inputs(again, few))).double() - expected
    return {**report, "error_after_loading": float(error.norm() / expected.norm())}


def pruned(model: nn.Module, heads: Sequence[Head]) -> tuple[nn.Module, str]:
    """A copy of `model` without `heads`, and how: "cut from the projections" or "zeroed in W_O".

    Raises InputError for a layer or head that is not there, as `ablate` does.
    """
    from perpend.training.export import copied

    sites = attention_sites(model)
    chosen_of = heads_by_layer(sites, heads)
    removed = {site.index: set(chosen_of.get(site.index, ())) for site in sites}
    smaller = copied(model)
    if _expressible(smaller, sites, removed):
        _cut(smaller, sites, removed)
        return smaller, "cut from the projections"
    projections = _output_projections(smaller, sites)
    with torch.no_grad():
        for layer, chosen in removed.items():
            if chosen and layer not in projections:
                raise PerpendError(f"perpend does not know the output projection of {sites[layer].name}")
            width = sites[layer].value_dim
            with held(*([projections[layer]] if chosen else []), write=True):
                for head in chosen:
                    _inputs_of(projections[layer])[head * width : (head + 1) * width] = 0
    return smaller, "zeroed in W_O (no config of this family can express the shape)"


def _inputs_of(projection: nn.Module) -> torch.Tensor:
    """The weight of a projection with its inputs along the first axis (a view)."""
    from transformers.pytorch_utils import Conv1D

    return projection.weight if isinstance(projection, Conv1D) else projection.weight.T


def _expressible(model: nn.Module, sites: Sequence[AttentionSite], removed: dict[int, set[int]]) -> bool:
    config = model.config
    if getattr(model, "perpend_variant", None) is not None:
        return False  # a variant's gates are one a head
    counts = {len(chosen) for chosen in removed.values()}
    explicit = getattr(config, "head_dim", None) == sites[0].head_dim
    named = hasattr(config, "num_key_value_heads") and hasattr(config, "num_attention_heads")
    if len(counts) != 1 or not counts - {0} or not explicit or not named:
        return False
    modules = dict(model.named_modules())
    for site in sites:
        module = modules[site.name]
        if not all(isinstance(getattr(module, name, None), nn.Linear) for name in _QKVO):
            return False
        groups = site.heads // site.kv_heads
        whole = {head // groups for head in removed[site.index]}
        if len(whole) * groups != len(removed[site.index]) or len(whole) == site.kv_heads:
            return False
        # a norm over all heads together (OLMo-2) would mean something else after the cut
        if any(
            isinstance(getattr(module, n, None), nn.Module)
            and getattr(module, n).weight.numel() != site.head_dim
            for n in ("q_norm", "k_norm")
        ):
            return False
    return True


_QKVO = ("q_proj", "k_proj", "v_proj", "o_proj")


def _cut(model: nn.Module, sites: Sequence[AttentionSite], removed: dict[int, set[int]]) -> None:
    modules = dict(model.named_modules())
    for site in sites:
        module = modules[site.name]
        groups = site.heads // site.kv_heads
        queries = [head for head in range(site.heads) if head not in removed[site.index]]
        keys = sorted({head // groups for head in queries})
        with held(module, write=True):
            for name, kept, width in (
                ("q_proj", queries, site.head_dim),
                ("k_proj", keys, site.head_dim),
                ("v_proj", keys, site.value_dim),
            ):
                _keep_rows(getattr(module, name), _spread(kept, width))
            output = module.o_proj
            index = _spread(queries, site.value_dim)
            output.weight = nn.Parameter(output.weight.detach()[:, index].clone())
            output.in_features = len(index)
    left = len(queries)
    model.config.num_attention_heads = left
    model.config.num_key_value_heads = len(keys)


def _keep_rows(projection: nn.Linear, index: list[int]) -> None:
    projection.weight = nn.Parameter(projection.weight.detach()[index].clone())
    if projection.bias is not None:
        projection.bias = nn.Parameter(projection.bias.detach()[index].clone())
    projection.out_features = len(index)


def _spread(heads: Sequence[int], width: int) -> list[int]:
    return [head * width + i for head in heads for i in range(width)]
