"""RULER's thirteen long-context tasks, generated for any tokenizer and length.

Hsieh et al., "RULER: What's the Real Context Size of Your Long-Context Language Models?" (2024). One file
here holds the tasks of one kind; they are found by looking into the folder. Prompts, token budgets and
scoring are the published ones; docs/evaluate.md lists where the generated data differ from the original's.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from perpend.errors import unknown_name
from perpend.evaluation.ruler._kinds import RulerTask, Sample, Sources

__all__ = ["RulerTask", "Sample", "Sources", "names", "task"]


@cache
def _discovered() -> dict[str, RulerTask]:
    found: dict[str, RulerTask] = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_"):
            continue
        for one in importlib.import_module(f"{__name__}.{module.name}").TASKS:
            found[one.name] = one
    return found


def names() -> list[str]:
    """The tasks' names: niah_*, vt, cwe, fwe, qa_*."""
    return sorted(_discovered())


def task(name: str) -> RulerTask:
    """The task of that name; an unknown one is answered with the near ones."""
    if name not in _discovered():
        raise unknown_name("RULER task", name, _discovered())
    return _discovered()[name]
