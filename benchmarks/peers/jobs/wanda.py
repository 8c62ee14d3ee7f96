"""Masks of Wanda, from weights and input norms of SmolLM2's matrices: perpend's, and the reference code's.

The reference scores |W| · √(Σx²) in fp32 and sorts each row; perpend scores in float64. The masks must be
the same, entry by entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from peers.jobs import Job, Run, Setting

WIDTHS = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))  # out, in


def matrices(setting: Setting) -> list[tuple[Any, Any]]:
    """(weight [out, in], sums of squared inputs [in]) of every matrix of the layers, random."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(out, width, generator=generator), 512 * torch.rand(width, generator=generator).square())
        for _ in range(setting.sizes["layers"])
        for out, width in WIDTHS
    ]


def reference_unstructured(weight: Any, squares: Any) -> Any:
    """As the code of Sun et al. has it, half of each output row."""
    import torch

    metric = weight.abs() * squares.reshape(1, -1).sqrt()
    mask = torch.zeros_like(metric) == 1
    indices = torch.sort(metric, dim=-1, stable=True)[1][:, : int(metric.shape[1] * 0.5)]
    return mask.scatter_(1, indices, True)


def reference_structured(weight: Any, squares: Any) -> Any:
    """The same for 2:4, four columns at a time."""
    import torch

    metric = weight.abs() * squares.reshape(1, -1).sqrt()
    mask = torch.zeros_like(metric) == 1
    for start in range(0, metric.shape[1], 4):
        part = metric[:, start : start + 4].float()
        mask.scatter_(1, start + torch.topk(part, 2, dim=1, largest=False)[1], True)
    return mask


def perpends(pattern: str) -> Callable[[Any, Any], Any]:
    def mask(weight: Any, squares: Any) -> Any:
        from perpend.compression.masks import pruned
        from perpend.compression.wanda import scores

        return pruned(scores(weight, squares.sqrt()), pattern=pattern)

    return mask


def _made(one: Callable[[Any, Any], Any]) -> Callable[[Setting], Run]:
    def make(setting: Setting) -> Run:
        import torch

        found = matrices(setting)
        return lambda: torch.cat([one(*pair).flatten() for pair in found])

    return make


def _job(pattern: str, reference: Any) -> Job:
    return Job(
        name=f"wanda-{pattern.replace(':', '-')}",
        title=f"Wanda masks, {'half of each row' if pattern == 'unstructured' else pattern}",
        about="The masks of the seven matrices of each of two layers of SmolLM2-135M.",
        baseline="Wanda's code",
        contenders={
            "Wanda's code": _made(reference),
            "perpend": _made(perpends(pattern)),
            "llm-compressor": "it pins a transformers that perpend's other tools have left behind",
        },
        tolerance=0.0,
        sizes=({"layers": 2},),
        count=lambda sizes: sizes["layers"] * len(WIDTHS),
        unit="masks",
    )


UNSTRUCTURED = _job("unstructured", reference_unstructured)
STRUCTURED = _job("2:4", reference_structured)
