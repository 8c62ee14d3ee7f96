"""Controls of an edit: displacements of the same size that do not go along the reference.

An edit with s⊥ = 1 moves y by (s∥ − 1)·y∥. A change of the loss can come from the size of the move as well as
from its direction, so beside the edit, per token (and head):

    random     a move of the same norm in a random direction
    shuffled   the same edit against the reference of another, earlier token
    opposite   a move of the same norm along y⊥:  s⊥ = 1 − |1 − s∥|·‖y∥‖/‖y⊥‖

    with perpend.models.controls.control(model, edit, "random", seed=0):
        ...

**Adding one is adding one file here** that holds a `CONTROL`: `perpend edit --controls` runs it too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name
from perpend.models.attention import AttentionCall, attach, self_weight
from perpend.models.edit import RESIDUAL_SITES, Edit, Plan, own_value, plan_of
from perpend.models.stream import Contribution, contributions

Scale = float | Tensor


@dataclass(frozen=True)
class Move:
    """What a control sees of one layer's call, in fp32 or better.

    y [B, T, ..., d]      the edited vector; z, of the same shape, its reference
    parallel              s∥: a number, or a tensor that broadcasts against y (one a head)
    axes                  the axes of one vector: (−1,), or (−2, −1) where all heads are one
    generator             random numbers that depend on the seed and the layer alone
    """

    y: Tensor
    z: Tensor
    parallel: Scale
    axes: tuple[int, ...]
    generator: torch.Generator

    @property
    def along(self) -> Tensor:
        """y∥, the part of y along z; zero where z is."""
        return along(self.y, self.z, self.axes)

    def norm(self, vectors: Tensor) -> Tensor:
        """Norms over the axes of one vector, kept as axes of length 1."""
        return vectors.square().sum(self.axes, keepdim=True).sqrt()


@dataclass(frozen=True)
class Control:
    """A displacement that takes the place of an edit's: move(Move) -> what y becomes, shaped like y.

    place: where it stands among the others in tables, before those of larger numbers.
    """

    name: str
    summary: str
    move: Callable[[Move], Tensor]
    place: int = 100


@cache
def known() -> dict[str, Control]:
    """All controls by name: every file of this folder, which holds a `CONTROL`."""
    modules = [
        importlib.import_module(f"{__name__}.{entry.name}") for entry in pkgutil.iter_modules(__path__)
    ]
    found = sorted((module.CONTROL for module in modules), key=lambda one: (one.place, one.name))
    return {one.name: one for one in found}


def along(y: Tensor, z: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The part of `y` along `z`, both [B, T, ..., d], over `axes`; zero where z is."""
    square = z.square().sum(axes, keepdim=True)
    dot = (y * z).sum(axes, keepdim=True)
    return torch.where(square > 0, dot / torch.where(square > 0, square, 1.0), 0.0) * z


@contextmanager
def control(model: nn.Module, edit: Edit, kind: str, seed: int = 0) -> Iterator[None]:
    """Run `model` with a control of `edit` in its place, for as long as the `with` lasts.

    Raises InputError for an unknown kind, and for an edit whose s⊥ is not 1: its move has two parts.
    """
    if kind not in known():
        raise unknown_name("control", kind, known())
    if not bool((torch.as_tensor(edit.perpendicular) == 1).all()):
        raise InputError("a control matches the move of a parallel scale: it needs an edit with s⊥ = 1")
    plan = plan_of(model, edit)
    move = _Mover(known()[kind], seed)
    if edit.site in RESIDUAL_SITES:
        visit = _visit(plan, move)
        parts = (edit.site.split(".")[1],)
        with contributions(model, visit, parts, plan.layers, every=plan.blocks):
            yield
    else:
        hook = _hook(plan, edit, move)
        need_lse = edit.site == "value.exclude_self"
        with attach(model, hook, plan.layers, need_lse=need_lse, sites=plan.sites):
            yield


class _Mover:
    """A control at work on one model."""

    def __init__(self, control: Control, seed: int) -> None:
        self.control, self.seed = control, seed

    def __call__(self, y: Tensor, z: Tensor, parallel: Scale, layer: int, over: int) -> Tensor:
        """`y`, `z` [B, T, ..., d] in fp32 or better; the last `over` axes are one vector."""
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + layer)
        return self.control.move(Move(y, z, parallel, tuple(range(-over, 0)), generator))


def _visit(plan: Plan, move: _Mover) -> Callable[[Contribution], Tensor]:
    def visit(c: Contribution) -> Tensor:
        wide = torch.promote_types(c.update.dtype, torch.float32)
        parallel = plan.scales[c.layer][0]
        moved = move(c.update.to(wide), c.reference.to(wide), parallel, c.layer, over=1)
        return moved.to(c.update.dtype)

    return visit


def _hook(plan: Plan, edit: Edit, move: _Mover) -> Callable[[AttentionCall, Tensor], Tensor]:
    def hook(call: AttentionCall, output: Tensor) -> Tensor:
        wide = torch.promote_types(output.dtype, torch.float32)
        value = own_value(call).to(wide).repeat_interleave(call.groups, dim=2)
        kept = torch.zeros((), dtype=wide, device=output.device)
        if edit.site == "value.exclude_self":
            kept = self_weight(call).transpose(1, 2)[..., None] * value
        parallel = plan.scales[call.layer][0]
        if isinstance(parallel, Tensor):
            parallel = parallel.to(output.device, wide)[:, None]
        over = 2 if edit.reference == "token" else 1
        moved = move(output.to(wide) - kept, value, parallel, call.layer, over)
        return (moved + kept).to(output.dtype)

    return hook


CONTROLS = tuple(known())
