"""Compress a model block by block, and measure its error along and across what the base model adds.

    record = compress(model, tokens, "wanda:2:4+gain")     # in place
    error = measure(base, model, tokens)                   # error.table, error.summary
    with injection(base, model, "perpendicular"): ...      # the base model with only e⊥

A method is one file here that holds a `METHOD` (rtn, awq, wanda, magnitude); a repair is a `Repair` in any
file.
"""

from __future__ import annotations

import importlib
from typing import Any

_HOME = {
    "check": "blockwise",
    "compress": "blockwise",
    "Compression": "blockwise",
    "measure": "error",
    "DirectionalError": "error",
    "check_comparable": "error",
    "injection": "surgery",
    "sensitivity": "surgery",
    "layer_changes": "surgery",
    "allocate": "plan",
    "save": "save",
    "methods": "method",
    "repairs": "method",
    "regime": "method",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
