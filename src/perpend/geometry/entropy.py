"""Shannon entropy of a row, and its exact split into a sink and a content part.

    H(p) = −Σ pᵢ log pᵢ  (nats)        H(p) = H_b(s) + (1−s) H(π),   H_b(s) = −s log s − (1−s) log(1−s)

A growing sink drives H down whatever the content does; the split says which of the two moved.
Source: the chain rule; Papamichalis, arXiv 2608.14712, Proposition 1, Corollary 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ._arrays import Array, Kind, Sink, closed_logs, parts, sink_parts
from .sink import drop


class SplitEntropy(NamedTuple):
    """total = binary + (1 − sink_mass)·content, each of the rows' batch shape, nats (sink_mass a share)."""

    total: Array
    binary: Array
    content: Array
    sink_mass: Array

    @property
    def weighted_content(self) -> Array:
        """(1−s)·H(π), what the content adds to the total; the term whose mean over rows adds up."""
        return (1 - self.sink_mass) * self.content


def entropy(rows: Array, *, log: bool = False) -> Array:
    """H(p) = −Σ pᵢ log pᵢ in nats, (..., parts) → (...); zeros add nothing. Rows must sum to one."""
    kind = Kind.of(rows)
    return kind.give(_entropy(*closed_logs(kind.take(rows), log=log, room=kind.room)))


def split_entropy(rows: Array, sink: Sink = 0, *, log: bool = False) -> SplitEntropy:
    """H(p), H_b(s), H(π) and s of each row. H_b takes the masses of sink *and* content: exact at s → 1.

    With a sink block the total also holds s·H(sink subcomposition); it is then total = binary + s·H(sink) +
    (1−s)·H(π), and `total − binary − weighted_content` is that third term.
    Raises InputError for rows that do not sum to one, and for a content without mass (pass log=True there).
    """
    kind = Kind.of(rows)
    x = kind.take(rows)
    p, log_p = closed_logs(x, log=log, room=kind.room)
    inside, _ = sink_parts(sink, parts(p, 2))
    if log:
        log_content = torch.log_softmax(x, -1)
        log_content = drop(log_content, sink)
        pi, log_pi = closed_logs(log_content, log=True, name="content of rows")
        log_c = torch.logsumexp(log_content, -1)
        s, c = p[..., inside].sum(-1), log_c.exp()
        binary = -_xlogx(s) - c * log_c
    else:
        pi_mass = drop(p, sink)
        pi, log_pi = closed_logs(pi_mass, name="content of rows")
        s, c = p[..., inside].sum(-1), pi_mass.sum(-1)
        binary = -_xlogx(s) - _xlogx(c)
    return kind.give(SplitEntropy(_entropy(p, log_p), binary, _entropy(pi, log_pi), s))


def _entropy(p: Tensor, log_p: Tensor) -> Tensor:
    return -(p * log_p).sum(-1)


def _xlogx(x: Tensor) -> Tensor:
    return x * torch.where(x > 0, x, 1.0).log()
