"""Synthetic attention rows: sinks of a given mean mass over Dirichlet content.

    p = (s, (1−s)π),   s ~ N(s̄, sd) clipped to [0.02, 0.98],   π ~ Dirichlet(α·1)

The content is clipped at 1e-12 and re-closed before p is built, so both conventions see the same content.
Source: Appendix E.4 of the attention-rows paper.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

CLIP = 1e-12
SINK_RANGE = (0.02, 0.98)
PARTS = 64


def closed_content(content: np.ndarray) -> np.ndarray:
    """Content without zeros: clipped at 1e-12 and re-closed."""
    clipped = np.clip(content, CLIP, None)
    return clipped / clipped.sum(-1, keepdims=True)


def with_sink(mass: np.ndarray, content: np.ndarray) -> np.ndarray:
    """(s, (1−s)π) for masses (n,) and content (n, parts − 1)."""
    return np.concatenate([mass[:, None], (1 - mass)[:, None] * content], axis=1)


def rows(
    generator: np.random.Generator,
    count: int,
    sink: float,
    alpha: float,
    *,
    spread: float = 0.10,
    parts: int = PARTS,
) -> np.ndarray:
    """(count, parts) rows of mean sink mass `sink` and Dirichlet(α) content; part 0 is the sink."""
    mass = generator.normal(sink, spread, count).clip(*SINK_RANGE)
    return with_sink(mass, closed_content(generator.dirichlet(np.full(parts - 1, alpha), count)))


def chunks(count: int, size: int = 500) -> Iterator[int]:
    """`count` cut into pieces of at most `size`: 500 rows of 64 parts stay in the cache of one core.

    Arrays of that size are also below torch's own threading, which costs more than it gives here.
    """
    for start in range(0, count, size):
        yield min(size, count - start)
