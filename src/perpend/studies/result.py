"""What a study hands back, whatever it asked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from perpend.report.notebook import Rich

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd


@dataclass(frozen=True, repr=False)
class Study(Rich):
    """Plain results: `results` as in run.json, `tables` and `arrays` by name, `findings` in words.

    `undefined`: what could not be told, by name, and why.
    """

    results: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    arrays: dict[str, np.ndarray] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)
    undefined: dict[str, str] = field(default_factory=dict)
