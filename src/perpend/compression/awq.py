"""AWQ: before rounding, inputs that matter more get finer steps. Lin et al. 2024, as fake quantization.

Linears that read one tensor share a scale per input channel, s = mean|X|^alpha / √(max · min), alpha on a
grid of 20 values i/20 that starts with 0, the identity. W·diag(s) is rounded, and diag(1/s) is folded into
whatever made the tensor (a norm, v_proj, up_proj). Where it cannot be folded it is kept at run time, that
is multiplied back into the rounded weights, and the result says why. An optional clip shrinks each group's
range.

Objectives of the search: "output", the summed output error of the linears, exactly over all calibration
tokens from the second moment of their inputs; "update", the error of what attention or MLP adds to the
stream, with weights on its perpendicular and its parallel part ((1, 1) is the isotropic error). Since the
grid holds the identity and a clip is taken only where the objective falls, AWQ is never worse than RTN on
it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perpend.compression import rtn
from perpend.compression.directional import directional_loss
from perpend.compression.matrices import Matrix
from perpend.compression.method import Method, Settings
from perpend.errors import InputError, unknown_name

OBJECTIVES = ("output", "update")
# the bits of q·k are not a sum over channels that clipping one row leaves alone: the reference skips these
UNCLIPPED = (
    "q_proj",
    "k_proj",
    "query",
    "key",
    "query_key_value",
    "c_attn",
    "qkv_proj",
    "q_a_proj",
    "q_b_proj",
)
SHRINK = [1 - i / 20 for i in range(10)]
FOLD_TOLERANCE = 1e-3  # relative change of the block's output that folding may make (it should make none)

Candidate = dict[str, Tensor]  # matrix name -> weight
Objective = Callable[[Candidate], float]


@dataclass
class _Group:
    """Matrices that share a scale. `source`: what a scale can be folded into; None with the reason."""

    matrices: tuple[Matrix, ...]
    source: nn.Module | None
    source_name: str
    reason: str
    scale: Tensor
    alpha: float = 0.0


def scales(magnitudes: Tensor, alpha: float) -> Tensor:
    """[in]: mean|X|^alpha, normalised by √(max · min); all ones at alpha 0."""
    raised = magnitudes.double().pow(alpha).clamp(min=1e-4)
    return (raised / (raised.max() * raised.min()).sqrt()).float()


def _check(matrix: Matrix, settings: Settings) -> None:
    rtn.check(matrix, settings)
    if settings["objective"] not in OBJECTIVES:
        raise unknown_name("objective of awq", settings["objective"], OBJECTIVES)
    if settings["grid"] < 1:
        raise InputError(f"grid must be at least 1 (the identity), got {settings['grid']}")
    if settings["sample"] < 1:
        raise InputError(f"sample must be at least 1 batch of calibration text, got {settings['sample']}")
    weights = (settings["perpendicular"], settings["parallel"])
    if not all(0 <= w < math.inf for w in weights) or max(weights) == 0:
        raise InputError(f"weights of the error parts must be finite, not negative nor both 0, got {weights}")
    if settings["objective"] == "output" and (weights != (1.0, 1.0) or settings["relative"]):
        raise InputError("weights on the parts of the error, and relative errors, need objective=update")


@torch.no_grad()
def _compress(block: Any, settings_of: Callable[[Matrix], Settings]) -> dict[str, dict[str, Any]]:
    facts: dict[str, dict[str, Any]] = {}
    groups = _groups(block)
    clips: dict[str, Tensor] = {}
    for group in groups:
        _search(block, group, settings_of, facts, clips)
    # float copies, so that folding into and out of half-precision weights rounds once, at the end
    exact = {m.name: m.weight.float() for m in block.matrices}
    _fold(block, groups, exact)
    for group in groups:
        for matrix in group.matrices:
            bits, size = facts[matrix.name]["bits"], facts[matrix.name]["group"]
            shrink = clips.get(matrix.name, 1.0)
            folded = group.source is not None
            scale = torch.ones_like(group.scale) if folded else group.scale
            rounded = rtn.quantize(exact[matrix.name] * scale, bits, size, shrink) / scale
            matrix.weight.copy_(rounded.to(matrix.weight.dtype))
            at_run_time = not folded and group.alpha > 0
            facts[matrix.name] |= {
                "folded": group.source_name if folded and group.alpha > 0 else None,
                "kept_at_run_time": group.reason if at_run_time else None,
                "extra_bytes": 2 * matrix.width if at_run_time else 0,  # the scale, at 16 bits
            }
    return facts


def _search(
    block: Any,
    group: _Group,
    settings_of: Callable[[Matrix], Settings],
    facts: dict[str, dict[str, Any]],
    clips: dict[str, Tensor],
) -> None:
    """Choose the group's scale and its matrices' clips; leaves the weights as they were."""
    statistics = block.statistics[group.matrices[0].name]
    settings = settings_of(group.matrices[0])
    bits = {m.name: settings_of(m)["bits"] for m in group.matrices}
    sizes = {m.name: rtn.group_of(m.name, m.width, settings_of(m)["group"]) for m in group.matrices}
    objective = _objective(block, group, settings)

    def rounded(matrix: Matrix, scale: Tensor, shrink: Tensor | float = 1.0) -> Tensor:
        name = matrix.name
        return rtn.quantize(matrix.weight.float() * scale, bits[name], sizes[name], shrink) / scale

    plain = loss = None
    if statistics.tokens:
        best: Candidate = {m.name: rounded(m, group.scale) for m in group.matrices}
        plain = loss = objective(best)
        mean = (statistics.magnitudes / statistics.tokens).to(group.scale.device)
        for step in range(1, settings["grid"]):
            scale = _storable(group.source, scales(mean, step / settings["grid"]))
            candidate = {m.name: rounded(m, scale) for m in group.matrices}
            value = objective(candidate)
            if value < loss:
                best, loss, group.scale, group.alpha = candidate, value, scale, step / settings["grid"]
        for matrix in group.matrices if settings["clip"] else ():
            name = matrix.name
            if name.rsplit(".", 1)[-1] in UNCLIPPED:
                continue
            shrink = _shrink(matrix, block.statistics[name].moment, group.scale, bits[name], sizes[name])
            candidate = {**best, name: rounded(matrix, group.scale, shrink)}
            value = objective(candidate)
            if value < loss:
                best, loss, clips[name] = candidate, value, shrink
    for matrix in group.matrices:
        shrink = clips.get(matrix.name)
        facts[matrix.name] = {
            "bits": bits[matrix.name],
            "group": sizes[matrix.name],
            "alpha": group.alpha,
            "clipped": 0.0 if shrink is None else float((shrink < 1).double().mean()),
            "group_loss": loss,
            "group_loss_rtn": plain,
        }


def _storable(source: nn.Module | None, scale: Tensor) -> Tensor:
    """The scale that a norm's weight really carries once divided by it and rounded to its dtype."""
    weight = getattr(source, "weight", None)
    if weight is None or weight.ndim != 1:
        return scale
    stored = (weight.float() / scale).to(weight.dtype).float()
    return torch.where(stored != 0, weight.float() / torch.where(stored != 0, stored, 1.0), scale)


def _objective(block: Any, group: _Group, settings: Settings) -> Objective:
    """The error of candidate weights, against the uncompressed block."""
    if settings["objective"] == "output":

        def output(candidate: Candidate) -> float:
            return sum(
                block.statistics[m.name].moment.energy(candidate[m.name] - m.weight.float())
                for m in group.matrices
            )

        return output

    parts = {m.part for m in group.matrices}
    weights = {k: settings[k] for k in ("perpendicular", "parallel", "relative")}

    def update(candidate: Candidate) -> float:
        kept = {m.name: m.weight.clone() for m in group.matrices}
        total = 0.0

        def visit(seen: Any) -> None:
            nonlocal total
            if seen.part in parts:
                base = block.updates[seen.part][batch]
                total += directional_loss(seen.update.float() - base.float(), base, **weights)

        try:
            for m in group.matrices:
                m.weight.copy_(candidate[m.name])
            for batch in range(min(settings["sample"], len(block.replays))):
                block.run(batch, visit)
        finally:
            for m in group.matrices:
                m.weight.copy_(kept[m.name])
        return total

    return update


def _shrink(matrix: Matrix, moment: Any, scale: Tensor, bits: int, size: int) -> Tensor:
    """[out, in/size, 1]: per group, the factor on its range with the least output error of it alone."""
    weight = matrix.weight.float() * scale
    parts = scale.reshape(-1, size)
    second = moment.diagonal_blocks(size).to(weight.device) / (parts[:, :, None] * parts[:, None, :])
    best = torch.full((weight.shape[0], weight.shape[1] // size), float("inf"), device=weight.device)
    chosen = torch.ones_like(best)
    for factor in SHRINK:
        delta = (
            (rtn.quantize(weight, bits, size, factor) - weight)
            .reshape(weight.shape[0], -1, size)
            .transpose(0, 1)
        )
        error = ((delta @ second) * delta).sum(-1).T
        better = error < best
        best = torch.where(better, error, best)
        chosen = torch.where(better, factor, chosen)
    return chosen[..., None]


def _groups(block: Any) -> list[_Group]:
    """The family's scale groups, then every matrix that is in none by itself."""
    by_name = {m.name: m for m in block.matrices}
    prefix, taken, out = block.block.name, set(), []
    for known in block.block.scale_groups:
        names = [f"{prefix}.{path}" for path in known.linears]
        members = tuple(by_name[n] for n in names if n in by_name and n not in taken)
        if not members:
            continue
        taken.update(m.name for m in members)
        source = block.block.find(known.source)
        reason = _unfoldable(block, source, f"{prefix}.{known.source}", members, len(names))
        out.append(
            _Group(members, None if reason else source, f"{prefix}.{known.source}", reason, _ones(members[0]))
        )
    out += [
        _Group((m,), None, "", "nothing it could be folded into", _ones(m))
        for m in block.matrices
        if m.name not in taken
    ]
    return out


def _ones(matrix: Matrix) -> Tensor:
    return torch.ones(matrix.width, device=matrix.weight.device)


def _unfoldable(block: Any, source: nn.Module, name: str, members: tuple[Matrix, ...], readers: int) -> str:
    """Why a scale of this group cannot go into its source; empty when it can."""
    weight = getattr(source, "weight", None)
    width = members[0].width
    if len(members) < readers:
        return f"another reader of {name} is left uncompressed"
    if weight is None:
        return f"{name} has no weight"
    if weight.ndim == 1:
        if block.block.family.norm_offset:
            return f"{name} multiplies by {block.block.family.norm_offset:g} + its weight"
        return "" if len(weight) == width else f"{name} has {len(weight)} channels for {width} inputs"
    matrix = next((m for m in block.matrices if m.parameter is weight), None)
    if matrix is None:
        return f"{name} is left uncompressed"
    rows = matrix.weight.shape[0]
    return "" if rows == width else f"{name} makes {rows} channels for {width} inputs (grouped queries)"


def _fold(block: Any, groups: list[_Group], exact: dict[str, Tensor]) -> None:
    """Move each foldable scale from the inputs into their source, and prove that the block stays the same.

    exact: float weights of all matrices, changed along. A group whose folding changes the block's output (its
    source does not pass a scale on, as through a squared activation) is put back and keeps it at run time.
    """
    if not block.replays:
        return
    before = block.run(0)
    tolerance = FOLD_TOLERANCE if before.dtype in (torch.float32, torch.float64) else 30 * FOLD_TOLERANCE
    by_parameter = {id(m.parameter): m for m in block.matrices}
    for group in groups:
        if group.source is None or group.alpha == 0:
            continue
        made = by_parameter.get(id(group.source.weight))
        touched = [*group.matrices, *([made] if made else [])]
        floats = {m.name: exact[m.name] for m in touched}
        tensors = [t for t in (group.source.weight, getattr(group.source, "bias", None)) if t is not None]
        kept = [(t, t.data.clone()) for t in (*tensors, *(m.parameter for m in group.matrices))]
        for m in group.matrices:
            exact[m.name] = exact[m.name] * group.scale
        if made:
            exact[made.name] = exact[made.name] / group.scale[:, None]
        for m in touched:
            m.weight.copy_(exact[m.name].to(m.weight.dtype))
        for tensor in tensors[1 if made else 0 :]:
            tensor.data.copy_((tensor.data.float() / group.scale).to(tensor.dtype))
        if (block.run(0) - before).norm() > tolerance * before.norm():
            for tensor, value in kept:
                tensor.data.copy_(value)
            exact.update(floats)
            group.source, group.reason = None, f"folding into {group.source_name} changes the block's output"


METHOD = Method(
    name="awq",
    summary="round after scaling by the inputs' size, searched on a grid",
    defaults={
        "bits": 4,
        "group": 128,
        "clip": True,
        "grid": 20,
        "objective": "output",
        "perpendicular": 1.0,
        "parallel": 1.0,
        "relative": False,
        "sample": 1,
    },
    needs=frozenset({"magnitudes", "moment"}),
    check=_check,
    compress=_compress,
    bytes=rtn.quantized_bytes,
    plain="bits",
)
