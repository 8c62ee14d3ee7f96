"""Aitchison distance d_A(p, q) = ‖clr p − clr q‖₂; with the sink dropped, the content distance."""

from ..simplex import centred
from . import embedded

METRIC = embedded(
    "aitchison",
    "d_A",
    embed=lambda rows: centred(rows.logs),
    laws=frozenset(
        {
            "triangle",
            "separates",
            "perturbation",
            "powering",
            "parallelogram",
            "permutation",
            "dominance",
            "temperature",
        }
    ),
)
