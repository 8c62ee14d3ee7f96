"""Bootstrap over sequences: the weights that make one resample a mean."""

from __future__ import annotations

import numpy as np


def draws(count: int, resamples: int, seed: int = 0) -> np.ndarray:
    """Bootstrap weights [resamples, count] that average `count` sequences; the same seed, the same draws."""
    generator = np.random.default_rng(seed)
    return generator.multinomial(count, np.full(count, 1 / count), size=resamples) / count
