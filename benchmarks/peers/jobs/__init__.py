"""What a job is, and where jobs are found: every file of this folder that holds one or several."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

Run = Callable[[], Any]
TEXT = 1024  # tokens of a sequence that a run reads at least, one batch after another


@dataclass(frozen=True)
class Setting:
    """What a contender is given: the sizes of the cell, and the model's folder, where there is a model."""

    sizes: Mapping[str, int]
    folder: str = ""

    @property
    def passes(self) -> int:
        """How many batches a run reads; 1 where there is no model."""
        return max(1, TEXT // self.sizes.get("length", TEXT))

    @property
    def batches(self) -> tuple[Any, ...]:
        """Token ids [sequences, length] of each pass, the same for every contender."""
        import torch

        from peers.tools import VOCABULARY

        shape = (self.passes, self.sizes["sequences"], self.sizes["length"])
        return tuple(torch.randint(3, VOCABULARY, shape, generator=torch.Generator().manual_seed(0)))


def mean(answers: Iterable[Any]) -> Any:
    """The mean of what passes gave, tensors of one shape."""
    import torch

    return torch.stack(list(answers)).mean(0)


@dataclass(frozen=True)
class Job:
    """One thing to do, by several contenders.

    contenders: name -> a function that makes what is timed, `make(setting)() -> answer`; or, in words,
    why the tool cannot do it. An answer is an array or None; every answer must agree with perpend's: the
    largest difference over the largest value, column by column of the last axis, is at most `tolerance`,
    else the contender is not ranked. `baseline`: what ratios are to; it runs twice, and the second is the
    A/A row. `by_hand`: contenders that are no tool but code for this one model, a yardstick. `sizes`: the
    cells of a job that needs no model; None: the grid of lengths, layers and sequences. `count`, `unit`:
    how many of what one run makes, for a rate.
    """

    name: str
    title: str
    about: str
    baseline: str
    contenders: Mapping[str, Callable[[Setting], Run] | str]
    tolerance: float = 1e-4
    by_hand: tuple[str, ...] = ()
    sizes: tuple[Mapping[str, int], ...] | None = None
    count: Callable[[Mapping[str, int]], int] | None = None
    unit: str = ""

    @property
    def again(self) -> str:
        """The name of the A/A row."""
        return f"{self.baseline} again"

    def maker(self, contender: str) -> Callable[[Setting], Run] | str:
        return self.contenders[self.baseline if contender == self.again else contender]


def jobs() -> dict[str, Job]:
    """All jobs by name."""
    found: dict[str, Job] = {}
    for entry in sorted(pkgutil.iter_modules(__path__), key=lambda item: item.name):
        for value in vars(importlib.import_module(f"{__name__}.{entry.name}")).values():
            if isinstance(value, Job):
                found[value.name] = value
    return found
