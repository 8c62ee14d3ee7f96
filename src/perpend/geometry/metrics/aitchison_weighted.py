"""The weighted family d_λ² = d_A⊥² + λ(Δb)²: λ = 0 is the content distance, λ = 1 full d_A (one sink).

Inside a sink block nothing is compared: the block enters by its balance alone. With the sink dropped there is
no balance, and d_λ is the content distance.
Source: arXiv 2608.14712, Appendix E.2.
"""

import math

import torch
from torch import Tensor

from .._rows import Rows
from ..simplex import centred
from ..sink import balance
from . import embedded


def embed(rows: Rows) -> Tensor:
    """(clr of the content, √λ·b)."""
    content = centred(rows.content_logs)
    if rows.policy == "drop":
        return content
    return torch.cat([content, math.sqrt(rows.weight) * balance(rows.logs, rows.sink).unsqueeze(-1)], -1)


METRIC = embedded(
    "aitchison_weighted",
    "d_λ",
    embed=embed,
    laws=frozenset({"triangle", "separates", "perturbation", "powering", "parallelogram", "temperature"}),
    needs_sink=True,
    takes_weight=True,
)
