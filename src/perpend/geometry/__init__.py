"""Attention rows as compositions, updates as along and across: pure functions of arrays.

Arrays of shape (..., parts) or (..., dim); NumPy or torch in, the same kind out, batch axes kept, gradients
kept for torch. Input is checked: a zero, a negative, a NaN, a row that should sum to one and does not, are
InputErrors that say what to do. Rows may be given as log-probabilities or logits everywhere (`log=True`), so
that nothing underflows.
"""

from ._arrays import Array, Sink
from .dissimilarity import METRICS, Metric, dissimilarities, dissimilarity, metric_named, pairwise
from .entropy import SplitEntropy, entropy, split_entropy
from .projection import CosineIdentity, Decomposition, cosine_identity, decompose
from .simplex import (
    Replaced,
    aitchison_distance,
    aitchison_mean,
    aitchison_variance,
    closure,
    clr,
    clr_inv,
    ilr,
    ilr_cosine,
    ilr_inv,
    perturb,
    power,
    replace_zeros,
    sink_basis,
)
from .sink import content, content_dispersion, content_distance, sink_balance, sink_mass

__all__ = [
    "METRICS",
    "Array",
    "CosineIdentity",
    "Decomposition",
    "Metric",
    "Replaced",
    "Sink",
    "SplitEntropy",
    "aitchison_distance",
    "aitchison_mean",
    "aitchison_variance",
    "closure",
    "clr",
    "clr_inv",
    "content",
    "content_dispersion",
    "content_distance",
    "cosine_identity",
    "decompose",
    "dissimilarities",
    "dissimilarity",
    "entropy",
    "ilr",
    "ilr_cosine",
    "ilr_inv",
    "metric_named",
    "pairwise",
    "perturb",
    "power",
    "replace_zeros",
    "sink_balance",
    "sink_basis",
    "sink_mass",
    "split_entropy",
]
