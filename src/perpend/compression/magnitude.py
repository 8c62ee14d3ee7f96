"""Magnitude pruning: the smallest |W_ij| go. Wanda's baseline; it sees no calibration text.

Unstructured, weights are compared within the whole matrix, as in the reference implementation of Wanda; n:m
compares each group of m consecutive inputs.
"""

from __future__ import annotations

from typing import Any

from perpend.compression.masks import SPARSITY, pattern_of, pruned, removed
from perpend.compression.matrices import Matrix
from perpend.compression.method import Method, Settings
from perpend.compression.wanda import check


def sparse_bytes(matrix: Matrix, settings: Settings) -> float:
    """Kept weights at 16 bits each, and one bit per weight for the mask."""
    total = matrix.weight.numel()
    kept_of = pattern_of(settings["pattern"])
    gone = removed(total, settings["sparsity"]) if kept_of is None else total * (1 - kept_of[0] / kept_of[1])
    return ((total - gone) * 16 + total) / 8


def _compress(block: Any, settings_of: Any) -> dict[str, dict[str, Any]]:
    facts = {}
    for matrix in block.matrices:
        settings = settings_of(matrix)
        mask = pruned(
            matrix.weight.double().abs(),
            pattern=settings["pattern"],
            sparsity=settings["sparsity"],
            scope="matrix",
        )
        matrix.weight.masked_fill_(mask, 0)
        facts[matrix.name] = {"pattern": settings["pattern"], "zeros": int(mask.sum()), "of": mask.numel()}
    return facts


METHOD = Method(
    name="magnitude",
    summary="prune by weight alone",
    defaults={"pattern": "unstructured", "sparsity": SPARSITY},
    needs=frozenset(),
    check=check,
    compress=_compress,
    bytes=sparse_bytes,
    plain="sparsity",
)
