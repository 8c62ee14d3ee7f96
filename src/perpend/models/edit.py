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
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name
from perpend.models.attention import AttentionCall, Hook, attach, attention_sites, own_key_index, self_weight
from perpend.models.attention.sites import cross_attention
from perpend.models.layout import family_or_none, locate
from perpend.models.stream import Contribution, blocks, contributions

if TYPE_CHECKING:
    from collections.abc import Mapping

RESIDUAL_SITES = ("residual.attn", "residual.mlp", "residual.block")
VALUE_SITES = ("value.full", "value.exclude_self")
SITES = RESIDUAL_SITES + VALUE_SITES
REFERENCES = ("head", "token")

Scale = float | Sequence[float] | Sequence[Sequence[float]]
"""One number; one per layer; or one per layer and head (value sites)."""


@dataclass(frozen=True)
class Edit:
    """One edit, as data: what `perpend.edit` takes and what is saved and shared as JSON.

    `parallel`, `perpendicular`: s∥ and s⊥, a number, a list by layer, or a list of lists by layer and
    head (value sites). `layers`, `heads`: those edited, None for all. `reference` (value sites): `head`,
    each query head against the value of its own KV head, or `token`, all heads concatenated; with `heads`,
    `token` applies the common coefficient to those heads only.
    """

    site: str
    parallel: Scale = 1.0
    perpendicular: Scale = 1.0
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    reference: str = "head"

    def __post_init__(self) -> None:
        if self.site not in SITES:
            if "cross" in self.site:
                raise InputError(
                    f"{self.site}: cross-attention cannot be edited, its keys are another sequence's, so no "
                    f"value is a query's own; sites are {', '.join(SITES)}"
                )
            raise unknown_name("edit site", self.site, SITES)
        if self.reference not in REFERENCES:
            raise unknown_name("reference", self.reference, REFERENCES)
        if self.heads is not None and self.site in RESIDUAL_SITES:
            raise InputError(
                f"{self.site} has no heads: attention's heads are summed before they reach the stream; "
                "use value.full or value.exclude_self, or leave `heads` out"
            )
        for name in ("parallel", "perpendicular"):
            scale = torch.as_tensor(getattr(self, name), dtype=torch.float64)
            if scale.ndim > (2 if self.site in VALUE_SITES else 1):
                raise InputError(
                    f"`{name}` has {scale.ndim} axes; {self.site} takes at most layers and heads"
                )
            if not scale.isfinite().all():
                raise InputError(f"`{name}` holds a value that is not finite: {getattr(self, name)}")
            object.__setattr__(self, name, scale.tolist())
        for name in ("layers", "heads"):
            chosen = getattr(self, name)
            if chosen is not None:
                object.__setattr__(self, name, tuple(int(index) for index in chosen))

    @property
    def is_identity(self) -> bool:
        """Whether every scale is 1, so that the model's own path stays untouched."""
        return all(bool((torch.as_tensor(scale) == 1).all()) for scale in (self.parallel, self.perpendicular))

    def to_json(self) -> str:
        """The edit as a JSON object with every field."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Edit:
        """Read `to_json`'s form. Raises InputError for anything else, unknown keys included."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as problem:
            raise InputError(f"an edit is a JSON object, and this is not JSON: {problem}") from problem
        if not isinstance(document, dict):
            raise InputError(f"an edit is a JSON object such as {cls('value.exclude_self', 0.0).to_json()}")
        fields = cls.__dataclass_fields__
        for key in document:
            if key not in fields:
                raise unknown_name("key of an edit", key, fields)
        if "site" not in document:
            raise InputError(f"an edit needs a `site`: one of {', '.join(SITES)}")
        return cls(**document)

    def save(self, path: str | Path) -> None:
        """Write the edit to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Edit:
        """Read an edit from a JSON file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as problem:
            raise InputError(f"cannot read the edit {path}: {problem.strerror or problem}") from problem


@contextmanager
def edit(
    model: nn.Module,
    site: str | Edit | Mapping[str, Any],
    parallel: Scale = 1.0,
    perpendicular: Scale = 1.0,
    layers: Sequence[int] | None = None,
    heads: Sequence[int] | None = None,
    reference: str = "head",
    *,
    tokens: Tensor | None = None,
) -> Iterator[Edit]:
    """Run `model` with one component of one site scaled; leaving the block restores it, by exception too.

    `site` is a name of `SITES`, an `Edit`, or a mapping with its fields. `tokens` (batch, positions),
    boolean, restricts the edit to the positions marked True; positions past its end (decoded later) are
    left alone.
    Yields the `Edit`. Raises InputError for an unknown site, a layer or head out of range, and a model whose
    attention cannot be edited there.
    """
    if isinstance(site, Edit):
        change = site
    elif isinstance(site, str):
        change = Edit(
            site,
            parallel,
            perpendicular,
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
    with ExitStack() as stack:
        chosen = None if tokens is None else stack.enter_context(chosen_positions(model, tokens))
        if change.site in RESIDUAL_SITES:
            visit = _residual_visit(plan, chosen)
            part = change.site.split(".")[1]
            stack.enter_context(contributions(model, visit, parts=(part,), layers=plan.layers))
        else:
            hook = value_hook(plan, change, chosen)
            need_lse = change.site == "value.exclude_self"
            stack.enter_context(attach(model, hook, layers=plan.layers, need_lse=need_lse))
        yield change


@dataclass(frozen=True)
class Plan:
    """An edit resolved on a model: its layers and (s∥, s⊥) for each, numbers or tensors (heads,)."""

    layers: tuple[int, ...]
    scales: dict[int, tuple[float | Tensor, float | Tensor]] = field(default_factory=dict)


def plan_of(model: nn.Module, change: Edit) -> Plan:
    """Resolve an edit on a model. Raises InputError for layers, heads or lists that do not fit it."""
    if change.site in RESIDUAL_SITES:
        indices = {block.index: 0 for block in blocks(model)}
    else:
        indices = {site.index: site.heads for site in attention_sites(model)}
        if not indices:
            raise InputError(f"this model has no attention layer to edit at {change.site}")
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
            scale = torch.as_tensor(getattr(change, name), dtype=torch.float64)
            if scale.ndim:
                if len(scale) != len(indices):
                    raise InputError(f"`{name}` has {len(scale)} layers and the model {len(indices)}")
                scale = scale[sorted(indices).index(layer)]
            pair.append(_by_head(scale, change.heads, indices[layer], name))
        scales[layer] = (pair[0], pair[1])
    return Plan(layers, scales)


def _crossing(model: nn.Module) -> str:
    """Why cross-attention is not among the layers of a model that has some."""
    crossing = cross_attention(model)
    if not crossing:
        return ""
    return (
        f"; {crossing[0]} and {len(crossing) - 1} more are cross-attention, which cannot be edited: its keys "
        "are another sequence's, so no value is a query's own"
    )


def _by_head(scale: Tensor, heads: tuple[int, ...] | None, count: int, name: str) -> float | Tensor:
    if scale.ndim == 0 and heads is None:
        return float(scale)
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


def scale_parts(
    update: Tensor, reference: Tensor, parallel: float | Tensor, perpendicular: float | Tensor
) -> Tensor:
    """s∥·Δ∥ + s⊥·Δ⊥ over the last axis, in fp32 (float64 stays), returned in the dtype of `update`."""
    wide = torch.promote_types(update.dtype, torch.float32)
    y, z = update.to(wide), reference.to(wide)
    coefficient = coefficient_along(y, z)
    if isinstance(perpendicular, float) and perpendicular == 1.0:
        result = torch.addcmul(y, (parallel - 1.0) * coefficient, z)
    else:
        result = torch.addcmul(perpendicular * y, (parallel - perpendicular) * coefficient, z)
    return result.to(update.dtype)


def coefficient_along(y: Tensor, z: Tensor) -> Tensor:
    """⟨y, z⟩/‖z‖² over the last axis (kept); 0 where z = 0."""
    square = (z * z).sum(-1, keepdim=True)
    return (y * z).sum(-1, keepdim=True).div_(square).masked_fill_(square == 0, 0.0)


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


def _residual_visit(plan: Plan, chosen: Chosen | None) -> Callable[[Contribution], Tensor | None]:
    def visit(contribution: Contribution) -> Tensor:
        parallel, perpendicular = plan.scales[contribution.layer]
        update = contribution.update
        edited = scale_parts(update, contribution.reference, parallel, perpendicular)
        if chosen is None:
            return edited
        return torch.where(chosen(update.shape[-2], update.device)[..., None], edited, update)

    return visit


def value_hook(plan: Plan, change: Edit, chosen: Chosen | None = None) -> Hook:
    """The hook that edits o [B, T, H, d_v]. With y = c = o − A_tt v, or y = o and A_tt = 0 for `value.full`,

        o' = s⊥ o + [(s∥ − s⊥) α + (1 − s⊥) A_tt] v,      α = ⟨y, v⟩/‖v‖²

    so that the edit is one number per row and head times the value itself.
    """

    def hook(call: AttentionCall, output: Tensor) -> Tensor:
        parallel, perpendicular = (_on(scale, output) for scale in plan.scales[call.layer])
        value = own_value(call)
        if chosen is None and _is_step(call, output, change, parallel, perpendicular):
            return _step(call, output, value, parallel, change.site == "value.exclude_self")
        self_mass = self_weight(call).transpose(1, 2) if change.site == "value.exclude_self" else None
        along = value_coefficient(output, value, self_mass, change.reference)
        weight = (parallel - perpendicular) * along
        if self_mass is not None and not (isinstance(perpendicular, float) and perpendicular == 1.0):
            weight = weight + (1.0 - perpendicular) * self_mass
        edited = _combine(output, perpendicular, weight, value)
        if chosen is None:
            return edited
        return torch.where(chosen(output.shape[1], output.device)[..., None, None], edited, output)

    return hook


def own_value(call: AttentionCall) -> Tensor:
    """Each query's own value by KV head, v_t [B, T, H_kv, d_v] (a view where no mask is involved)."""
    value, length = call.value, call.query.shape[2]
    if value.shape[2] == length:
        return value.transpose(1, 2)
    if length == 1 and call.mask is None and call.rule is None and call.padding is None:
        return value[:, :, -1:].transpose(1, 2)
    own = own_key_index(call)
    if own.ndim == 2:
        index = own[:, None, :, None].expand(-1, value.shape[1], -1, value.shape[3])
        value = value.expand(len(own), -1, -1, -1).gather(2, index)
    elif value.shape[2] != len(own):
        value = value.index_select(2, own)
    return value.transpose(1, 2)


def value_coefficient(
    output: Tensor, value: Tensor, self_mass: Tensor | None, reference: str = "head"
) -> Tensor:
    """α of the aggregate against the own value, [B, T, H] in fp32 or better; 0 where the value is 0.

    `output` o [B, T, H, d_v]; `value` v [B, T, H_kv, d_v]; `self_mass` A_tt [B, T, H], or None for the full
    aggregate: since c = o − A_tt v, ⟨c, v⟩/‖v‖² = ⟨o, v⟩/‖v‖² − A_tt. Under `token` both products are summed
    over heads first, and every head gets the common α.
    """
    wide = torch.promote_types(output.dtype, torch.float32)
    groups = output.shape[2] // value.shape[2]
    v = value.to(wide)
    square = (v * v).sum(-1, keepdim=True)  # [B, T, H_kv, 1]
    dot = (output.to(wide).unflatten(2, (-1, groups)) * v.unsqueeze(3)).sum(-1)  # [B, T, H_kv, groups]
    mass = None if self_mass is None else self_mass.unflatten(2, (-1, groups))
    if reference == "token":
        if mass is not None:
            dot = dot - mass * square
        dot = dot.sum((2, 3), keepdim=True).expand_as(dot)
        square, mass = groups * square.sum(2, keepdim=True), None
    along = dot / square
    if mass is not None:
        along = along.sub_(mass) if not along.requires_grad else along - mass
    return along.masked_fill(square == 0, 0.0).flatten(2)


def _is_step(
    call: AttentionCall,
    output: Tensor,
    change: Edit,
    parallel: float | Tensor,
    perpendicular: float | Tensor,
) -> bool:
    """Whether a call is one token of plain decoding, where dispatch costs more than arithmetic."""
    plain = call.mask is None and call.padding is None and call.rule is None and call.bias is None
    return (
        output.shape[1] == 1
        and plain
        and call.softcap is None
        and change.reference == "head"
        and isinstance(parallel, float)
        and isinstance(perpendicular, float)
        and perpendicular == 1.0
        and output.dtype in (torch.float32, torch.float64)
        and call.query.dtype == call.key.dtype == output.dtype
        and not torch.is_grad_enabled()
    )


def _step(call: AttentionCall, output: Tensor, value: Tensor, parallel: float, exclude_self: bool) -> Tensor:
    """o − (1 − s∥) α v for one token a sequence, in seven operations; where v = 0 nothing is added."""
    batch, _, heads, width = output.shape
    v = value.reshape(-1, 1, width)  # [B·H_kv, 1, d_v]
    o = output.reshape(len(v), -1, width)  # [B·H_kv, groups, d_v]
    square = torch.bmm(v, v.transpose(1, 2)).clamp_(min=torch.finfo(v.dtype).tiny)
    dot = torch.bmm(o, v.transpose(1, 2))
    if not exclude_self:
        weight = dot.div_(square).neg_()
    else:
        key = call.key[:, :, -1:].reshape(len(v), -1, 1)
        query = call.query.reshape(len(v), -1, call.query.shape[-1])
        lse = call.lse.reshape(len(v), -1, 1)
        mass = torch.baddbmm(lse, query, key, beta=-1, alpha=call.scale).exp_()
        weight = mass.addcdiv_(dot, square, value=-1)  # A_tt − ⟨o,v⟩/‖v‖²
    return torch.baddbmm(o, weight, v, alpha=1.0 - parallel).view(batch, 1, heads, width)


def _combine(output: Tensor, perpendicular: float | Tensor, weight: Tensor, value: Tensor) -> Tensor:
    """s⊥ o + weight·v, [B, T, H, d_v] in the dtype of o; the products in fp32 or better."""
    wide = weight.dtype
    groups = output.shape[2] // value.shape[2]
    base = output.to(wide)
    if isinstance(perpendicular, Tensor):
        base = base * perpendicular[..., None]
    elif perpendicular != 1.0:
        base = base * perpendicular
    grouped = base.unflatten(2, (-1, groups))
    edited = torch.addcmul(
        grouped, weight.unflatten(2, (-1, groups)).unsqueeze(-1), value.to(wide).unsqueeze(3)
    )
    return edited.flatten(2, 3).to(output.dtype)


def _on(scale: float | Tensor, like: Tensor) -> float | Tensor:
    """A scale as the edit's arithmetic wants it: beside the aggregate, in its dtype but fp32 or better."""
    if not isinstance(scale, Tensor):
        return scale
    return scale.to(like.device, torch.promote_types(like.dtype, torch.float32))
