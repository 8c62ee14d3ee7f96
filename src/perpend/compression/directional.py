"""An error split along a direction: the quantities of the compression study, per token.

e = Delta_comp - Delta_base. Along the base update u = Delta_base (or the block input, or x + Delta_base):

    e_par = <e, u>/||u||² u,   e_perp = e - e_par
    eps_perp = ||e_perp|| / ||Delta_base||,  parallel and total likewise
    kappa = <e, u> / (||u|| ||Delta_base||), signed; along the update it is <e, Delta>/||Delta||²
    rotation = cos(u, u + e); along the update (1 + kappa)/sqrt((1 + kappa)² + eps_perp²)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

ALONG = ("update", "input", "output")


@dataclass(frozen=True)
class Split:
    """Per token, [tokens] float64, relative to ||Delta_base||. `defined` False: a norm was zero."""

    perpendicular: Tensor
    parallel: Tensor  # absolute value
    total: Tensor
    kappa: Tensor  # signed parallel
    rotation: Tensor  # cosine
    share: Tensor  # ||e_perp||²/||e||², NaN where e = 0
    defined: Tensor  # bool


def split_error(error: Tensor, update: Tensor, direction: Tensor | None = None) -> Split:
    """Split errors [..., d] against base updates [..., d] along `direction` (None: the update itself)."""
    # float64 throughout: the squares of what float32 holds leave float32's range
    e = error.reshape(-1, error.shape[-1]).double()
    base = update.reshape(-1, update.shape[-1]).double()
    u = base if direction is None else direction.reshape(-1, direction.shape[-1]).double()
    size, length = base.norm(dim=-1), u.norm(dim=-1)
    defined = (size > 0) & (length > 0)
    safe = torch.where(defined, length, 1.0)
    unit = u / safe[:, None]
    along = (e * unit).sum(-1)
    across = (e - along[:, None] * unit).norm(dim=-1)
    total = e.norm(dim=-1)
    rotated = torch.hypot(length + along, across)
    left = rotated > torch.finfo(error.dtype).eps * length  # else what remains is the rounding of e
    cosine = torch.where(left, (length + along) / torch.where(left, rotated, 1.0), torch.nan)
    scale = torch.where(defined, size, 1.0)
    share = torch.where(total > 0, (across / torch.where(total > 0, total, 1.0)).square(), torch.nan)
    parts = (across / scale, along.abs() / scale, total / scale, along / scale, cosine, share)
    return Split(*parts, defined)


def directional_loss(
    error: Tensor,
    update: Tensor,
    *,
    perpendicular: float = 1.0,
    parallel: float = 1.0,
    relative: bool = False,
) -> float:
    """Σ_t perpendicular ‖e⊥‖² + parallel ‖e∥‖², e split along the base update; (1, 1) is the squared L2
    error.

    relative: each token's terms are divided by ‖update‖², so that no token outweighs the others.
    A token with a zero update has no direction: its error counts as perpendicular.
    """
    e = error.reshape(-1, error.shape[-1]).float()
    u = update.reshape(-1, update.shape[-1]).float()
    energy = u.square().sum(-1)
    total = e.square().sum(-1)
    along = (e * u).sum(-1).square() / torch.where(energy > 0, energy, 1.0)
    terms = perpendicular * (total - along).clamp(min=0) + parallel * along
    if relative:
        terms = terms / torch.where(energy > 0, energy, 1.0)
    return float(terms.double().sum())


def isotropic_correlation(width: int, mean: float, variance: float) -> float:
    """Pearson r(‖e⊥‖, ‖e‖) when e has uniformly random directions in `width` dimensions.

    ‖e⊥‖ = ‖e‖ √(1 − B), B ~ Beta(1/2, (width − 1)/2) independent of ‖e‖, whose mean and variance are given.
    It is close to 1 for any large width, which is why a high r says little.
    """
    if variance <= 0 or width < 2:
        return math.nan
    # E√(1 − B) = Γ(d/2)² / (Γ((d − 1)/2) Γ((d + 1)/2))
    root = math.exp(2 * math.lgamma(width / 2) - math.lgamma((width - 1) / 2) - math.lgamma((width + 1) / 2))
    second = (1 - 1 / width) * (variance + mean**2)
    spread = second - (root * mean) ** 2
    return root * variance / math.sqrt(variance * spread)
