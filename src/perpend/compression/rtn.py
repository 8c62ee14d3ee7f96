"""Round to nearest: each group of consecutive inputs of an output row gets its own scale and zero point."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perpend.compression.matrices import Matrix, kept_name
from perpend.compression.method import Method, Settings
from perpend.errors import InputError

SMALLER = (64, 32)  # groups tried when the one asked for does not divide the width


def group_of(name: str, width: int, wanted: int) -> int:
    """The group size used for a width: `wanted`, or the largest of 64 and 32 below it that divides the width.

    wanted 0: one group per output row. InputError when none divides, naming the matrix, and below 0.
    """
    if wanted < 0:
        raise InputError(f"group must be a number of inputs, or 0 for one group per row, got {wanted}")
    if wanted == 0:
        return width
    for size in (wanted, *(s for s in SMALLER if s < wanted)):
        if width % size == 0:
            return size
    raise InputError(
        f"{name} has {width} input features, which no group of {wanted}"
        f"{''.join(f' or {s}' for s in SMALLER if s < wanted)} divides; "
        f"choose a group that does, group=0 for one per row, or leave the matrix out with "
        f"keep={kept_name(name)!r}"
    )


def quantize(weight: Tensor, bits: int, group: int, shrink: Tensor | float = 1.0) -> Tensor:
    """Fake quantization: weight [out, in] on a grid of 2**bits levels per group, back in its own dtype.

    Asymmetric: the range of a group is [min, max] of its weights and always includes 0, which stays exactly
    representable. shrink: factor on the range, a number or [out, in/group, 1]; what lies outside is clamped.
    """
    grouped = weight.float().reshape(weight.shape[0], -1, group)
    low = grouped.amin(-1, keepdim=True).clamp(max=0) * shrink
    high = grouped.amax(-1, keepdim=True).clamp(min=0) * shrink
    levels = 2**bits - 1
    step = (high - low) / levels
    step = torch.where(step > 0, step, torch.ones_like(step))  # a group of zeros: any step gives zeros
    zero = (-low / step).round()
    codes = ((grouped / step).round() + zero).clamp(0, levels)
    return ((codes - zero) * step).reshape(weight.shape).to(weight.dtype)


def quantized_bytes(matrix: Matrix, settings: Settings) -> float:
    """Codes, and per group a 16-bit step and a zero point of as many bits as a code."""
    rows, width = matrix.weight.shape
    groups = rows * width / group_of(matrix.name, width, settings["group"])
    return (rows * width * settings["bits"] + groups * (16 + settings["bits"])) / 8


def check(matrix: Matrix, settings: Settings) -> None:
    """InputError naming the matrix when no group divides its width, or the bits make no grid."""
    if not 1 <= settings["bits"] <= 16:
        raise InputError(f"bits must lie in 1..16, got {settings['bits']}")
    group_of(matrix.name, matrix.width, settings["group"])


def _compress(block: Any, settings_of: Any) -> dict[str, dict[str, Any]]:
    facts = {}
    for matrix in block.matrices:
        settings = settings_of(matrix)
        group = group_of(matrix.name, matrix.width, settings["group"])
        matrix.weight.copy_(quantize(matrix.weight, settings["bits"], group))
        facts[matrix.name] = {"bits": settings["bits"], "group": group}
    return facts


METHOD = Method(
    name="rtn",
    summary="round to nearest, asymmetric, in groups",
    defaults={"bits": 4, "group": 128},
    needs=frozenset(),
    check=check,
    compress=_compress,
    bytes=quantized_bytes,
    plain="bits",
)
