"""Euclidean distance ‖p − q‖₂ of the rows themselves."""

from . import embedded

METRIC = embedded(
    "euclidean",
    "Euclidean",
    embed=lambda rows: rows.probabilities,
    laws=frozenset({"triangle", "separates", "permutation"}),
)
