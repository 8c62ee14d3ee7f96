"""Wanda: a weight's score is |W_ij| ‖X_j‖₂, compared within its output row; no weight is updated.

Sun et al. 2024. The norm is over all calibration tokens that reach the matrix, not squared.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perpend.compression.masks import SPARSITY, check_pattern, pattern_of, pruned, removed
from perpend.compression.matrices import Matrix
from perpend.compression.method import Method, Settings


def scores(weight: Tensor, norms: Tensor) -> Tensor:
    """[out, in] float64: |W_ij| ‖X_j‖₂. norms: [in]."""
    return weight.abs().double().mul_(norms)


def sparse_bytes(matrix: Matrix, settings: Settings) -> float:
    """Kept weights at 16 bits each, and one bit per weight for the mask."""
    rows, width = matrix.weight.shape
    kept_of = pattern_of(settings["pattern"])
    gone = removed(width, settings["sparsity"]) if kept_of is None else width * (1 - kept_of[0] / kept_of[1])
    return rows * ((width - gone) * 16 + width) / 8


def check(matrix: Matrix, settings: Settings) -> None:
    check_pattern(matrix.name, matrix.width, settings["pattern"], settings["sparsity"])


def _compress(block: Any, settings_of: Any) -> dict[str, dict[str, Any]]:
    facts = {}
    for matrix in block.matrices:
        settings = settings_of(matrix)
        statistics = block.statistics[matrix.name]
        if statistics.tokens:
            norms = statistics.squares.sqrt()
        else:  # nothing is known of its inputs: equal norms, which is magnitude pruning within rows
            norms = torch.ones(matrix.width, dtype=torch.float64, device=matrix.weight.device)
        mask = pruned(
            scores(matrix.weight, norms), pattern=settings["pattern"], sparsity=settings["sparsity"]
        )
        matrix.weight.masked_fill_(mask, 0)
        facts[matrix.name] = {"pattern": settings["pattern"], "zeros": int(mask.sum()), "of": mask.numel()}
    return facts


METHOD = Method(
    name="wanda",
    summary="prune by weight times input norm, within output rows",
    defaults={"pattern": "unstructured", "sparsity": SPARSITY},
    needs=frozenset({"squares"}),
    check=check,
    compress=_compress,
    bytes=sparse_bytes,
    plain="sparsity",
)
