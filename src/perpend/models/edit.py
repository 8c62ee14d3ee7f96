"""Scale what a model computes along its reference or across it, anywhere the model runs.

    with perpend.edit(model, site="value.exclude_self", parallel=0.0):
        model.generate(...)                    # prefill, cached decoding and padded batches alike

A site names the vector y and its reference r; the edit replaces y by s∥·y∥ + s⊥·y⊥, where y∥ is the part of y
along r:

    residual.attn       what attention adds to the stream          against the block's input
    residual.mlp        what the MLP adds                          against the stream it is added to
    residual.block      what the block adds                        against the block's input
    value.full          o_t = Σ_s A_ts v_s, before W_O             against v_t
    value.exclude_self  c_t = Σ_{s≠t} A_ts v_s; A_tt v_t is added back unchanged    against v_t

(1, 1) leaves the model's own path alone, to the bit. Nested edits compose: at sites of one kind each acts on
what the edits entered before it have left; value sites act before residual ones, since the model computes
them in that order. Projections are in fp32 whatever the model's dtype; a zero reference has a zero parallel
part.

Source: "Disentangling Representation Evolution in Transformers through Directional Decomposition", Eq. 10-11.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.attention import (
    AttentionCall,
    AttentionSite,
    Hook,
    attach,
    attention_sites,
    decoded,
    decodes_alike,
    self_weight,
)
from perpend.models.attention.sites import cross_attention
from perpend.models.edit_arithmetic import (
    coefficient_along,
    compiled,
    is_step,
    own_value,
    scale_aggregate,
    scale_parts,
    step,
    value_coefficient,
)
from perpend.models.edit_record import REFERENCES, RESIDUAL_SITES, SITES, VALUE_SITES, Edit, Scale
from perpend.models.layout import family_or_none, locate
from perpend.models.stream import Block, Contribution, blocks, contributions

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "REFERENCES", "RESIDUAL_SITES", "SITES", "VALUE_SITES", "Edit", "Plan", "Scale", "chosen_positions",
    "coefficient_along", "edit", "own_value", "plan_of", "scale_parts", "value_coefficient", "value_hook",
]  # fmt: skip


@contextmanager
def edit(
    model: nn.Module,
    site: str | Edit | Mapping[str, Any],
    parallel: Scale | None = None,
    perpendicular: Scale | None = None,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    reference: str = "head",
    *,
    tokens: Tensor | None = None,
    compile: bool = False,
) -> Iterator[Edit]:
    """Run `model` with one component of one site scaled; leaving the block restores it, by exception too.

    `site` is a name of `SITES`, an `Edit`, or a mapping with its fields. With a name goes at least one of
    `parallel` and `perpendicular`; the other is 1, which leaves its part alone. `tokens` (batch, positions),
    boolean, restricts the edit to the positions marked True; positions past its end (decoded later) are
    left alone. `compile`: the edit's arithmetic through torch.compile where a call has more than one token
    (decoding runs as it is, compiled it is slower); where there is no compiler that is said once.
    Yields the `Edit`. Raises InputError for an unknown site, a name without a scale, a layer or head out of
    range, and a model whose attention cannot be edited there.
    """
    if not isinstance(site, str) and not (
        parallel is perpendicular is layers is heads is None and reference == "head"
    ):
        raise InputError("an edit given whole has its scales, layers, heads and reference in itself")
    if isinstance(site, Edit):
        change = site
    elif isinstance(site, str):
        if parallel is None and perpendicular is None and site in SITES:
            raise InputError(
                f"an edit of {site} without a scale changes nothing; give parallel=0.0, perpendicular=0.0 or "
                "another number"
            )
        change = Edit(
            site,
            1.0 if parallel is None else parallel,
            1.0 if perpendicular is None else perpendicular,
            None if layers is None else tuple(layers),
            None if heads is None else tuple(heads),
            reference,
        )
    else:
        change = Edit.from_json(json.dumps(dict(site)))
    if tokens is not None and (tokens.ndim != 2 or tokens.dtype != torch.bool):
        raise InputError("`tokens` is a boolean mask of shape (batch, positions)")
    plan = plan_of(model, change)
    if change.is_identity:
        yield change
        return
    with nullcontext() if tokens is None else chosen_positions(model, tokens) as chosen:
        if change.site in RESIDUAL_SITES:
            visit = _residual_visit(plan, chosen, compile)
            parts = (change.site.split(".")[1],)
            acting = contributions(model, visit, parts, plan.layers, every=plan.blocks)
        else:
            hook = value_hook(plan, change, chosen, compile)
            need_lse = change.site == "value.exclude_self"
            acting = attach(model, hook, plan.layers, need_lse=need_lse, sites=plan.sites)
        with acting:
            yield change


@dataclass(frozen=True)
class Plan:
    """An edit resolved on a model: its layers and (s∥, s⊥) for each, numbers or tensors (heads,).

    `sites`: the model's attention sites, for an edit of values; `blocks`: its blocks, for one of the stream.
    """

    layers: tuple[int, ...]
    scales: dict[int, tuple[float | Tensor, float | Tensor]] = field(default_factory=dict)
    sites: tuple[AttentionSite, ...] | None = None
    blocks: tuple[Block, ...] | None = None


def plan_of(model: nn.Module, change: Edit) -> Plan:
    """Resolve an edit on a model. Raises InputError for layers, heads or lists that do not fit it."""
    sites, every = None, None
    if change.site in RESIDUAL_SITES:
        every = blocks(model)
        indices = {block.index: 0 for block in every}
    else:
        sites = attention_sites(model)
        indices = {site.index: site.heads for site in sites}
    layers = tuple(indices) if change.layers is None else change.layers
    for layer in layers:
        if layer not in indices:
            raise InputError(
                f"layer {layer} is out of range: {change.site} has layers {sorted(indices)}{_crossing(model)}"
            )
    scales = {}
    for layer in layers:
        pair = []
        for name in ("parallel", "perpendicular"):
            scale = getattr(change, name)
            if isinstance(scale, list):
                if len(scale) != len(indices):
                    raise InputError(f"`{name}` has {len(scale)} layers and the model {len(indices)}")
                scale = scale[sorted(indices).index(layer)]
            pair.append(_by_head(scale, change.heads, indices[layer], name))
        scales[layer] = (pair[0], pair[1])
    return Plan(layers, scales, sites, every)


def _crossing(model: nn.Module) -> str:
    """Why cross-attention is not among the layers of a model that has some."""
    crossing = cross_attention(model)
    if not crossing:
        return ""
    return (
        f"; {crossing[0]} and {len(crossing) - 1} more are cross-attention, which cannot be edited: its keys "
        "are another sequence's, so no value is a query's own"
    )


def _by_head(
    scale: float | list[float], heads: tuple[int, ...] | None, count: int, name: str
) -> float | Tensor:
    if isinstance(scale, float) and heads is None:
        return scale
    scale = torch.as_tensor(scale, dtype=torch.float64)
    if scale.ndim and len(scale) != count:
        raise InputError(f"`{name}` has {len(scale)} heads and the layer {count}")
    full = scale.expand(count).clone()
    if heads is not None:
        for head in heads:
            if not 0 <= head < count:
                raise InputError(f"head {head} is out of range: the layer has heads 0 to {count - 1}")
        kept = torch.ones(count, dtype=scale.dtype)
        kept[list(heads)] = full[list(heads)]
        full = kept
    return full


Chosen = Callable[[int, torch.device], Tensor]
"""Which of the rows of this call are edited: (rows, device) -> [B, rows] boolean."""


@contextmanager
def chosen_positions(model: nn.Module, tokens: Tensor) -> Iterator[Chosen]:
    """A mask over positions [B, T] as a mask over the rows of whatever call runs inside.

    A call's rows follow what its cache holds: with a cache, row 0 is position `cache.get_seq_length()`. The
    cache is read where the model enters its blocks; attention layers cannot say it, for a sliding cache has
    forgotten how much went by.
    """
    start = 0

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal start
        caches = [x for x in (*args, *kwargs.values()) if hasattr(x, "get_seq_length")]
        start = int(caches[0].get_seq_length()) if caches else 0

    def chosen(rows: int, device: torch.device) -> Tensor:
        part = tokens[:, start : start + rows].to(device)
        return torch.nn.functional.pad(part, (0, rows - part.shape[1]))

    handle = _owner(model).register_forward_pre_hook(enter, with_kwargs=True)
    try:
        yield chosen
    finally:
        handle.remove()


def _owner(model: nn.Module) -> nn.Module:
    """The module that runs the blocks, which gets the cache; the model itself where there is no such list."""
    try:
        return locate(model, family_or_none(model))[0]
    except InputError:
        return model


def _residual_visit(
    plan: Plan, chosen: Chosen | None, compile: bool
) -> Callable[[Contribution], Tensor | None]:
    long = compiled(scale_parts) if compile else scale_parts

    def visit(contribution: Contribution) -> Tensor:
        parallel, perpendicular = plan.scales[contribution.layer]
        update = contribution.update
        run = scale_parts
        if compile and update.ndim > 1 and update.shape[-2] > 1:
            run = long
            parallel, perpendicular = _on(parallel, update, True), _on(perpendicular, update, True)
        edited = run(update, contribution.reference, parallel, perpendicular)
        if chosen is None:
            return edited
        return torch.where(chosen(update.shape[-2], update.device)[..., None], edited, update)

    return visit


def value_hook(plan: Plan, change: Edit, chosen: Chosen | None = None, compile: bool = False) -> Hook:
    """The hook that edits o [B, T, H, d_v] as `edit_arithmetic` says; one decoded token in fewer steps."""
    exclude_self = change.site == "value.exclude_self"
    long = compiled(scale_aggregate) if compile else scale_aggregate

    def hook(call: AttentionCall, output: Tensor) -> Tensor:
        parallel, perpendicular = plan.scales[call.layer]
        if chosen is None and is_step(call, output, parallel, perpendicular, change.reference):
            lse = call.lse if exclude_self else None
            return step(output, call.query, call.key, call.value, lse, call.scale, parallel)
        run = long if output.shape[1] > 1 else scale_aggregate
        parallel, perpendicular = (
            _on(s, output, run is not scale_aggregate) for s in (parallel, perpendicular)
        )
        mass = self_weight(call).transpose(1, 2) if exclude_self else None
        edited = run(output, own_value(call), mass, parallel, perpendicular, change.reference)
        if chosen is None:
            return edited
        return torch.where(chosen(output.shape[1], output.device)[..., None, None], edited, output)

    alike: dict[tuple[int, torch.dtype], bool] = {}

    def decode(
        site: AttentionSite, query: Tensor, key: Tensor, value: Tensor, scale: float, run: Callable
    ) -> Tensor | None:
        parallel, perpendicular = plan.scales[site.index]
        if perpendicular != 1.0 or torch.is_grad_enabled():
            return None
        same = alike.get((site.index, query.dtype))
        if same is None:
            same = decodes_alike(query, key, value, scale, run()[0])
            alike[site.index, query.dtype] = same
        if not same:
            return None
        output, lse = decoded(query, key, value, scale)
        return step(output, query, key, value, lse if exclude_self else None, scale, parallel)

    numbers = all(isinstance(scale, float) for pair in plan.scales.values() for scale in pair)
    if chosen is None and change.reference == "head" and numbers:
        hook.decode = decode  # type: ignore[attr-defined]
    return hook


def _on(scale: float | Tensor, like: Tensor, tensor: bool = False) -> float | Tensor:
    """A scale as the edit's arithmetic wants it: beside the aggregate, in its dtype but fp32 or better.

    `tensor`: a number as a tensor too, since compiled code is made anew for every number.
    """
    if not tensor and not isinstance(scale, Tensor):
        return scale
    return torch.as_tensor(scale, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)
