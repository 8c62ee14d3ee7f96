"""Is the entropy of attention rows falling because the content narrows, or because the sink grows?

Two readings of the same layers (or checkpoints): the row entropy H and the content entropy H(π). They
*disagree* on a step where they move in opposite directions; H = H_b(s) + (1−s)H(π) says why.

Source: "Which Question Is Your Attention Metric Answering?", Proposition 1, Corollary 1, Table 2 (last
column) and Appendix E.5 (2), whose form compares H with −C_A⊥.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Disagreement:
    """Steps between neighbours on which two curves move in opposite directions.

    `rate` is a fraction of `steps`, the steps both of whose ends are defined; `where` holds the index of the
    first end of each disagreeing step. `rate` is NaN without a step.
    """

    rate: float
    steps: int
    where: tuple[int, ...]


def disagreement(first: Sequence[float], second: Sequence[float]) -> Disagreement:
    """Compare the directions of two curves (n,) step by step; NaN marks an undefined point."""
    a, b = np.diff(np.asarray(first, np.float64)), np.diff(np.asarray(second, np.float64))
    defined = np.isfinite(a) & np.isfinite(b)
    opposite = defined & (np.sign(a) * np.sign(b) < 0)
    steps = int(defined.sum())
    rate = float(opposite.sum() / steps) if steps else float("nan")
    return Disagreement(rate, steps, tuple(int(i) for i in np.flatnonzero(opposite)))


def entropy_disagreement(total: Sequence[float], content: Sequence[float]) -> Disagreement:
    """H against H(π), by layer (Table 2)."""
    return disagreement(total, content)


def dispersion_disagreement(total: Sequence[float], dispersion: Sequence[float]) -> Disagreement:
    """H against −C_A⊥, by layer (Appendix E.5): a wider spread of log-ratios reads as a lower entropy."""
    return disagreement(total, -np.asarray(dispersion, np.float64))
