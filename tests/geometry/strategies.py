"""Rows where arithmetic is hard (nearly equal, s → 1), as Hypothesis strategies; what a metric asks for."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

import perpend.geometry as g

SEEDS = st.integers(0, 2**32 - 1)
METRICS = list(g.METRICS)
POLICIES = ("keep", "drop")


def softmax(logits: np.ndarray) -> np.ndarray:
    """Rows from logits, in float64, with no part rounded to zero for logits within ±300."""
    shifted = np.exp(logits - logits.max(-1, keepdims=True))
    return shifted / shifted.sum(-1, keepdims=True)


@st.composite
def rows(draw: st.DrawFn, count: int = 2, least: int = 2, most: int = 12, spread: float = 20.0) -> np.ndarray:
    """(count, parts): ordinary rows, nearly equal ones, or rows whose sink takes all but little."""
    parts = draw(st.integers(least, most))
    generator = np.random.default_rng(draw(SEEDS))
    logits = generator.normal(0, draw(st.floats(0.01, spread)), (count, parts)).clip(-200, 200)
    kind = draw(st.sampled_from(["ordinary", "nearly equal", "sink takes all", "nearly uniform"]))
    if kind == "nearly equal":
        logits = logits[:1] + 10.0 ** draw(st.integers(-15, -3)) * generator.normal(size=(count, parts))
    elif kind == "sink takes all":
        logits[:, 0] = logits[:, 1:].max(-1) + generator.uniform(20, 45, count)
    elif kind == "nearly uniform":
        logits *= 1e-9
    return softmax(logits)


def weights(name: str) -> tuple[float | None, ...]:
    return (0.5, 9.0) if g.METRICS[name].takes_weight else (None,)


def options(name: str, policy: str = "keep") -> dict:
    sink = 0 if g.METRICS[name].needs_sink or policy == "drop" else None
    return {"metric": name, "sink": sink, "policy": policy, "weight": weights(name)[0]}
