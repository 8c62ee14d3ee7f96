"""The laws a dissimilarity of rows may keep: each a statement, and a measure of how far it is broken.

A law takes a dissimilarity δ: (rows, rows) → values and a `Draw` of compositions, and gives the excess by
which each draw breaks it, relative: 0 where it is kept, of order 1 where it is badly broken. So a metric that
declares a law can be tested for it, and one that does not can be shown to fail by the worst draw.

Source: axioms A1–A5 of Theorem 2, Proposition 2 and Corollary 2 of arXiv 2608.14712. Part 0 is the sink.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import combinations
from types import MappingProxyType

import torch
from torch import Tensor

Delta = Callable[[Tensor, Tensor], Tensor]
_NEAR = 1e-9  # relative: what counts as zero when two rows must not be told apart


@dataclass(frozen=True)
class Draw:
    """n independent draws of what the laws speak of, all (n, parts) but alpha (n,); part 0 is the sink."""

    p: Tensor
    q: Tensor
    r: Tensor
    alpha: Tensor
    shuffle: Tensor
    needs_sink: bool = False

    @classmethod
    def random(
        cls, count: int, parts: int, seed: int, *, needs_sink: bool = False, largest: int = 30
    ) -> Draw:
        """Rational rows: whole numbers 1..`largest` over their sum, so that a counter-example can be read."""
        generator = torch.Generator().manual_seed(seed)

        def rows() -> Tensor:
            whole = torch.randint(1, largest + 1, (count, parts), generator=generator).double()
            return whole / whole.sum(-1, keepdim=True)

        alpha = 0.25 + 2.5 * torch.rand(count, generator=generator, dtype=torch.float64)
        shuffle = torch.argsort(torch.rand(count, parts, generator=generator), -1)
        return cls(rows(), rows(), rows(), alpha, shuffle, needs_sink)


@dataclass(frozen=True)
class Law:
    """A law by name, in words, and as `excess(δ, draw)` → (n,) relative violations."""

    name: str
    statement: str
    excess: Callable[[Delta, Draw], Tensor]


def _floored(scale: Tensor) -> Tensor:
    """`scale` as a denominator: a value a million times below the others is rounding, not a law broken."""
    return scale.clamp_min(1e-6 * float(scale.nan_to_num(nan=0.0).max()) + 1e-300)


def _relative(x: Tensor, y: Tensor) -> Tensor:
    scale = x.abs() + y.abs()
    return (x - y).abs() / _floored(scale)


def _closed(x: Tensor) -> Tensor:
    return x / x.sum(-1, keepdim=True)


def _powered(p: Tensor, alpha: Tensor) -> Tensor:
    return torch.softmax(p.log() * alpha[:, None], -1)


def _with_sink(mass: Tensor, p: Tensor) -> Tensor:
    """p with its sink's share set to `mass`, its content as it was."""
    return torch.cat([mass[:, None], (1 - mass)[:, None] * _closed(p[:, 1:])], -1)


def _triangle(delta: Delta, draw: Draw) -> Tensor:
    # A middle row on the way from p to r is where a triangle is tightest; a drawn one is tried as well.
    straight = delta(draw.p, draw.r)
    worst = torch.zeros_like(straight)
    for middle in (draw.q, (draw.p + draw.r) / 2, _closed((draw.p * draw.r).sqrt())):
        detour = delta(draw.p, middle) + delta(middle, draw.r)
        worst = torch.maximum(worst, (straight - detour) / _floored(straight))
    return worst


def _separates(delta: Delta, draw: Draw) -> Tensor:
    """1 where δ cannot tell p from another row: other sink, other temperature, other order of the content."""
    worst = torch.zeros(len(draw.p), dtype=draw.p.dtype)
    turned = torch.cat([draw.p[:, :1], draw.p[:, 1:].roll(1, -1)], -1)
    scale = delta(draw.p, draw.q).clamp_min(1e-300)
    for other in (_with_sink(draw.q[:, 0], draw.p), _powered(draw.p, draw.alpha), turned, draw.p.roll(1, -1)):
        differs = (other - draw.p).abs().amax(-1) > 1e-3
        worst = torch.maximum(worst, (differs & (delta(draw.p, other) < _NEAR * scale)).to(worst.dtype))
    return worst


def _perturbation(delta: Delta, draw: Draw) -> Tensor:
    moved = delta(_closed(draw.r * draw.p), _closed(draw.r * draw.q))
    return _relative(moved, delta(draw.p, draw.q))


def _powering(delta: Delta, draw: Draw) -> Tensor:
    before = delta(draw.p, draw.q)
    worst = torch.zeros_like(before)
    for alpha in (draw.alpha, -draw.alpha):
        after = delta(_powered(draw.p, alpha), _powered(draw.q, alpha))
        worst = torch.maximum(worst, _relative(after, alpha.abs() * before))
    return worst


def _parallelogram(delta: Delta, draw: Draw) -> Tensor:
    v, w, e = draw.p, draw.q, torch.full_like(draw.p, 1 / draw.p.shape[-1])
    diagonals = delta(_closed(v * w), e).square() + delta(_closed(v / w), e).square()
    return _relative(diagonals, 2 * delta(v, e).square() + 2 * delta(w, e).square())


def _permutation(delta: Delta, draw: Draw) -> Tensor:
    shuffled = delta(draw.p.gather(-1, draw.shuffle), draw.q.gather(-1, draw.shuffle))
    return _relative(shuffled, delta(draw.p, draw.q))


def _dominance(delta: Delta, draw: Draw) -> Tensor:
    """Over every proper subcomposition of at least two parts; with a sink, those of sink and two others."""
    parts = range(draw.p.shape[-1])
    whole = delta(draw.p, draw.q)
    worst = torch.zeros_like(whole)
    for size in range(3 if draw.needs_sink else 2, len(parts)):
        for kept in combinations(parts, size):
            if draw.needs_sink and kept[0] != 0:
                continue
            part = delta(_closed(draw.p[:, kept]), _closed(draw.q[:, kept]))
            worst = torch.maximum(worst, (part - whole) / _floored(part))
    return worst


def _sink(delta: Delta, draw: Draw) -> Tensor:
    moved = delta(_with_sink(draw.r[:, 0], draw.p), _with_sink(draw.r[:, 1], draw.q))
    return _relative(moved, delta(draw.p, draw.q))


def _temperature(delta: Delta, draw: Draw) -> Tensor:
    """The smaller of the two margins where a verdict 'is q or r closer to p' turns, else 0."""

    def margin(p: Tensor, q: Tensor, r: Tensor) -> Tensor:
        near, far = delta(p, q), delta(p, r)
        return (near - far) / _floored(near + far)

    before = margin(draw.p, draw.q, draw.r)
    after = margin(*(_powered(x, draw.alpha) for x in (draw.p, draw.q, draw.r)))
    return torch.where(before * after < 0, torch.minimum(before.abs(), after.abs()), 0.0)


LAWS = MappingProxyType(
    {
        law.name: law
        for law in (
            Law("triangle", "A1: δ(p, r) ≤ δ(p, q) + δ(q, r)", _triangle),
            Law("separates", "A1: δ(p, q) = 0 only for p = q", _separates),
            Law("perturbation", "A2: δ(c⊕p, c⊕q) = δ(p, q), a shared logit bias", _perturbation),
            Law("powering", "A3: δ(α⊙p, α⊙q) = |α| δ(p, q), for every real α", _powering),
            Law("parallelogram", "A4: N(v⊕w)² + N(v⊖w)² = 2N(v)² + 2N(w)², N(v) = δ(v, e)", _parallelogram),
            Law(
                "permutation",
                "A5: δ(σp, σq) = δ(p, q) for every σ of all parts, the sink's too",
                _permutation,
            ),
            Law("dominance", "δ of a subcomposition ≤ δ of the whole", _dominance),
            Law("sink", "δ does not depend on the sinks' masses", _sink),
            Law("temperature", "one common temperature keeps every verdict of which is closer", _temperature),
        )
    }
)
