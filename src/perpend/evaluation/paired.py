"""Two models on the same items: is the second one equivalent to the first within a margin, different, or
undecided?

"Scores stay within 0.5 points" is a claim of equivalence. A test of difference that finds nothing does not
show it: with 200 items the interval of the difference is ±5 points wide. So each task gets the interval of
the paired difference, a verdict against a stated margin, and the number of items that a verdict would take.

- equivalent: the 90 % interval of the difference lies inside ±margin (two one-sided tests at 5 %);
- different: the 95 % interval excludes 0, and the first does not hold;
- undecided: neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.errors import InputError
from perpend.evaluation.intervals import Z80, Z90, Z95, Z_BOTH80, bootstrap, items_for, newcombe, verdict
from perpend.evaluation.result import Evaluation, TaskScores

if TYPE_CHECKING:
    import pandas as pd

MARGIN = 0.005  # of a score: half a point
MARGIN_NATS = 0.05  # of the gold answer's log-likelihood, per item


@dataclass(frozen=True)
class Comparison:
    """`table`: one row per task and quantity (the headline score, the gold answer's log-likelihood)."""

    base: Evaluation
    other: Evaluation
    rows: tuple[dict[str, Any], ...]
    margin: float
    margin_nats: float

    @property
    def table(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(list(self.rows))

    @property
    def results(self) -> dict[str, Any]:
        """task -> quantity -> numbers; what does not exist is null."""
        out: dict[str, Any] = {"margin": self.margin, "margin_nats": self.margin_nats, "tasks": {}}
        for row in self.rows:
            kept = {
                key: (None if isinstance(value, float) and not math.isfinite(value) else value)
                for key, value in row.items()
                if key not in ("task", "quantity")
            }
            out["tasks"].setdefault(row["task"], {})[row["quantity"]] = kept
        return out

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"comparison": self.table}

    @property
    def findings(self) -> list[str]:
        """One sentence per task, log-likelihood first, in words that claim no more than the intervals do."""
        return [_sentence(row) for row in self.rows]

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False, float_format=lambda value: f"{value:.4g}")


def compare(
    base: Evaluation,
    other: Evaluation,
    *,
    margin: float = MARGIN,
    margin_nats: float = MARGIN_NATS,
    seed: int = 0,
) -> Comparison:
    """Pair two evaluations of the same items. margin: of scores (0.005 = half a point); margin_nats: of the
    gold answer's log-likelihood per item. Raises InputError where tasks or items are not the same.
    """
    for name, given in (("margin", margin), ("margin_nats", margin_nats)):
        if not 0 < given < math.inf:
            raise InputError(f"a margin of equivalence must be positive and finite, not {name}={given:g}")
    labels = [task.label for task in base.tasks]
    if labels != [task.label for task in other.tasks]:
        raise InputError(
            f"the evaluations hold different tasks: {labels} and {[task.label for task in other.tasks]}"
        )
    rows: list[dict[str, Any]] = []
    for label in labels:
        first, second = base[label], other[label]
        _same_items(first, second)
        lls = [np.array(task.items.get("gold_ll", []), dtype=float) for task in (first, second)]
        # where the harness generates there is none; where only the second model has none it is broken
        if len(lls[0]) and np.isfinite(lls[0]).all():
            rows.append(_row(first, "gold log-likelihood", *lls, margin_nats, seed, "nats"))
        if first.metric in first.items:
            scores = [np.array(task.items[first.metric], dtype=float) for task in (first, second)]
            rows.append(_row(first, first.metric, *scores, margin, seed, "fraction"))
    return Comparison(base, other, (*rows, *_means(base, other, margin)), margin, margin_nats)


def _means(base: Evaluation, other: Evaluation, margin: float) -> list[dict[str, Any]]:
    """The unweighted mean of the headline scores over tasks, each length apart: a suite as it is reported."""
    groups: dict[Any, list[TaskScores]] = {}
    for task in base.tasks:
        if task.metric in task.items:
            groups.setdefault(task.settings.get("length"), []).append(task)
    rows = []
    for length, tasks in groups.items():
        if len(tasks) < 2:
            continue
        pairs = [
            [np.array(one.items[task.metric], dtype=float) for one in (task, other[task.label])]
            for task in tasks
        ]
        gaps = [second - first for first, second in pairs]
        share = 1 / len(tasks)
        variances = [_variance(gap) for gap in gaps]
        error = share * math.sqrt(sum(v / len(gap) for v, gap in zip(variances, gaps)))
        mean = float(np.mean([gap.mean() for gap in gaps]))
        wide, narrow = ((mean - z * error, mean + z * error) for z in (Z95, Z90))
        each = share**2 * sum(variances)
        rows.append(
            {
                "task": f"mean of {len(tasks)} tasks" + (f"@{length}" if length else ""),
                "quantity": "headline scores",
                "unit": "fraction",
                "n": min(map(len, gaps)),
                "base": float(np.mean([first.mean() for first, _ in pairs])),
                "other": float(np.mean([second.mean() for _, second in pairs])),
                "difference": mean,
                "low": wide[0],
                "high": wide[1],
                "low90": narrow[0],
                "high90": narrow[1],
                "better": int(sum((gap > 0).sum() for gap in gaps)),
                "worse": int(sum((gap < 0).sum() for gap in gaps)),
                "margin": margin,
                "verdict": verdict(narrow, wide, margin),
                "nonfinite": 0,
                # per task
                "items_for_equivalence": items_for(each, margin, Z90 + Z_BOTH80),
                "items_for_difference": items_for(each, abs(mean), Z95 + Z80),
                "interval": "normal, items within tasks",
                "base_at_floor": all(task.at_floor for task in tasks),
            }
        )
    return rows


def _variance(gap: np.ndarray) -> float:
    """Variance of paired score differences, with two more items, of which one changed: n unchanged answers,
    or n that all changed alike, do not show that the next one is sure.
    """
    n = len(gap) + 2
    return (float((gap**2).sum()) + 1) / n - (float(gap.sum()) / n) ** 2


def _same_items(first: TaskScores, second: TaskScores) -> None:
    for key in ("sha256", "source", "fewshot", "context", "length", "seed", "bos"):
        if first.settings.get(key) != second.settings.get(key):
            raise InputError(
                f"{first.label}: {key} is {first.settings.get(key)!r} in one evaluation and "
                f"{second.settings.get(key)!r} in the other; pairs need the same items"
            )
    if first.items["item"] != second.items["item"]:
        raise InputError(f"{first.label}: {len(first)} and {len(second)} items; pairs need the same ones")


def _row(
    task: TaskScores, quantity: str, base: np.ndarray, other: np.ndarray, margin: float, seed: int, unit: str
) -> dict[str, Any]:
    gap = other - base
    n = len(gap)
    binary = unit == "fraction" and set(np.unique([base, other])) <= {0.0, 1.0}
    broken = int((~np.isfinite(gap)).sum())
    if broken:
        wide = narrow = (-math.inf, math.inf)
        variance = math.inf
    elif binary:
        wide, narrow = newcombe(base, other, Z95), newcombe(base, other, Z90)
        variance = _variance(gap)
    else:
        wide, narrow = bootstrap(gap, (0.95, 0.90), seed=seed) if n > 1 else [(-math.inf, math.inf)] * 2
        variance = float(gap.var(ddof=1)) if n > 1 else math.inf
    mean = float(gap.mean())
    return {
        "task": task.label,
        "quantity": quantity,
        "unit": unit,
        "n": n,
        "base": float(base.mean()),
        "other": float(other.mean()),
        "difference": mean,
        "low": float(wide[0]),
        "high": float(wide[1]),
        "low90": float(narrow[0]),
        "high90": float(narrow[1]),
        "better": int((gap > 0).sum()),
        "worse": int((gap < 0).sum()),
        "margin": margin,
        "verdict": verdict(narrow, wide, margin) if not broken else "different",
        "nonfinite": broken,
        # equivalence if the true difference is 0: both one-sided tests pass with 80 % power
        "items_for_equivalence": items_for(variance, margin, Z90 + Z_BOTH80),
        "items_for_difference": items_for(variance, abs(mean), Z95 + Z80),
        "interval": "Newcombe paired" if binary else "bootstrap over items",
        "base_at_floor": bool(task.at_floor) if unit == "fraction" else False,
    }


def _sentence(row: dict[str, Any]) -> str:
    if row["nonfinite"]:
        return (
            f"{row['task']}, {row['quantity']}: the second model gives {row['nonfinite']} of {row['n']} "
            "items no finite value, so it is broken there"
        )
    nats = row["unit"] == "nats"
    scale, unit, digits = (1, "nats", 3) if nats else (100, "points", 1)
    text = (
        f"{row['task']}, {row['quantity']} ({row['n']} items): "
        f"{scale * row['difference']:+.{digits}f} {unit} "
        f"[{scale * row['low']:+.{digits}f}, {scale * row['high']:+.{digits}f}], {row['verdict']}"
    )
    within = f" within {scale * row['margin']:g} {unit}"
    if row["verdict"] == "equivalent":
        text += within
    elif row["verdict"] == "undecided":
        text += f"; to show equivalence{within} would take about {_count(row['items_for_equivalence'])} items"
    if row["base_at_floor"]:
        text += "; the unedited model is at the floor, so this says nothing"
    return text


def _count(value: float) -> str:
    return f"{value:,.0f}" if math.isfinite(value) else "infinitely many"


def both(
    model: Any,
    tokenizer: Any,
    within: Callable[[], AbstractContextManager[Any]],
    tasks: Any = "commonsense",
    *,
    margin: float = MARGIN,
    margin_nats: float = MARGIN_NATS,
    base: Evaluation | None = None,
    **options: Any,
) -> Comparison:
    """Evaluate a model as it is and inside `within()`, and compare: for edits, ablations, all that is undone.

    both(model, tokenizer, lambda: perpend.edit(model, site="residual.mlp", parallel=0.0), "piqa", data=path)
    `base`: an evaluation of the untouched model with the same options, where there is one already.
    """
    from perpend.evaluation.suite import evaluate

    first = base if base is not None else evaluate(model, tokenizer, tasks, **options)
    with within():
        second = evaluate(model, tokenizer, tasks, **options)
    return compare(first, second, margin=margin, margin_nats=margin_nats)
