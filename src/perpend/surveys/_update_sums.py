"""Per-token numbers of updates and the sums kept of them: what `survey_updates` adds up.

Tokens are kept apart by (position 0 or not) and (of the largest 1 % or not), in four groups; every set of
tokens the survey reports is a union of groups, so nothing is counted twice or measured twice.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from perpend.errors import InputError
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
HISTOGRAMS = tuple(name for name in BINNED if not name.endswith("_negative"))
# sets of tokens as unions of the groups 0 neither, 1 first, 2 top, 3 both
SETS = {"all": (0, 1, 2, 3), "without_first": (0, 2), "without_top": (0, 1), "without_both": (0,)}


# the root of the smallest number: no norm but 0, where α is of no account, lies below it
LEAST_NORM = {
    dtype: math.sqrt(torch.finfo(dtype).tiny * torch.finfo(dtype).eps)
    for dtype in (torch.float32, torch.float64)
}


def _wide(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype in LEAST_NORM else torch.float32


def three_numbers(update: Tensor, reference: Tensor) -> Tensor:
    """‖z‖, <Δ, z> and ‖Δ⊥‖ of vectors [..., d], as [3, ...], in fp32 or better.

    ‖Δ⊥‖ is the norm of Δ − αz itself: ‖Δ‖² − ‖Δ∥‖² would lose it where Δ is nearly parallel to z.
    """
    wide = _wide(update.dtype)
    delta, z = update.to(wide), reference.to(wide)
    norm = torch.linalg.vector_norm(z, dim=-1)
    product = delta * z
    dot = product.sum(-1)
    safe = norm.clamp(min=LEAST_NORM[wide])
    alpha = (dot / safe).div_(safe)  # by ‖z‖ twice, whose square may be below all numbers
    across = torch.addcmul(delta, alpha.unsqueeze(-1), z, value=-1, out=product)
    return torch.stack([norm, dot, torch.linalg.vector_norm(across, dim=-1)])


class Collector:
    """Three numbers a token, layer and part, until a block of sequences is complete."""

    def __init__(self) -> None:
        self.seen: dict[tuple[int, str], list[Tensor]] = {}
        self.width, self.length = 0, 0

    def clear(self) -> None:
        self.seen = {}

    def __call__(self, c: Contribution) -> None:
        self.length, self.width = math.prod(c.reference.shape[1:-1]), c.reference.shape[-1]
        self.seen.setdefault((c.layer, c.part), []).append(three_numbers(c.update, c.reference))

    def reduce(self, real: Tensor | None, sequences: int) -> dict[str, Any]:
        """Sums, counts and filled bins of the collected tokens of so many `sequences`.

        `real` [sequences, T] says which count; None: all do.
        """
        count = sequences * self.length
        if real is None:
            first = torch.zeros(count, dtype=torch.bool)
            first[:: self.length] = True
        else:
            first = first_real(real)[real]
        for (layer, part), seen in self.seen.items():
            if sum(numbers[0].numel() for numbers in seen) != count:
                raise InputError(
                    f"{part} of layer {layer} is not seen once for each of {count} tokens: the model runs "
                    "this block several times, or leaves tokens out; its updates cannot be told apart"
                )
        layers = sorted({layer for layer, _ in self.seen})
        parts = [part for part in PARTS if (layers[0], part) in self.seen]
        together = max(1, TOGETHER // (len(parts) * count))
        a_layer = len(parts) * histogram.BINS
        sums, counts, places, bins = [], [], [], []
        for start in range(0, len(layers), together):
            some = layers[start : start + together]
            added, counted, filled = self._reduced(some, parts, real, first)
            filled = filled.numpy()
            place = np.flatnonzero(filled != 0).astype(np.int32)  # of booleans: NumPy's quick way
            bins.append(filled[place])
            if len(some) < len(layers):  # from [4, BINNED, these layers, P, BINS] to all layers
                table, inside = np.divmod(place, len(some) * a_layer)
                place = (table * len(layers) + start) * a_layer + inside
            places.append(place)
            sums.append(added)
            counts.append(counted)
        return {
            "sums": torch.cat(sums, 1),  # [4, L, P, STATISTICS]
            "counts": torch.cat(counts, 1),
            "bins_at": np.concatenate(places),
            "bins": np.concatenate(bins),
            "padding": count - len(first),
            "width": self.width,
        }

    def _reduced(
        self, layers: Sequence[int], parts: Sequence[str], real: Tensor | None, first: Tensor
    ) -> tuple[Tensor, ...]:
        """`_reduce` of these layers, where the first of them lies, with its results on the CPU."""
        seen = [x.flatten(1) for layer in layers for part in parts for x in self.seen[layer, part]]
        device = seen[0].device
        if device.type == "mps":  # which has no float64
            device = torch.device("cpu")
        three = torch.cat([x.to(device) for x in seen], 1).double()
        three = three.view(3, len(layers), len(parts), -1)
        if real is not None:
            three = three[..., real.reshape(-1).to(device)]
        return tuple(value.cpu() for value in _reduce(three, first.to(device)))


def _reduce(three: Tensor, first: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Sums [4, L, P, STATISTICS], counts [4, L, P, COUNTS], bins [4, BINNED, L, P, BINS] of [3, L, P, N].

    What is not finite or not defined at a token makes NaN or infinity there, which no comparison and no sum
    takes up.
    """
    z, dot, across = three
    finite = torch.isfinite(three.sum(0))
    alpha = dot / z / z
    along = alpha.abs() * z
    size = torch.hypot(along, across)
    least = RELATIVE_ZERO * size
    turn = 1 + alpha
    turned = turn.abs()
    used = finite & (across > least) & (turned > RELATIVE_ZERO)  # neither is true where z = 0
    ratio = along / across
    share = along / size
    rho = across / (turned * z)
    square = rho.square()
    values = {
        "alpha": alpha,
        "ratio": ratio,
        "share": share,
        "energy": share.square(),
        "update_norm": size,
        "reference_norm": z,
        "relative_norm": size / z,
        "rho": rho,
        "cosine": torch.copysign((1 + square).rsqrt(), turn),
        "second_order": 1 - square / 2,
        "alpha_square": alpha.square(),
        "ratio_square": ratio.square(),
        "cotangent": turn * z / across,
    }
    group = first.long() + 2 * _largest(z).long()  # [L, P, N], as in SETS
    inside = group == torch.arange(4, device=group.device).view(-1, 1, 1, 1, 1)  # [4, 1, L, P, N]

    def of_used(names: Sequence[str]) -> Tensor:
        return torch.where(used, torch.stack([values[name] for name in names]), 0.0)

    marks = torch.stack(
        [
            torch.ones_like(used),
            used,
            finite & (z == 0),
            finite & (across <= least),
            finite & (turned <= RELATIVE_ZERO),
            ~finite,
            used & (alpha < -1),
        ]
    )  # [COUNTS, L, P, N]
    sums = torch.where(inside, of_used(STATISTICS), 0.0).sum(-1)  # a product would spread an infinity
    counts = (inside & marks).sum(-1)
    bins = _bins(of_used(HISTOGRAMS), torch.where(used, group, 4))
    return sums.movedim(1, -1), counts.movedim(1, -1), bins


def _largest(norm: Tensor) -> Tensor:
    """True at the ceil(N/TOP) largest of [..., N], of equal ones at the first; NaN is taken for zero."""
    norm = norm.nan_to_num()
    count = -(-norm.shape[-1] // TOP)
    least = norm.topk(count).values[..., -1:]
    above, equal = norm > least, norm == least
    room = count - above.sum(-1, keepdim=True)
    return above | (equal & (equal.cumsum(-1) <= room))


def _bins(numbers: Tensor, group: Tensor) -> Tensor:
    """How many tokens of the groups 0 to 3 lie in each bin, [4, BINNED, L, P, BINS] flat.

    `numbers` [HISTOGRAMS, L, P, N]; a token of group 4 is in none.
    """
    rows = math.prod(group.shape[:-1])
    row = torch.arange(rows, device=group.device).view(*group.shape[:-1], 1)
    line = torch.tensor([BINNED.index(name) for name in HISTOGRAMS], device=group.device).view(-1, 1, 1, 1)
    line = line + (numbers < 0)  # "…_negative" comes next
    place = (group * (len(BINNED) * rows) + row) + line * rows
    place = place.mul_(histogram.BINS).add_(histogram.bins_of(numbers.abs()))
    size = 4 * len(BINNED) * rows * histogram.BINS
    table = torch.zeros(size + size // 4, dtype=torch.int32, device=group.device)
    return table.scatter_add_(0, place.view(-1), table.new_ones(place.numel()))[:size]


def first_real(real: Tensor) -> Tensor:
    """True at the first real token of each sequence."""
    return real & (real.long().cumsum(-1) == 1)
