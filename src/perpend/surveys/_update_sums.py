"""Per-token numbers of updates and the sums kept of them: what `survey_updates` adds up.

Tokens are kept apart by (position 0 or not) and (of the largest 1 % or not), in four groups; every set of
tokens the survey reports is a union of groups, so nothing is counted twice or measured twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from perpend.models.layout import PARTS
from perpend.models.stream import Contribution
from perpend.surveys import histogram

BLOCK = 32  # sequences whose sums are kept together
TOP = 100  # one token in so many has the largest norm
RELATIVE_ZERO = 2.0**-20  # fp32 cannot tell a smaller part of a vector from rounding

STATISTICS = (
    "alpha",
    "ratio",
    "share",
    "energy",
    "update_norm",
    "reference_norm",
    "relative_norm",
    "rho",
    "cosine",
    "second_order",
    "alpha_square",
    "ratio_square",
)
COUNTS = ("tokens", "used", "zero_reference", "no_perpendicular", "reversal", "not_finite", "turned")
BINNED = (
    "ratio",
    "alpha",
    "alpha_negative",
    "update_norm",
    "reference_norm",
    "relative_norm",
    "cotangent",  # sign(1+α)/ρ, from which ρ and the cosine follow
    "cotangent_negative",
)
# sets of tokens as unions of the groups 0 neither, 1 first, 2 top, 3 both
SETS = {"all": (0, 1, 2, 3), "without_first": (0, 2), "without_top": (0, 1), "without_both": (0,)}


def three_numbers(update: Tensor, reference: Tensor) -> Tensor:
    """‖z‖, <Δ, z> and ‖Δ⊥‖ of vectors [..., d], as [3, ...], in fp32 or better.

    ‖Δ⊥‖ is the norm of Δ − αz itself: ‖Δ‖² − ‖Δ∥‖² would lose it where Δ is nearly parallel to z.
    """
    wide = torch.promote_types(update.dtype, torch.float32)
    delta, z = update.to(wide), reference.to(wide)
    norm = torch.linalg.vector_norm(z, dim=-1)
    dot = torch.linalg.vecdot(delta, z)
    alpha = torch.where(norm > 0, dot / norm.square(), 0.0)
    across = torch.linalg.vector_norm(torch.addcmul(delta, alpha[..., None], z, value=-1), dim=-1)
    return torch.stack([norm, dot, across])


class Collector:
    """Three numbers a token, layer and part, until a block of sequences is complete."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str], list[Tensor]] = {}
        self.width, self.shape = 0, (0, 0)

    def clear(self) -> None:
        self.seen = {}

    def __call__(self, c: Contribution) -> None:
        numbers = three_numbers(c.update, c.reference)
        self.width, self.shape = c.reference.shape[-1], tuple(numbers.shape[1:])
        self.seen.setdefault((c.layer, c.part), []).append(numbers)

    def reduce(self, real: Sequence[Tensor]) -> dict[str, Any]:
        """Sums, counts and filled bins of the collected tokens; `real` [B, T] a batch says which count."""
        layers = sorted({layer for layer, _ in self.seen})
        parts = [part for part in PARTS if (layers[0], part) in self.seen]
        keep = torch.cat([batch.reshape(-1) for batch in real])
        first = torch.cat([first_real(batch).reshape(-1) for batch in real])[keep]
        sums, counts, bins = [], [], []
        for layer in layers:
            three = torch.stack(
                [torch.cat([x.reshape(3, -1) for x in self.seen[layer, part]], 1) for part in parts], 1
            )
            if three.device.type == "mps":
                three = three.cpu()
            reduced = _reduce(three.double()[..., keep.to(three.device)], first.to(three.device))
            for collected, value in zip((sums, counts, bins), reduced):
                collected.append(value.cpu())
        filled = torch.stack(bins, 2)  # [4, BINNED, L, P, BINS]
        where = filled.reshape(-1).nonzero()[:, 0]
        return {
            "sums": torch.stack(sums, 1),  # [4, L, P, STATISTICS]
            "counts": torch.stack(counts, 1),
            "bins_at": where.to(torch.int32),
            "bins": filled.reshape(-1)[where].to(torch.int32),
            "padding": int((~keep).sum()),
            "width": self.width,
        }


def _reduce(three: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [4, P, STATISTICS], counts [4, P, COUNTS], bins [4, BINNED, P, BINS] of [3, P, N] numbers."""
    z, dot, across = three
    count = z.shape[-1]
    finite = torch.isfinite(three).all(0)
    nonzero = z > 0
    safe = torch.where(nonzero, z, 1.0)
    alpha = torch.where(nonzero, dot / safe / safe, 0.0)
    along = alpha.abs() * z
    size = torch.hypot(along, across)
    no_across = across <= RELATIVE_ZERO * size
    reversal = (1 + alpha).abs() <= RELATIVE_ZERO
    used = finite & nonzero & ~no_across & ~reversal
    rho = across / ((1 + alpha).abs() * safe)
    ratio = along / torch.where(no_across, 1.0, across)
    share = along / torch.where(size > 0, size, 1.0)
    values = {
        "alpha": alpha,
        "ratio": ratio,
        "share": share,
        "energy": share.square(),
        "update_norm": size,
        "reference_norm": z,
        "relative_norm": size / safe,
        "rho": rho,
        "cotangent": (1 + alpha) * safe / torch.where(no_across, 1.0, across),
        "cosine": torch.sign(1 + alpha) / torch.hypot(torch.ones_like(rho), rho),
        "second_order": 1 - rho.square() / 2,
        "alpha_square": alpha.square(),
        "ratio_square": ratio.square(),
    }
    top = torch.zeros_like(used)
    order = torch.argsort(torch.nan_to_num(z), dim=-1, descending=True, stable=True)
    top.scatter_(-1, order[..., : -(-count // TOP)], True)
    group = first.long() + 2 * top.long()  # [P, N], as in SETS

    marks = (
        torch.ones_like(used),
        used,
        finite & ~nonzero,
        finite & nonzero & no_across,
        finite & reversal,
        ~finite,
        used & (alpha < -1),
    )
    sums, counts = [], []
    for g in range(4):
        inside = group == g
        member = inside & used
        sums.append(torch.stack([torch.where(member, values[s], 0.0).sum(-1) for s in STATISTICS], -1))
        counts.append(torch.stack([(inside & mark).sum(-1) for mark in marks], -1))
    return torch.stack(sums), torch.stack(counts), _bins(values, group, used)


def _bins(values: dict[str, Tensor], group: Tensor, used: Tensor) -> Tensor:
    parts = group.shape[0]
    part = torch.arange(parts, device=group.device)[:, None]
    flat = []
    for q, name in enumerate(BINNED):
        base = name.removesuffix("_negative")
        value, chosen = values[base], used
        if f"{base}_negative" in BINNED:
            chosen = used & ((value < 0) == name.endswith("_negative"))
        place = histogram.bins_of(torch.where(chosen, value.abs(), 1.0))
        flat.append((((group * len(BINNED) + q) * parts + part) * histogram.BINS + place)[chosen])
    shape = (4, len(BINNED), parts, histogram.BINS)
    return torch.bincount(torch.cat(flat), minlength=math.prod(shape)).reshape(shape)


def first_real(real: Tensor) -> Tensor:
    """True at the first real token of each sequence."""
    return real & (real.long().cumsum(-1) == 1)
