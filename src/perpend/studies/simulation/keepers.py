"""Who keeps which law: the metrics, ρ_A, C_A⊥ and the ℓ₁ clr norm against A1–A5 and what follows from them.

Each failure comes with its counter-example: rational rows, printed as whole numbers a:b:c:d over their sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from perpend.geometry import METRICS, clr, content_dispersion, dissimilarity, ilr_cosine
from perpend.geometry.laws import LAWS, Draw
from perpend.studies.simulation.checks import Part, Settings, holds

ORDER = 60
PARTS = 4
KEPT_BELOW = 1e-9


@dataclass(frozen=True)
class Measure:
    """A dissimilarity by name; `expected` are the laws the paper says it keeps (of those it speaks of)."""

    name: str
    title: str
    delta: Callable
    needs_sink: bool = False
    expected: frozenset[str] | None = None


def measures() -> list[Measure]:
    """The registry's metrics, and three others: 1 − ρ_A, |C_A⊥(p) − C_A⊥(q)|, ‖clr p − clr q‖₁."""
    found = [
        Measure(
            metric.name,
            metric.title,
            lambda p, q, m=metric: dissimilarity(p, q, m.name, sink=0 if m.needs_sink else None),
            metric.needs_sink,
            metric.laws,
        )
        for metric in METRICS.values()
        if not metric.takes_weight
    ]
    axioms = {"triangle", "separates", "perturbation", "powering", "permutation"}
    return [
        *found,
        Measure(
            "ilr_cosine",
            "1 − ρ_A",
            lambda p, q: 1 - ilr_cosine(p, q),
            False,
            frozenset({"permutation", "temperature"}),
        ),
        Measure(
            "content_dispersion",
            "|ΔC_A⊥|",
            lambda p, q: (content_dispersion(p) - content_dispersion(q)).abs(),
            True,
            frozenset({"triangle", "powering", "parallelogram", "sink", "temperature"}),
        ),
        Measure(
            "clr_l1",
            "‖clr p − clr q‖₁",
            lambda p, q: (clr(p) - clr(q)).abs().sum(-1),
            False,
            frozenset({*axioms, "dominance", "temperature"}),
        ),
    ]


def part(settings: Settings) -> Part:
    """The table of laws, each entry the largest relative violation over rational draws."""
    import pandas as pd
    import torch

    count = max(300, settings.samples // 20)
    lines, found = [], Part()
    for measure in measures():
        draw = Draw.random(count, PARTS, settings.seed, needs_sink=measure.needs_sink)
        wrong = []
        for law in LAWS.values():
            excess = law.excess(measure.delta, draw)
            defined = torch.nan_to_num(excess, nan=-1.0)
            worst = int(defined.argmax())
            value = float(defined[worst])
            undefined = value < 0  # no draw on which the law can be asked
            kept = not undefined and value < KEPT_BELOW
            example = "" if kept or undefined else _example(draw, worst, law.name)
            lines.append(
                (
                    measure.name,
                    measure.title,
                    law.name,
                    law.statement,
                    None if undefined else kept,
                    None if undefined else value,
                    example,
                )
            )
            if measure.expected is not None and kept != (law.name in measure.expected):
                wrong.append(law.name)
        said = ", ".join(sorted(measure.expected)) or "none"
        found.checks.append(
            holds(
                "Laws",
                f"{measure.title}: laws on which the draws disagree",
                f"keeps {said}",
                len(wrong),
                most=0,
                note=", ".join(wrong),
            )
        )
    columns = ["measure", "title", "law", "statement", "kept", "excess", "counter_example"]
    found.tables["laws"] = pd.DataFrame(lines, columns=columns)
    return found


def _example(draw: Draw, at: int, law: str) -> str:
    """The rows of one draw as whole numbers, and what else the law used."""
    shown = {"p": draw.p[at], "q": draw.q[at]}
    if law in ("triangle", "perturbation", "sink", "temperature"):
        shown["c" if law == "perturbation" else "r"] = draw.r[at]
    words = [f"{name} = {_whole(row.numpy())}" for name, row in shown.items()]
    if law in ("powering", "temperature", "separates"):
        words.append(
            f"α = ±{float(draw.alpha[at]):.2f}" if law == "powering" else f"α = {float(draw.alpha[at]):.2f}"
        )
    if law == "permutation":
        words.append(f"σ = {draw.shuffle[at].tolist()}")
    return ", ".join(words)


def _whole(row: np.ndarray, largest: int = 30) -> str:
    """The smallest whole numbers in the row's ratio."""
    for least in range(1, largest + 1):
        numbers = row / row.min() * least
        if np.abs(numbers - numbers.round()).max() < 1e-9 * numbers.max():
            return ":".join(str(int(n)) for n in numbers.round())
    return ":".join(f"{v:.4f}" for v in row)
