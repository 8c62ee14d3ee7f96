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
TOGETHER = 2**13  # numbers of one kind that are reduced at once: few operations for short texts, flat memory
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
    product = delta * z
    dot = product.sum(-1)
    alpha = dot / norm.square().clamp_(min=torch.finfo(wide).tiny)  # 0 where z = 0
    across = torch.addcmul(delta, alpha[..., None], z, value=-1, out=product)
    return torch.stack([norm, dot, torch.linalg.vector_norm(across, dim=-1)])


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
        together = max(1, TOGETHER // (len(parts) * len(keep)))
        a_layer = len(parts) * histogram.BINS
        sums, counts, places, bins = [], [], [], []
        for start in range(0, len(layers), together):
            some = layers[start : start + together]
            added, counted, filled = self._reduced(some, parts, keep, first)
            place = filled.reshape(-1).nonzero()[:, 0]
            bins.append(filled.reshape(-1)[place])
            if len(some) < len(layers):  # from [4, BINNED, these layers, P, BINS] to all layers
                table, inside = place // (len(some) * a_layer), place % (len(some) * a_layer)
                place = (table * len(layers) + start) * a_layer + inside
            places.append(place)
            sums.append(added)
            counts.append(counted)
        return {
            "sums": torch.cat(sums, 1),  # [4, L, P, STATISTICS]
            "counts": torch.cat(counts, 1),
            "bins_at": torch.cat(places).to(torch.int32),
            "bins": torch.cat(bins).to(torch.int32),
            "padding": len(keep) - len(first),
            "width": self.width,
        }

    def _reduced(
        self, layers: Sequence[int], parts: Sequence[str], keep: Tensor, first: Tensor
    ) -> tuple[Tensor, ...]:
        """`_reduce` of these layers, where the first of them lies, with its results on the CPU."""
        batches = [[x.reshape(3, -1) for x in self.seen[layer, part]] for layer in layers for part in parts]
        device = batches[0][0].device
        if device.type == "mps":  # which has no float64
            device = torch.device("cpu")
        three = torch.stack([torch.cat([x.to(device) for x in batch], 1) for batch in batches], 1)
        three = three[..., keep.to(device)].double().unflatten(1, (len(layers), len(parts)))
        return tuple(value.cpu() for value in _reduce(three, first.to(device)))


def _reduce(three: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [4, L, P, STATISTICS], counts [4, L, P, COUNTS], bins [4, BINNED, L, P, BINS] of [3, L, P, N]."""
    z, dot, across = three
    count = z.shape[-1]
    finite = torch.isfinite(three).all(0)
    nonzero = z > 0
    safe = torch.where(nonzero, z, 1.0)
    alpha = torch.where(nonzero, dot / safe / safe, 0.0)
    along = alpha.abs() * z
    size = torch.hypot(along, across)
    no_across = across <= RELATIVE_ZERO * size
    turn = 1 + alpha
    reversal = turn.abs() <= RELATIVE_ZERO
    used = finite & nonzero & ~no_across & ~reversal
    rho = across / (turn.abs() * safe)
    safe_across = torch.where(no_across, 1.0, across)
    ratio = along / safe_across
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
        "cotangent": turn * safe / safe_across,
        "cosine": torch.sign(turn) / torch.hypot(torch.ones_like(rho), rho),
        "second_order": 1 - rho.square() / 2,
        "alpha_square": alpha.square(),
        "ratio_square": ratio.square(),
    }
    top = torch.zeros_like(used)
    order = torch.argsort(torch.nan_to_num(z), dim=-1, descending=True, stable=True)
    top.scatter_(-1, order[..., : -(-count // TOP)], True)
    group = first.long() + 2 * top.long()  # [L, P, N], as in SETS

    marks = torch.stack(
        [
            torch.ones_like(used),
            used,
            finite & ~nonzero,
            finite & nonzero & no_across,
            finite & reversal,
            ~finite,
            used & (alpha < -1),
        ],
        -2,
    )  # [L, P, COUNTS, N]
    numbers = torch.stack([values[name] for name in STATISTICS], -2)
    inside = torch.stack([group == g for g in range(4)]).unsqueeze(-2)  # [4, L, P, 1, N]
    sums = torch.where(inside & used.unsqueeze(-2), numbers, 0.0).sum(-1)
    return sums, (inside & marks).sum(-1), _bins(values, group, used)


def _bins(values: dict[str, Tensor], group: Tensor, used: Tensor) -> Tensor:
    """How many used tokens of each group lie in each bin, [4, BINNED, L, P, BINS]."""
    shape = (4, len(BINNED), *group.shape[:-1], histogram.BINS)
    names = [name for name in BINNED if not name.endswith("_negative")]
    numbers = torch.stack([values[name] for name in names])

    def of_name(known: Sequence[int]) -> Tensor:
        return torch.tensor(known, device=group.device).view(-1, 1, 1, 1)

    signed = of_name([f"{name}_negative" in BINNED for name in names])
    quantity = of_name([BINNED.index(name) for name in names]) + (signed & (numbers < 0))
    row = torch.arange(math.prod(shape[2:-1]), device=group.device).view(*shape[2:-1], 1)
    row = (group * len(BINNED) + quantity) * row.numel() + row
    place = row * histogram.BINS + histogram.bins_of(torch.where(used, numbers.abs(), 1.0))
    return torch.bincount(place[used.expand_as(place)], minlength=math.prod(shape)).reshape(shape)


def first_real(real: Tensor) -> Tensor:
    """True at the first real token of each sequence."""
    return real & (real.long().cumsum(-1) == 1)
