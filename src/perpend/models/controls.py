"""Controls of an edit: displacements of the same size that do not go along the reference.

An edit with s⊥ = 1 moves y by (s∥ − 1)·y∥. A change of the loss can come from the size of the move as well as
from its direction, so beside the edit, per token (and head):

    random     a move of the same norm in a random direction
    shuffled   the same edit against the reference of another, earlier token
    opposite   a move of the same norm along y⊥:  s⊥ = 1 − |1 − s∥|·‖y∥‖/‖y⊥‖

    with perpend.models.controls.control(model, edit, "random", seed=0):
        ...
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name
from perpend.models.attention import AttentionCall, attach, self_weight
from perpend.models.edit import RESIDUAL_SITES, Edit, Plan, own_value, plan_of
from perpend.models.stream import Contribution, contributions

CONTROLS = ("random", "shuffled", "opposite")


@contextmanager
def control(model: nn.Module, edit: Edit, kind: str, seed: int = 0) -> Iterator[None]:
    """Run `model` with a control of `edit` in its place, for as long as the `with` lasts.

    Raises InputError for an unknown kind, and for an edit whose s⊥ is not 1: its move has two parts.
    """
    if kind not in CONTROLS:
        raise unknown_name("control", kind, CONTROLS)
    if not bool((torch.as_tensor(edit.perpendicular) == 1).all()):
        raise InputError("a control matches the move of a parallel scale: it needs an edit with s⊥ = 1")
    plan = plan_of(model, edit)
    move = _Move(kind, seed)
    if edit.site in RESIDUAL_SITES:
        visit = _visit(plan, move)
        with contributions(model, visit, parts=(edit.site.split(".")[1],), layers=plan.layers):
            yield
    else:
        hook = _hook(plan, edit, move)
        with attach(model, hook, layers=plan.layers, need_lse=edit.site == "value.exclude_self"):
            yield


class _Move:
    """The displaced vector; random numbers of a layer depend on the seed and the layer alone."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind, self.seed = kind, seed

    def __call__(self, y: Tensor, z: Tensor, parallel: float | Tensor, layer: int, over: int) -> Tensor:
        """`y`, `z` [B, T, ..., d] in fp32 or better; the last `over` axes are one vector."""
        axes = tuple(range(-over, 0))
        generator = torch.Generator().manual_seed(1_000_003 * self.seed + layer)
        if self.kind == "shuffled":
            # An earlier token's, so that nothing of the future leaks in; token 0 has only its own.
            steps = torch.arange(z.shape[1])
            order = (torch.rand(len(steps), generator=generator) * steps).long().to(z.device)
            return y + (parallel - 1.0) * _along(y, z[:, order], axes)
        along = _along(y, z, axes)
        size = along.square().sum(axes, keepdim=True).sqrt()
        if self.kind == "random":
            noise = torch.randn(y.shape, generator=generator, dtype=torch.float32).to(y)
            unit = noise / noise.square().sum(axes, keepdim=True).sqrt()
            return y + (parallel - 1.0) * size * unit
        across = y - along
        length = across.square().sum(axes, keepdim=True).sqrt()
        share = torch.where(length > 0, size / torch.where(length > 0, length, 1.0), 0.0)
        return y - abs(1.0 - parallel) * share * across


def _along(y: Tensor, z: Tensor, axes: tuple[int, ...]) -> Tensor:
    square = z.square().sum(axes, keepdim=True)
    dot = (y * z).sum(axes, keepdim=True)
    return torch.where(square > 0, dot / torch.where(square > 0, square, 1.0), 0.0) * z


def _visit(plan: Plan, move: _Move) -> Callable[[Contribution], Tensor]:
    def visit(c: Contribution) -> Tensor:
        wide = torch.promote_types(c.update.dtype, torch.float32)
        parallel = plan.scales[c.layer][0]
        moved = move(c.update.to(wide), c.reference.to(wide), parallel, c.layer, over=1)
        return moved.to(c.update.dtype)

    return visit


def _hook(plan: Plan, edit: Edit, move: _Move) -> Callable[[AttentionCall, Tensor], Tensor]:
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
