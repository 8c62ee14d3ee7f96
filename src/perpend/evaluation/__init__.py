"""Standard evaluations of any model in memory: tasks, long context, perplexities, and paired comparisons.

Names are loaded on first use; importing this package imports nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "evaluate": "perpend.evaluation.suite",
    "Evaluation": "perpend.evaluation.result",
    "compare": "perpend.evaluation.paired",
    "both": "perpend.evaluation.paired",
    "Comparison": "perpend.evaluation.paired",
    "add_tasks": "perpend.evaluation.options",
    "task_options": "perpend.evaluation.options",
    "token_nll": "perpend.evaluation.losses",
    "divergence": "perpend.evaluation.losses",
    "cut": "perpend.evaluation.windows",
    "rolling": "perpend.evaluation.windows",
    "Windows": "perpend.evaluation.windows",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'perpend.evaluation' has no attribute {name!r}")
