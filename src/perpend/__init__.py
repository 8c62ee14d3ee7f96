"""perpend reads what a transformer computes against a reference: the part along it and the part across it.

    import perpend

    model, tokenizer = perpend.load()                      # a real pretrained model, no hub needed
    survey = perpend.survey_attention(model, tokens)       # attention rows as compositions
    with perpend.edit(model, site="value.exclude_self", parallel=0.0):
        ...                                                # the model, without the parallel part

Importing perpend imports nothing heavy; each name below is loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOME = {
    "load": "perpend.models.load",
    "verify": "perpend.models.verify",
    "edit": "perpend.models.edit",
    "Edit": "perpend.models.edit",
    "ablate": "perpend.models.ablate",
    "survey_attention": "perpend.surveys.attention",
    "survey_saved": "perpend.surveys.saved",
    "survey_updates": "perpend.surveys.updates",
    "audit": "perpend.studies.choices",
    "evaluate": "perpend.evaluation",
    "PerpendError": "perpend.errors",
    "InputError": "perpend.errors",
}

__all__ = ["__version__", *_HOME]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(_HOME[name]), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'perpend' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
