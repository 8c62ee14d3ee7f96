"""Standard tasks read from local JSON-lines files: one file is one task, found by looking into the folder.

A task file says how one JSON record becomes a `Document` and which of the three kinds of scoring applies;
prompts, delimiters, few-shot examples and scores follow the definitions of the evaluation harness whose
version it names. To add a task, add a file with a `TASK`.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

from perpend.errors import unknown_name
from perpend.evaluation.tasks._kinds import Document, Generation, Task

__all__ = ["Document", "Generation", "Task", "names", "task"]


@cache
def _discovered() -> dict[str, Task]:
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            one = importlib.import_module(f"{__name__}.{module.name}").TASK
            found[one.name] = one
    return found


def names() -> list[str]:
    """Names of the tasks that local files can answer."""
    return sorted(_discovered())


def task(name: str) -> Task:
    """The task of that name; an unknown one is answered with the near ones."""
    known = _discovered()
    if name not in known:
        raise unknown_name("task", name, known)
    return known[name]
