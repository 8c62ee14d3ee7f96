"""How the loss changes with every scale at once: one backward pass, exact at s∥ = s⊥ = 1.

    losses, slopes = gradient_map(model, tokens)
    slopes["value.full"]                      # [2, n, layers, heads, T − 1]: ∂loss/∂s∥ and ∂loss/∂s⊥

Every edited vector gets two zeros, y + ε∥·y∥ + ε⊥·y⊥ with y∥ and y⊥ held constant; the gradient with
respect to a zero is the derivative with respect to that scale. All sites are in one pass, each on the
unedited model; one zero a sequence, layer, head and token, so that any of them can be summed afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name
from perpend.models.attention import AttentionCall, attach, self_weight
from perpend.models.edit import (
    RESIDUAL_SITES,
    SITES,
    VALUE_SITES,
    coefficient_along,
    own_value,
    value_coefficient,
)
from perpend.models.head import logits_of
from perpend.models.stream import Contribution, contributions, parts_of


class _Leaves:
    """The zeros of one pass: (site, layer) -> [2, B, heads, T], parallel then perpendicular."""

    def __init__(self) -> None:
        self.found: dict[tuple[str, int], Tensor] = {}

    def added(self, site: str, layer: int, y: Tensor, along: Tensor) -> Tensor:
        """0·y∥ + 0·y⊥ [B, T, ..., d] in the dtype of y, through this site's zeros."""
        zeros = torch.zeros(2, *y.shape[:-1], dtype=along.dtype, device=y.device, requires_grad=True)
        self.found[site, layer] = zeros
        parallel, perpendicular = zeros[..., None]
        return (parallel * along + perpendicular * (y - along)).to(y.dtype)


def gradient_map(
    model: nn.Module,
    tokens: Tensor,
    *,
    sites: Sequence[str] | None = None,
    reference: str = "head",
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each sequence [n], and each site's slopes [2, n, layers, heads, T − 1] (residual: 1 head).

    tokens [n, T]; all sequences in one pass, so n is a batch. `slopes[0]` is ∂loss/∂s∥, `slopes[1]`
    ∂loss/∂s⊥, of the mean loss in nats per token of that sequence, at the token whose vector is scaled.
    Summed over layers, heads and tokens it is the derivative for one scale of the whole site. `sites`: None
    for all that the model has. Raises InputError for an unknown site.
    """
    chosen = _chosen(model, sites)
    leaves, reads = _Leaves(), tokens[:, :-1]

    def hook(call: AttentionCall, output: Tensor) -> Tensor:
        wide = torch.promote_types(output.dtype, torch.float32)
        total = output
        with torch.no_grad():
            o, value = output.detach().to(wide), own_value(call).detach()
            mass = self_weight(call).transpose(1, 2)
            repeated = value.to(wide).repeat_interleave(call.groups, dim=2)
            parts = {}
            for site in (site for site in chosen if site in VALUE_SITES):
                own = mass if site == "value.exclude_self" else None
                along = value_coefficient(o, value, own, reference)[..., None] * repeated
                parts[site] = (o if own is None else o - own[..., None] * repeated, along)
        for site, (y, along) in parts.items():
            total = total + leaves.added(site, call.layer, y, along).to(output.dtype)
        return total

    def visit(c: Contribution) -> Tensor | None:
        wide = torch.promote_types(c.update.dtype, torch.float32)
        with torch.no_grad():
            y, z = c.update.detach().to(wide), c.reference.detach().to(wide)
            along = coefficient_along(y, z) * z
        return c.update + leaves.added(f"residual.{c.part}", c.layer, y, along).to(c.update.dtype)

    with torch.enable_grad(), ExitStack() as stack:
        if any(site in VALUE_SITES for site in chosen):
            stack.enter_context(attach(model, hook))
        parts = tuple(site.split(".")[1] for site in chosen if site in RESIDUAL_SITES)
        if parts:
            stack.enter_context(contributions(model, visit, parts=parts))
        logits = logits_of(model(reads, use_cache=False) if hasattr(model, "config") else model(reads))
        target = tokens[:, 1:, None].to(logits.device)
        wide = torch.promote_types(logits.dtype, torch.float32)
        losses = -logits.to(wide).log_softmax(-1).gather(-1, target)[..., 0].mean(1)
        keys = sorted(leaves.found)
        grads = torch.autograd.grad(losses.sum(), [leaves.found[key] for key in keys])
    slopes: dict[str, Tensor] = {}
    for site in chosen:
        # layers may lie on different devices
        each = [grad.to(losses.device) for key, grad in zip(keys, grads) if key[0] == site]
        if each and each[0].ndim == 3:  # residual sites have no heads
            each = [grad.unsqueeze(-1) for grad in each]
        slopes[site] = torch.stack(each, 2).transpose(-1, -2)  # [2, n, layers, heads, T - 1]
    return losses.detach(), slopes


def _chosen(model: nn.Module, sites: Sequence[str] | None) -> tuple[str, ...]:
    parts = {f"residual.{part}" for part in parts_of(model)}
    if sites is None:
        return tuple(site for site in SITES if site in VALUE_SITES or site in parts)
    for site in sites:
        if site not in SITES:
            raise unknown_name("edit site", site, SITES)
        if site in RESIDUAL_SITES and site not in parts:
            raise InputError(f"{site}: this model's family has no adapter for it")
    return tuple(dict.fromkeys(sites))
