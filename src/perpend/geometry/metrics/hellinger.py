"""Hellinger distance √(1 − BC(p, q)), BC = Σ√(pᵢqᵢ), computed as ‖√p − √q‖₂/√2.

The last seven bits are rounded away (a relative 4e-15): see `coarse` and fisher_rao.
"""

import math

import torch
from torch import Tensor

from .._rows import Rows
from . import embedded


def embed(rows: Rows) -> Tensor:
    """√p, a point of the unit sphere; from the logs where the rows are logs."""
    p = rows.probabilities
    # The root of zero has no gradient; the zero itself keeps its place.
    return torch.where(p > 0, torch.where(p > 0, p, 1.0).sqrt(), 0.0)


def coarse(distance: Tensor) -> Tensor:
    """`distance` on a grid of 46 bits (Veltkamp's splitting), so that what is built on it orders as it does.

    Two Hellinger distances that differ, differ then by 2⁻⁴⁶ at least; 2·arccos keeps such a gap (its relative
    slope is at least 1) far above its own rounding, so both metrics order, and tie, all pairs identically.
    """
    lifted = distance.detach() * (2.0**7 + 1)
    grid = lifted - (lifted - distance.detach())
    return grid + (distance - distance.detach()) if distance.requires_grad else grid


def hellinger(chord: Tensor) -> Tensor:
    """√(1 − BC) from the chord ‖√p − √q‖₂."""
    return coarse(chord / math.sqrt(2))


METRIC = embedded(
    "hellinger",
    "Hellinger",
    embed=embed,
    finish=hellinger,
    laws=frozenset({"triangle", "separates", "permutation"}),
)
