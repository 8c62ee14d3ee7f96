"""The sink against the rest of a row: mass, balance, and the content whatever the sink takes.

A row with sink part 0 is p = (s, (1−s)π): s the sink's share, π the content composition. Lemma 1:
    d_A(p, q)² = d_A⊥(p, q)² + (b(p) − b(q))²
with one sink; a sink block of r parts adds d_A(sink subcompositions)². `sink`: an index or a list of indices.

Source: Papamichalis, arXiv 2608.14712, Definition 1(c, d), Lemma 1, Appendix C.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ._arrays import Array, Kind, Sink, log_ratios, parts, positive, probabilities, sink_parts
from .simplex import centred, logs, norm, same_parts


def sink_mass(rows: Array, sink: Sink = 0, *, log: bool = False) -> Array:
    """s = the sum of the sink's parts, (..., parts) → (...). Rows must sum to one (any logits with `log`)."""
    kind = Kind.of(rows)
    p = probabilities(kind.take(rows), log=log, room=kind.room)
    return kind.give(p[..., sink_parts(sink, parts(p, 2))[0]].sum(-1))


def sink_balance(rows: Array, sink: Sink = 0, *, log: bool = False) -> Array:
    """b(p) = √(r(D−r)/D) · log(g(sink) / g(content)), g geometric mean; √((D−1)/D)·log(p₀/g) for one."""
    kind = Kind.of(rows)
    return kind.give(balance(logs(kind.take(rows), log=log), sink))


def content(rows: Array, sink: Sink = 0, *, log: bool = False) -> Array:
    """π: the row without the sink's parts, re-closed, (..., parts) → (..., parts − r).

    Zeros are allowed, a content without mass is not (with `log` it has mass however small it is).
    """
    kind = Kind.of(rows)
    x = kind.take(rows)
    if log:
        return kind.give(torch.log_softmax(drop(_finite_rows(x), sink), -1))
    return kind.give(probabilities(drop(probabilities(x), sink), name="content of rows"))


def content_distance(p: Array, q: Array, sink: Sink = 0, *, log: bool = False) -> Array:
    """d_A⊥(p, q) = d_A of the content subcompositions, whatever the sinks' masses (Proposition 2(iii))."""
    kind = Kind.of(p, q)
    x, y = positive(kind.take(p), log=log, name="p"), positive(kind.take(q), log=log, name="q")
    same_parts(x, y)
    return kind.give(norm(_content_clr(x, sink, log) - _content_clr(y, sink, log)))


def content_dispersion(rows: Array, sink: Sink = 0, *, log: bool = False) -> Array:
    """C_A⊥(p) = ‖clr(π)‖₂, the Aitchison distance of the content to the uniform one.

    It orders by log-ratio dispersion, not by majorization (Remark 1): no substitute for the content entropy.
    """
    kind = Kind.of(rows)
    return kind.give(norm(_content_clr(positive(kind.take(rows), log=log), sink, log)))


def drop(values: Tensor, sink: Sink) -> Tensor:
    """The columns of the content, of rows or of their logs (not re-closed)."""
    inside, outside = sink_parts(sink, parts(values, 2))
    if inside == list(range(len(inside))):
        return values[..., len(inside) :]
    return values[..., outside]


def balance(log_rows: Tensor, sink: Sink) -> Tensor:
    """√(r(D−r)/D) · (mean log sink − mean log content)."""
    inside, outside = sink_parts(sink, parts(log_rows, 2))
    r, m = len(inside), len(outside)
    return math.sqrt(r * m / (r + m)) * (log_rows[..., inside].mean(-1) - log_rows[..., outside].mean(-1))


def _content_clr(rows: Tensor, sink: Sink, log: bool) -> Tensor:
    return centred(log_ratios(drop(rows, sink), log=log))


def _finite_rows(log_rows: Tensor) -> Tensor:
    probabilities(log_rows, log=True)
    return log_rows
