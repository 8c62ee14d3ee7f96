"""Rows a batch at a time: the one place that knows what a batch may be.

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


def batches(rows: Tensor, batch: int) -> tuple[Tensor, ...]:
    """`rows` [n, ...] cut into batches. Raises InputError for a batch below one."""
    starts(len(rows), batch)
    return rows.split(batch)
