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
from perpend.evaluation.result import Evaluation, TaskScores, wilson

if TYPE_CHECKING:
    import pandas as pd

Z95, Z90, Z80 = 1.959963984540054, 1.6448536269514722, 0.8416212335729143
MARGIN = 0.005  # of a score: half a point
MARGIN_NATS = 0.05  # of the gold answer's log-likelihood, per item


def newcombe(base: np.ndarray, other: np.ndarray, z: float) -> tuple[float, float]:
    """Interval of the difference other - base of two paired proportions (Newcombe 1998, method 10).

    From the two Wilson intervals and the correlation φ of the pairs (continuity-corrected), so it neither
    leaves [-1, 1] nor shrinks to nothing when no answer has changed. base, other: 0/1 per item.
    """
    n = len(base)
    both, only_other = float((base * other).sum()), float(((1 - base) * other).sum())
    only_base, none = float((base * (1 - other)).sum()), float(((1 - base) * (1 - other)).sum())
    p, q = other.mean(), base.mean()
    (low_p, high_p), (low_q, high_q) = wilson(other.sum(), n, z), wilson(base.sum(), n, z)
    margins = (both + only_other) * (only_base + none) * (both + only_base) * (only_other + none)
    phi = 0.0
    if margins > 0:
        cross = both * none - only_other * only_base
        phi = (max(cross - n / 2, 0.0) if cross > 0 else cross) / math.sqrt(margins)
    below = (p - low_p) ** 2 - 2 * phi * (p - low_p) * (high_q - q) + (high_q - q) ** 2
    above = (high_p - p) ** 2 - 2 * phi * (high_p - p) * (q - low_q) + (q - low_q) ** 2
    gap = p - q
    return max(-1.0, gap - math.sqrt(max(below, 0.0))), min(1.0, gap + math.sqrt(max(above, 0.0)))


def bootstrap(gap: np.ndarray, levels: tuple[float, ...], *, seed: int = 0, draws: int = 4000) -> list[tuple]:
    """Percentile intervals of the mean of per-item differences, items drawn with replacement."""
    rng = np.random.default_rng(seed)
    n = len(gap)
    means = np.concatenate(
        [gap[rng.integers(0, n, (min(200, draws - at), n))].mean(1) for at in range(0, draws, 200)]
    )
    return [tuple(np.quantile(means, [(1 - level) / 2, (1 + level) / 2])) for level in levels]


def items_for(variance: float, distance: float, z: float) -> float:
    """Items at which a difference with this per-item variance is resolved to `distance` with 80 % power."""
    if not distance > 0 or not math.isfinite(variance):
        return math.inf
    return math.ceil(variance * (z / distance) ** 2)


def verdict(narrow: tuple[float, float], wide: tuple[float, float], margin: float) -> str:
    """`narrow`: the 90 % interval, `wide`: the 95 % one."""
    if -margin < narrow[0] and narrow[1] < margin:
        return "equivalent"
    return "different" if wide[0] > 0 or wide[1] < 0 else "undecided"


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
    if margin <= 0 or margin_nats <= 0:
        raise InputError("a margin of equivalence must be positive")
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
    return Comparison(base, other, tuple(rows), margin, margin_nats)


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
        # no changed answer in n items is not a variance of 0: count half of one either way
        changed = (float((gap != 0).sum()) + 1) / (n + 2)
        variance = changed - float(gap.mean()) ** 2
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
        "items_for_equivalence": items_for(variance, margin, Z90 + 1.2815515655446004),
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
