"""The simplex as a Euclidean space: perturbation, powering, log-ratio coordinates, mean, distance.

A composition is a vector of positive parts that carries only relative information; an attention row is one.
    closure        C(x) = x / Σx
    perturbation   p ⊕ q = C(p·q)          a shared logit bias u acts as ⊕ C(eᵘ)
    powering       α ⊙ p = C(p^α)          a softmax temperature τ acts as (1/τ) ⊙
    clr            clr(p) = log p − mean(log p), a vector of the sum-zero hyperplane
    distance       d_A(p, q) = ‖clr p − clr q‖₂
Log-ratio functions accept any positive vector: they do not see its scale. With `log=True` rows are
log-probabilities (or logits: any constant per row is the same composition), and results that are compositions
come back as log-probabilities, so nothing underflows.

Sources: Aitchison, "The Statistical Analysis of Compositional Data", JRSS B 44(2), 1982; Egozcue et al.,
"Isometric logratio transformations", Math. Geol. 35(3), 2003; Papamichalis, arXiv 2608.14712, Def. 1.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from ..errors import InputError
from ._arrays import Array, Kind, Sink, check_numbers, log_ratios, parts, positive, probabilities, sink_parts


def closure(x: Array, *, log: bool = False) -> Array:
    """C(x) = x / Σx over the last axis.

    x: (..., parts), non-negative with a positive sum; with `log`, log-values, closed by log-softmax.
    Raises InputError for NaN, negative parts and rows without mass.
    """
    kind = Kind.of(x)
    rows = kind.take(x)
    closed = probabilities(rows, log=log)
    return kind.give(torch.log_softmax(rows, -1) if log else closed)


def perturb(p: Array, q: Array, *, log: bool = False) -> Array:
    """p ⊕ q = C(p·q): addition of the simplex; a shared logit bias u perturbs by C(eᵘ) (Proposition 2(i))."""
    kind = Kind.of(p, q)
    x, y = kind.take(p), kind.take(q)
    total = logs(x, log=log, name="p") + logs(y, log=log, name="q")
    return kind.give(_exp_closure(total, log))


def power(p: Array, alpha: Array | float, *, log: bool = False) -> Array:
    """α ⊙ p = C(p^α): scaling of the simplex; temperature τ powers by 1/τ (Proposition 2(ii)).

    alpha: a number, or an array of the batch shape of p (one power a row).
    """
    kind = Kind.of(p, alpha)
    values = logs(kind.take(p), log=log, name="p")
    exponent = kind.take(alpha).to(values.dtype)
    check_numbers(exponent, "alpha")
    return kind.give(_exp_closure(values * (exponent[..., None] if exponent.ndim else exponent), log))


def clr(rows: Array, *, log: bool = False) -> Array:
    """clr(p) = log p − mean(log p), (..., parts) → (..., parts), each row summing to zero."""
    kind = Kind.of(rows)
    return kind.give(centred(logs(kind.take(rows), log=log)))


def clr_inv(coordinates: Array, *, log: bool = False) -> Array:
    """C(exp x): the composition with these clr coordinates; its log-probabilities with `log`."""
    kind = Kind.of(coordinates)
    x = kind.take(coordinates)
    parts(x, name="coordinates")
    check_numbers(x, "coordinates")
    return kind.give(_exp_closure(x, log))


def sink_basis(count: int, sink: Sink = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    """Orthonormal basis (count − 1, count) of the sum-zero hyperplane: the sink against the rest comes first.

    Row 0 is the direction of the sink balance b (Lemma 1; a sequential binary partition, Egozcue et al.
    2003), then pivot coordinates inside the content, then, for a sink block, pivot coordinates inside the
    block. So the first ilr coordinate is b, and for one sink the norm of the others is C_A⊥.
    """
    inside, outside = sink_parts(sink, count)
    r, m = len(inside), count - len(inside)
    basis = torch.zeros(count - 1, count, dtype=torch.float64)
    basis[0, inside] = math.sqrt(r * m / count) / r
    basis[0, outside] = -math.sqrt(r * m / count) / m
    row = 1
    for group in (outside, inside):
        for k in range(len(group) - 1):
            rest = len(group) - k - 1
            basis[row, group[k]] = math.sqrt(rest / (rest + 1))
            basis[row, group[k + 1 :]] = -math.sqrt(rest / (rest + 1)) / rest
            row += 1
    return basis.to(dtype)


def ilr(rows: Array, sink: Sink = 0, *, basis: Array | None = None, log: bool = False) -> Array:
    """Isometric log-ratio coordinates, (..., parts) → (..., parts − 1).

    basis: orthonormal rows of the sum-zero hyperplane, (parts − 1, parts); by default `sink_basis`, whose
    first coordinate is the sink balance b and, for one sink, the norm of the rest C_A⊥.
    """
    kind = Kind.of(rows)
    values = centred(logs(kind.take(rows), log=log))
    return kind.give(values @ _basis(kind, basis, parts(values, 2), sink, values).T)


def ilr_inv(coordinates: Array, sink: Sink = 0, *, basis: Array | None = None, log: bool = False) -> Array:
    """The composition (..., parts) with these ilr coordinates (..., parts − 1); its logs with `log`."""
    kind = Kind.of(coordinates)
    x = kind.take(coordinates)
    check_numbers(x, "coordinates")
    return kind.give(_exp_closure(x @ _basis(kind, basis, parts(x, name="coordinates") + 1, sink, x), log))


def aitchison_mean(rows: Array, axis: int = -2, *, weights: Array | None = None, log: bool = False) -> Array:
    """C(exp(mean log p)): the Fréchet mean under d_A, the signature of a head (Definition 1(a)).

    axis: the batch axis averaged over (not the last, which holds the parts).
    weights: non-negative, of the length of that axis or of the batch shape of rows.
    """
    kind = Kind.of(rows)
    values = logs(kind.take(rows), log=log)
    return kind.give(_exp_closure(_mean(kind, values, axis, weights), log))


def aitchison_distance(p: Array, q: Array, *, log: bool = False) -> Array:
    """d_A(p, q) = ‖clr p − clr q‖₂, broadcasting over batch axes (equation (1))."""
    kind = Kind.of(p, q)
    x, y = logs(kind.take(p), log=log, name="p"), logs(kind.take(q), log=log, name="q")
    same_parts(x, y)
    return kind.give(norm(centred(x) - centred(y)))


def aitchison_variance(
    rows: Array, axis: int = -2, *, weights: Array | None = None, log: bool = False
) -> Array:
    """Total Aitchison variance: mean squared d_A of the rows along `axis` to their mean (Definition 1(e))."""
    kind = Kind.of(rows)
    values = centred(logs(kind.take(rows), log=log))
    spread = values - _mean(kind, values, axis, weights).unsqueeze(_batch_axis(values, axis))
    return kind.give(_mean(kind, spread.square().sum(-1, keepdim=True), axis, weights).squeeze(-1))


def ilr_cosine(p: Array, q: Array, *, log: bool = False) -> Array:
    """ρ_A(p, q) = ⟨clr p, clr q⟩ / (‖clr p‖‖clr q‖), a direction similarity (Definition 1(b)).

    NaN at the uniform row, which has no direction.
    """
    kind = Kind.of(p, q)
    x, y = centred(logs(kind.take(p), log=log, name="p")), centred(logs(kind.take(q), log=log, name="q"))
    same_parts(x, y)
    return kind.give((unit(x) * unit(y)).sum(-1))


class Replaced(NamedTuple):
    """Rows without zeros, and how many there were."""

    rows: Array
    count: int


def replace_zeros(rows: Array, epsilon: float = 1e-6) -> Replaced:
    """Multiplicative replacement: zeros become ε, the other parts of that row shrink by 1 − ε·(its zeros).

    Ratios among the parts that were positive are kept. Only exact zeros are replaced, and they are counted.
    rows: (..., parts), non-negative; they are closed first. Raises InputError where ε·zeros ≥ 1.
    Source: Martín-Fernández, Barceló-Vidal, Pawlowsky-Glahn, Math. Geol. 35(3), 2003.
    """
    kind = Kind.of(rows)
    closed = probabilities(kind.take(rows))
    zero = closed == 0
    share = epsilon * zero.sum(-1, keepdim=True, dtype=closed.dtype)
    if not epsilon > 0 or bool((share >= 1).any()):
        raise InputError(
            f"epsilon {epsilon!r} must be positive and leave mass to the other parts; choose a smaller one"
        )
    return Replaced(kind.give(torch.where(zero, epsilon, closed * (1 - share))), int(zero.sum()))


def logs(rows: Tensor, *, log: bool = False, name: str = "rows") -> Tensor:
    """The logs of checked positive rows, on a scale of their own (`log_ratios`)."""
    return log_ratios(positive(rows, log=log, name=name), log=log)


def centred(ratios: Tensor) -> Tensor:
    """Log-ratios − their mean over the last axis. Their first part is 0: equal parts give exact zeros."""
    return ratios - ratios.mean(-1, keepdim=True)


def norm(values: Tensor) -> Tensor:
    """‖·‖₂ over the last axis, with gradient 0 at 0."""
    return torch.linalg.vector_norm(values, dim=-1)


def unit(values: Tensor) -> Tensor:
    """values / ‖values‖₂ over the last axis; NaN for a zero vector."""
    return values / norm(values).unsqueeze(-1)


def same_parts(x: Tensor, y: Tensor) -> None:
    """Refuse rows with different numbers of parts: broadcasting one over many would be silent nonsense."""
    if x.shape[-1] != y.shape[-1]:
        raise InputError(
            f"rows of {x.shape[-1]} and of {y.shape[-1]} parts cannot be compared: take a common support"
        )


def _exp_closure(values: Tensor, log: bool) -> Tensor:
    return torch.log_softmax(values, -1) if log else torch.softmax(values, -1)


def _basis(kind: Kind, basis: Array | None, count: int, sink: Sink, like: Tensor) -> Tensor:
    if basis is None:
        return sink_basis(count, sink).to(like)
    given = kind.take(basis).to(like)
    tolerance = 1e-8 if like.dtype == torch.float64 else 1e-4
    eye = torch.eye(count - 1).to(like)
    if given.shape != (count - 1, count) or not (
        torch.allclose(given @ given.T, eye, atol=tolerance) and bool((given.sum(-1).abs() < tolerance).all())
    ):
        raise InputError(
            f"basis must hold {count - 1} orthonormal rows of {count} parts that each sum to zero, "
            f"got shape {tuple(given.shape)}; sink_basis makes one"
        )
    return given


def _batch_axis(values: Tensor, axis: int) -> int:
    position = axis + values.ndim if axis < 0 else axis
    if not 0 <= position < values.ndim - 1:
        raise InputError(
            f"axis {axis} is no batch axis of shape {tuple(values.shape)} (the last axis holds the parts)"
        )
    return position


def _mean(kind: Kind, values: Tensor, axis: int, weights: Array | None) -> Tensor:
    position = _batch_axis(values, axis)
    if values.shape[position] == 0:
        raise InputError(f"there is no mean of no rows: axis {axis} of shape {tuple(values.shape)} is empty")
    if weights is None:
        return values.mean(position)
    w = kind.take(weights).to(values.dtype)
    check_numbers(w, "weights")
    if w.ndim == 1:
        w = w.reshape([-1 if k == position else 1 for k in range(values.ndim - 1)])
    try:
        w = w.expand(values.shape[:-1])
    except RuntimeError:
        raise InputError(
            f"weights of shape {tuple(w.shape)} do not fit rows of shape {tuple(values.shape)}"
        ) from None
    total = w.sum(position)
    if bool((w < 0).any()) or bool((total == 0).any()):
        raise InputError("weights must be non-negative and not all zero")
    return (values * w.unsqueeze(-1)).sum(position) / total.unsqueeze(-1)
