"""Fisher–Rao distance 2·arccos BC(p, q), computed as 4·arcsin(h/√2) from the Hellinger distance h.

Exact: 1 − BC = h², so arccos(1 − h²) = 2·arcsin(h/√2), which keeps the digits of nearly equal rows and is an
increasing function of h, so that both metrics order all pairs identically.
"""

import math

from . import embedded
from .hellinger import embed, hellinger

METRIC = embedded(
    "fisher_rao",
    "Fisher–Rao",
    embed=embed,
    finish=lambda chord: 4 * (hellinger(chord) / math.sqrt(2)).clamp_max(1.0).asin(),
    laws=frozenset({"triangle", "separates", "permutation"}),
    orders_like="hellinger",
)
