"""Content distance d_A⊥(p, q): d_A of the content subcompositions, the same with the sink kept or dropped."""

from ..simplex import centred
from . import embedded

METRIC = embedded(
    "content",
    "d_A⊥",
    embed=lambda rows: centred(rows.content_logs),
    laws=frozenset(
        {"triangle", "perturbation", "powering", "parallelogram", "dominance", "sink", "temperature"}
    ),
    needs_sink=True,
)
