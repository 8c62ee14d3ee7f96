"""Put right what a compressed block adds to the stream, measured against its uncompressed self.

`gain` is free: one scalar per output projection, folded into its weights. Pruning shrinks updates (kappa <
0), and the scalar stretches them back. `refit` re-solves the kept weights of the output projections. Both
minimise

    L(w⊥, w∥) = Σ_t w⊥ ‖e⊥‖² + w∥ ‖e∥‖²,    e = update' − update, split along the uncompressed update

on the block's calibration input; w = (1, 1) is the isotropic squared error. A scalar cannot rotate
anything: with w∥ = 0 its best value would be 0, which is refused, and with w⊥ = 0 it sets the mean kappa to
0.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from perpend.compression.matrices import Matrix
from perpend.compression.method import Repair, Settings
from perpend.compression.observe import observe
from perpend.errors import InputError

PROPORTIONAL = 1e-3  # how exactly the update must follow its projection for a repair to be folded into it


def optimal_gain(made: Tensor, wanted: Tensor, perpendicular: float = 1.0, parallel: float = 1.0) -> float:
    """The scalar g that minimises L(w⊥, w∥) of g·made against wanted, both [..., d]; see the module."""
    top, bottom = _gain_sums(made, wanted, perpendicular, parallel, False)
    return top / bottom if bottom > 0 else 1.0


def _gain_sums(
    made: Tensor, wanted: Tensor, perpendicular: float, parallel: float, relative: bool
) -> tuple[float, float]:
    """g = w∥ Σ⟨made, wanted⟩ / Σ(w⊥ ‖made⊥‖² + w∥ ‖made∥‖²), made split along wanted."""
    m = made.reshape(-1, made.shape[-1]).double()
    w = wanted.reshape(-1, wanted.shape[-1]).double()
    energy = w.square().sum(-1)
    safe = torch.where(energy > 0, energy, 1.0)
    along = (m * w).sum(-1)
    straight = along.square() / safe
    across = (m.square().sum(-1) - straight).clamp(min=0)
    token = 1 / safe if relative else torch.ones_like(safe)
    return float((token * parallel * along).sum()), float(
        (token * (perpendicular * across + parallel * straight)).sum()
    )


def _weights(settings: Settings) -> tuple[float, float]:
    w = (settings["perpendicular"], settings["parallel"])
    if not all(0 <= one < math.inf for one in w) or w[1] == 0:
        raise InputError(
            "a repair needs finite weights, perpendicular >= 0 and parallel > 0 (at 0 the best update is "
            f"none), got {w}"
        )
    return w


def _check(settings: Settings) -> None:
    _weights(settings)
    if settings.get("iterations", 1) < 1:
        raise InputError(f"refit needs at least 1 iteration, got {settings['iterations']}")


def _outputs(block: Any, part: str, batches: int | None = None) -> list[Tensor]:
    """The block's contributions of one part as it is now, one per batch."""
    seen: list[Tensor] = []

    def visit(contribution: Any) -> None:
        if contribution.part == part:
            seen.append(contribution.update.clone())

    for batch in range(len(block.replays))[:batches]:
        block.run(batch, visit)
    return seen


def _projection(block: Any, part: str) -> list[torch.nn.Parameter]:
    """The parameters whose scaling scales the part's contribution: W_O or the MLP's output, with biases."""
    if part == "attn":
        module = block.block.out_proj
        return [] if module is None else list(module.parameters(recurse=False))
    found = []
    for path in block.block.family.mlp_outputs:
        owner, _, own = path.rpartition(".")
        module = block.block.find(owner) if owner else block.module
        parameter = getattr(module, own, None) if module is not None else None
        if isinstance(parameter, torch.nn.Parameter):
            found.append(parameter)
    return found


@torch.no_grad()
def _fit_gain(block: Any, settings: Settings) -> dict[str, dict[str, Any]]:
    perpendicular, parallel = _weights(settings)
    facts: dict[str, dict[str, Any]] = {}
    for part in ("attn", "mlp"):
        name = f"{block.block.name}.{part}"
        parameters = _projection(block, part)
        if not parameters:
            facts[name] = {"skipped": "its output projection is not known"}
            continue
        made = _outputs(block, part)
        sums = [
            _gain_sums(m, w, perpendicular, parallel, settings["relative"])
            for m, w in zip(made, block.updates[part])
        ]
        top, bottom = (sum(column) for column in zip(*sums))
        gain = top / bottom if bottom > 0 else 1.0
        if not 0.1 < gain < 10:
            facts[name] = {"skipped": f"its best gain, {gain:.3g}, is no small correction"}
            continue
        facts[name] = _scaled(block, part, parameters, gain, made)
    return facts


def _scaled(
    block: Any, part: str, parameters: list[torch.nn.Parameter], gain: float, made: list[Tensor]
) -> dict[str, Any]:
    """Fold the gain into the projection, or into the norm that follows it; prove that the contribution
    follows.
    """
    wanted = gain * made[0].float()
    loose = 1 if made[0].dtype in (torch.float32, torch.float64) else 30
    norm = getattr(block.block.find(getattr(block.block.family, f"{part}_update")), "weight", None)
    offset = block.block.family.norm_offset
    # (parameters, what their values are counted from): a norm of the form offset + w scales as a whole
    places = [(parameters, 0.0)] + ([([norm], offset)] if norm is not None and norm.ndim == 1 else [])
    for chosen, zero in places:
        kept = [p.data.clone() for p in chosen]
        for p in chosen:
            p.data.copy_(gain * (p.data.float() + zero) - zero)
        now = _outputs(block, part, batches=1)[0].float()
        if (now - wanted).norm() <= loose * PROPORTIONAL * wanted.norm():
            return {"gain": gain, "folded": "projection" if chosen is parameters else "norm after it"}
        for p, value in zip(chosen, kept):
            p.data.copy_(value)
    return {"skipped": "what it adds to the stream follows neither its projection nor the norm after it"}


@torch.no_grad()
def _fit_refit(block: Any, settings: Settings) -> dict[str, dict[str, Any]]:
    weights = _weights(settings)
    facts: dict[str, dict[str, Any]] = {}
    for part in ("attn", "mlp"):
        name = f"{block.block.name}.{part}"
        parameters = {id(p) for p in _projection(block, part) if p.ndim == 2}
        matrices = [m for m in block.matrices if m.part == part and id(m.parameter) in parameters]
        if len(matrices) != 1:
            facts[name] = {"skipped": "its output is not made by one matrix"}
            continue
        facts[name] = _refit(block, part, matrices[0], weights, settings)
    return facts


def _refit(
    block: Any, part: str, matrix: Matrix, weights: tuple[float, float], settings: Settings
) -> dict[str, Any]:
    inputs: list[Tensor] = []
    outputs: list[Tensor] = []

    def watch(seen: Matrix, rows: Tensor, out: Tensor) -> None:
        inputs.append(rows.float().clone())
        outputs.append(out.float().clone())

    with observe([matrix], watch):
        made = _outputs(block, part)
    x, y = torch.cat(inputs), torch.cat(outputs)
    now = torch.cat([m.reshape(-1, m.shape[-1]) for m in made]).float()
    multiplier = block.block.multiplier
    if (now - multiplier * y).norm() > 30 * PROPORTIONAL * now.norm():
        return {
            "skipped": "what it adds to the stream is not its output projection's output (a norm follows)"
        }
    wanted = torch.cat([u.reshape(-1, u.shape[-1]) for u in block.updates[part]]).float() / multiplier
    weight, loss = solve(
        matrix.weight.float(), x, y - wanted, wanted, weights, settings["iterations"], settings["relative"]
    )
    matrix.weight.copy_(weight.to(matrix.weight.dtype))
    return {"loss_before": loss[0], "loss": loss[-1], "iterations": len(loss) - 1}


def solve(
    weight: Tensor,
    inputs: Tensor,
    error: Tensor,
    wanted: Tensor,
    weights: tuple[float, float] = (1.0, 1.0),
    iterations: int = 10,
    relative: bool = False,
) -> tuple[Tensor, list[float]]:
    """Conjugate gradients on the kept weights (the nonzero ones) for L(w⊥, w∥); stopping early regularises.

    weight: [out, in], its zeros stay. inputs: [tokens, in]; error: [tokens, out], present minus wanted
    output. Returns the new weight and L per iteration, the start first; it never rises.
    """
    mask = weight != 0
    perpendicular, parallel = weights
    energy = wanted.square().sum(-1)
    unit = wanted / torch.where(energy > 0, energy, 1.0).sqrt()[:, None]
    token = (1 / torch.where(energy > 0, energy, 1.0) if relative else torch.ones_like(energy))[:, None]

    def metric(e: Tensor) -> Tensor:
        return token * (
            perpendicular * e + (parallel - perpendicular) * (e * unit).sum(-1, keepdim=True) * unit
        )

    def pulled(e: Tensor) -> Tensor:
        return (metric(e).T @ inputs) * mask

    def loss(e: Tensor) -> float:
        return float((e * metric(e)).sum(dtype=torch.float64))

    residual = -pulled(error)
    step = residual.clone()
    size = residual.square().sum(dtype=torch.float64)
    first = size
    history = [loss(error)]
    for _ in range(iterations):
        if size <= 1e-12 * first or size == 0:
            break
        moved = inputs @ step.T
        curvature = (moved * metric(moved)).sum(dtype=torch.float64)
        if curvature <= 0:
            break
        length = float(size / curvature)
        candidate = error + length * moved
        value = loss(candidate)
        if value > history[-1]:  # rounding has the last word: no step that does not help
            break
        weight, error = weight + length * step, candidate
        history.append(value)
        residual = residual - length * pulled(moved)
        following = residual.square().sum(dtype=torch.float64)
        step = residual + float(following / size) * step
        size = following
    return weight, history


def _any(fit: Callable[..., Any], name: str, summary: str, **more: Any) -> Repair:
    return Repair(
        name, summary, {"perpendicular": 1.0, "parallel": 1.0, "relative": False, **more}, fit, _check
    )


GAIN = _any(_fit_gain, "gain", "one scalar per output projection, folded in")
REFIT = _any(_fit_refit, "refit", "re-solve the kept weights of the output projections", iterations=10)
