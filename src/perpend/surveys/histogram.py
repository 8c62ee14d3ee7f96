"""Histograms on a fixed logarithmic grid: they merge exactly, whatever the order, and give quantiles.

The grid is the same for every quantity, model and run: `PER_OCTAVE` bins in each factor of two from 2^LOWEST
to 2^HIGHEST, one bin below and one above. A quantile is interpolated inside its bin, so it is off by at most
one bin's width, `RESOLUTION` (4.4 %); a value outside the grid is given as the grid's end.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

LOWEST, HIGHEST, PER_OCTAVE = -20, 20, 16
BINS = (HIGHEST - LOWEST) * PER_OCTAVE + 2
RESOLUTION = 2.0 ** (1 / PER_OCTAVE) - 1


def bins_of(values: Tensor) -> Tensor:
    """The bin of each non-negative value, int64; zero is in the lowest."""
    place = torch.floor((torch.log2(values) - LOWEST) * PER_OCTAVE) + 1
    return place.clamp(0, BINS - 1).long()


def edges() -> np.ndarray:
    """Upper edges of all bins but the last, [BINS - 1]: the bin i holds values in [edge i-1, edge i)."""
    return 2.0 ** (LOWEST + np.arange(BINS - 1) / PER_OCTAVE)


def quantile(counts: np.ndarray, q: float, negative: np.ndarray | None = None) -> np.ndarray:
    """The q-quantile of histograms [..., BINS], of signed values if `negative` counts the magnitudes below 0.

    NaN where a histogram is empty.
    """
    counts = np.asarray(counts, dtype=np.float64)
    below = np.zeros(counts.shape[:-1]) if negative is None else np.asarray(negative, float).sum(-1)
    total = counts.sum(-1) + below
    rank = q * total
    upper = _walk(counts, np.clip(rank - below, 0, None))
    if negative is not None:
        lower = -_walk(np.asarray(negative, dtype=np.float64), np.clip(below - rank, 0, None))
        upper = np.where(rank < below, lower, upper)
    return np.where(total > 0, upper, np.nan)


def _walk(counts: np.ndarray, rank: np.ndarray) -> np.ndarray:
    """The value up to which `rank` of the counts lie, geometrically interpolated inside its bin."""
    cumulative = np.cumsum(counts, -1)
    place = np.minimum((cumulative < rank[..., None]).sum(-1), BINS - 1)
    # an empty bin at the front cannot hold a rank of zero: take the first that is filled
    place = np.maximum(place, np.argmax(counts > 0, -1))[..., None]
    inside = np.take_along_axis(counts, place, -1)
    before = np.take_along_axis(cumulative, place, -1) - inside
    share = np.divide(rank[..., None] - before, inside, out=np.zeros_like(inside), where=inside > 0)
    share = np.clip(share, 0.0, 1.0)
    exponent = LOWEST + np.clip(place - 1 + share, 0, BINS - 2) / PER_OCTAVE
    return (2.0**exponent)[..., 0]
