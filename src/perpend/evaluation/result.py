"""What an evaluation returns: a table of scores, one record per item, and everything needed to repeat it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.evaluation.intervals import Z95, wilson

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class TaskScores:
    """Scores of one task (at one length, where tasks have lengths), item by item.

    items: column -> one value per item. Every metric is a column; `gold_ll` is the log-likelihood of the gold
    answer in nats (NaN where none was taken), `prediction` what the model chose or wrote. chance: what
    guessing earns, in the unit of the headline metric. aggregates: scores that are no mean over items (a
    correlation, a corpus perplexity); they have no interval here.
    """

    task: str
    metric: str
    metrics: tuple[str, ...]
    items: dict[str, list[Any]]
    chance: float
    settings: dict[str, Any]
    aggregates: dict[str, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.items["item"])

    @property
    def label(self) -> str:
        length = self.settings.get("length")
        return self.task if length is None else f"{self.task}@{length}"

    def rows(self) -> list[dict[str, Any]]:
        """One row per metric. value: a fraction (or a perplexity); low, high: a 95 % interval."""
        rows = []
        n = len(self)
        for metric in self.metrics:
            if metric == "perplexity":
                # of the target: exp of the mean negated sum, per item and not per token
                lls = np.array(self.items["gold_ll"], dtype=float)
                value, spread = -lls.mean(), lls.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
                low, high = (_exp(value + sign * Z95 * spread) for sign in (-1, 1))
                value, stderr = _exp(value), _exp(value) * spread
            else:
                scores = np.array(self.items[metric], dtype=float)
                value = scores.mean()
                stderr = scores.std(ddof=1) / math.sqrt(n) if n > 1 else math.nan
                low, high = wilson(scores.sum(), n)
            rows.append(
                {
                    "task": self.label,
                    "metric": metric,
                    "headline": metric == self.metric,
                    "value": float(value),
                    "stderr": float(stderr),
                    "low": float(low),
                    "high": float(high),
                    "n": n,
                    "chance": self.chance if metric == self.metric else math.nan,
                    **self._stated(),
                }
            )
        nothing = dict.fromkeys(("stderr", "low", "high", "chance"), math.nan)
        for metric, value in self.aggregates.items():
            headline = metric == self.metric
            row = {"task": self.label, "metric": metric, "headline": headline, "value": value, "n": n}
            rows.append({**row, **nothing, **self._stated()})
        return rows

    def _stated(self) -> dict[str, Any]:
        return {key: self.settings.get(key) for key in ("version", "fewshot", "context", "source")}

    @property
    def at_floor(self) -> bool:
        """The headline score is not above what guessing earns (95 %): edits cannot be seen to hurt it."""
        if self.metric not in self.items:
            return False
        total = float(np.sum(self.items[self.metric]))
        return wilson(total, len(self))[0] <= self.chance


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


@dataclass(frozen=True)
class Evaluation:
    """Scores of one model on several tasks. `table`: a row per task and metric; `items`: a row per item."""

    tasks: tuple[TaskScores, ...]
    settings: dict[str, Any]

    @property
    def table(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame([row for task in self.tasks for row in task.rows()])

    @property
    def items(self) -> pd.DataFrame:
        import pandas as pd

        frames = [pd.DataFrame({"task": task.label, **task.items}) for task in self.tasks]
        return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()

    @property
    def floor(self) -> list[str]:
        """Tasks on which the model does no better than guessing: they say nothing about a change."""
        return [task.label for task in self.tasks if task.at_floor]

    @property
    def results(self) -> dict[str, Any]:
        """For run.json: task -> metric -> numbers, and the task's settings. No NaN: null."""
        return {
            task.label: {
                "metric": task.metric,
                "at_floor": task.at_floor,
                "chance": _number(task.chance),
                "settings": task.settings,
                "scores": {
                    row["metric"]: {
                        **{key: _number(row[key]) for key in ("value", "stderr", "low", "high")},
                        "n": row["n"],
                    }
                    for row in task.rows()
                },
            }
            for task in self.tasks
        }

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"scores": self.table, "items": self.items}

    def __getitem__(self, label: str) -> TaskScores:
        from perpend.errors import unknown_name

        for task in self.tasks:
            if task.label == label:
                return task
        raise unknown_name("task of this evaluation", label, [task.label for task in self.tasks])

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False, float_format=lambda value: f"{value:.4g}")


def _number(value: float) -> float | None:
    return float(value) if value is not None and math.isfinite(value) else None
