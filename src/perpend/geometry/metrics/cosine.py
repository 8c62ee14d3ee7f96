"""Cosine dissimilarity 1 − ⟨p, q⟩/(‖p‖‖q‖), computed as half the squared chord between the directions.

The chord keeps the digits of nearly parallel rows that 1 − cos loses.
"""

from ..simplex import unit
from . import embedded

METRIC = embedded(
    "cosine",
    "cosine",
    embed=lambda rows: unit(rows.probabilities),
    finish=lambda chord: chord.square() / 2,
    laws=frozenset({"separates", "permutation"}),
)
