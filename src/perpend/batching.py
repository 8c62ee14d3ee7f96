"""Rows a batch at a time, and in which order: the one place that knows what a batch and a seed may be.

A range with a step below zero is empty, so a pass over it would read nothing and give zeros for answers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from perpend.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


def starts(stop: int, batch: int, *, first: int = 0) -> range:
    """Where the batches of rows first..stop-1 begin. Raises InputError for a batch below one."""
    if batch < 1:
        raise InputError(f"batch is a number of rows a pass, at least 1, not {batch}")
    return range(first, stop, batch)


def order(count: int, seed: int) -> Tensor:
    """int64 [count]: the rows 0..count-1 as they come for seed 0, else shuffled by the seed."""
    import torch

    if seed == 0:
        return torch.arange(count)
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed))


def batches(rows: Tensor, batch: int) -> tuple[Tensor, ...]:
    """`rows` [n, ...] cut into batches. Raises InputError for a batch below one."""
    starts(len(rows), batch)
    return rows.split(batch)
