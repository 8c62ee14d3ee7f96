"""An update against its reference: the part along it and the part across it.

    Δ = Δ∥ + Δ⊥,   Δ∥ = α z,   α = ⟨Δ, z⟩ / ‖z‖²
    cos(x, x+Δ) = sign(1+α) / √(1+ρ²),   ρ = ‖Δ⊥‖ / ‖x+Δ∥‖      (exact; ≈ 1 − ρ²/2 where ρ is small)

Source: the directional-decomposition paper, §3 and its layer-dropping appendix (the second-order form).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ._arrays import Array, Kind, check_numbers, parts
from .simplex import norm


class Decomposition(NamedTuple):
    """Δ∥ and Δ⊥ (..., dim), the signed α and ‖Δ∥‖/‖Δ⊥‖ (...): inf where Δ⊥ = 0, NaN where Δ = 0."""

    parallel: Array
    perpendicular: Array
    alpha: Array
    ratio: Array


class CosineIdentity(NamedTuple):
    """cos(x, x+Δ) measured, by the identity, and to second order; ρ; each of the batch shape (...)."""

    cosine: Array
    exact: Array
    second_order: Array
    rho: Array
    alpha: Array

    @property
    def gap(self) -> Array:
        """exact − second_order: what the approximation 1 − ρ²/2 loses."""
        return self.exact - self.second_order


def decompose(update: Array, reference: Array) -> Decomposition:
    """Split `update` (..., dim) along and across `reference`, broadcasting over batch axes.

    A zero reference gives α = 0 and a zero parallel part. Half precision is computed and returned in float32.
    Raises InputError for NaN, infinity, or different dims.
    """
    kind = Kind.of(update, reference)
    return kind.give(_decompose(*_vectors(kind, update, reference)))


def cosine_identity(update: Array, reference: Array) -> CosineIdentity:
    """cos(x, x+Δ) three ways, for x = reference and Δ = update (..., dim).

    Undefined (NaN) where x = 0 or x + Δ = 0; where 1+α = 0, ρ is infinite and the cosine 0.
    """
    kind = Kind.of(update, reference)
    delta, x = _vectors(kind, update, reference)
    size = _largest(torch.cat(torch.broadcast_tensors(delta, x), -1))
    delta, x = delta / size, x / size  # nothing below depends on their common size
    split = _decompose(delta, x)
    along = norm(x + split.parallel)
    rho = norm(split.perpendicular) / along
    result = x + delta
    return kind.give(
        CosineIdentity(
            cosine=(_unit(x) * _unit(result)).sum(-1),
            exact=torch.where(
                norm(x) > 0, torch.sign(1 + split.alpha) / torch.hypot(torch.ones_like(rho), rho), torch.nan
            ),
            second_order=1 - rho.square() / 2,
            rho=rho,
            alpha=split.alpha,
        )
    )


def _vectors(kind: Kind, update: Array, reference: Array) -> tuple[Tensor, Tensor]:
    delta, z = kind.take(update), kind.take(reference)
    dtype = torch.promote_types(delta.dtype, z.dtype)
    delta, z = delta.to(dtype), z.to(dtype)
    parts(delta, name="update")
    parts(z, name="reference")
    if delta.shape[-1] != z.shape[-1]:
        raise InputError(
            f"update has {delta.shape[-1]} dimensions and reference {z.shape[-1]}: they must agree"
        )
    check_numbers(delta, "update")
    check_numbers(z, "reference")
    return delta, z


def _decompose(delta: Tensor, z: Tensor) -> Decomposition:
    scale = _largest(z)
    direction = z / scale
    square = direction.square().sum(-1, keepdim=True)
    weight = (delta * direction).sum(-1, keepdim=True) / torch.where(square > 0, square, 1.0)
    parallel = weight * direction
    perpendicular = delta - parallel
    size = _largest(delta)
    ratio = norm(parallel / size) / norm(perpendicular / size)
    return Decomposition(parallel, perpendicular, (weight / scale).squeeze(-1), ratio)


def _largest(values: Tensor) -> Tensor:
    """The largest entry (..., 1), 1 where all are zero: divided by it, no square leaves the range."""
    size = values.detach().abs().amax(-1, keepdim=True)
    return torch.where(size > 0, size, 1.0)


def _unit(values: Tensor) -> Tensor:
    return values / norm(values).unsqueeze(-1)
