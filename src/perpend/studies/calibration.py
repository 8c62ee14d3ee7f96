"""The calibration curve: how often verdicts flip on rows about which only the mean sink mass is known.

On synthetic rows (`studies.simulation.sampler`) of mean sink mass s̄, `calibration_curve` samples
independent triples (p, q, r) and counts verdicts "is q or r closer to p?" that reverse when the sink is
dropped. A measured model is placed on the curve by the sink mass of its *signatures*:

    curve = calibration_curve()
    placed = place(curve, sink=0.82, rates={"cosine": 0.439, "jensen_shannon": 0.425})

Beyond the curve's ends (0.10 and 0.90) the value at the end is taken, as the paper's own comparison does:
with that reading its mean absolute deviation comes out.
Source: Figure 3, Table 2, Appendix E.4 of the attention-rows paper. All rates are fractions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from perpend.errors import InputError
from perpend.geometry import dissimilarities, metric_named
from perpend.papers import published
from perpend.studies.reversal import compare
from perpend.studies.simulation.sampler import PARTS, chunks, rows

if TYPE_CHECKING:
    import pandas as pd

METRICS = ("cosine", "jensen_shannon", "euclidean", "hellinger", "aitchison", "content")
"""Metrics of the curve; Fisher–Rao orders as Hellinger does, `aitchison` is full d_A against d_A⊥."""
GRID = tuple(round(0.1 + 0.1 * k, 2) for k in range(9))
ALPHAS = (0.1, 1.0)
TRIPLES = 20_000
SEED = 7
Z = 2.5758293035489004  # 99 %: two-sided normal quantile of every Monte Carlo interval here


def reversal_rates(
    sink: float,
    alpha: float = 0.1,
    *,
    triples: int = TRIPLES,
    metrics: Sequence[str] = METRICS,
    parts: int = PARTS,
    seed: int = SEED,
) -> dict[str, tuple[float, float]]:
    """Reversal rate and share of ties, by metric, over `triples` synthetic triples at mean sink mass `sink`.

    The draws depend on (seed, sink, alpha) alone, so a point has the same value on any grid.
    Raises InputError for a sink mass outside (0, 1), α ≤ 0, or an unknown metric.
    """
    if not 0 < sink < 1 or not alpha > 0 or triples < 1 or parts < 3:
        raise InputError(
            f"a calibration point needs 0 < sink < 1, alpha > 0, triples ≥ 1 and parts ≥ 3; got sink={sink}, "
            f"alpha={alpha}, triples={triples}, parts={parts}"
        )
    for metric in metrics:
        metric_named(metric)
    generator = np.random.default_rng([seed, round(1e6 * sink), round(1e6 * alpha)])
    counts = {metric: np.zeros(2) for metric in metrics}
    for size in chunks(triples):
        p, *others = (rows(generator, size, sink, alpha, parts=parts) for _ in range(3))
        both = np.stack(others)
        kept, dropped = (dissimilarities(p, both, metrics, 0, policy) for policy in ("keep", "drop"))
        for metric in metrics:
            found = compare(*(np.sign(np.subtract(*values[metric])) for values in (kept, dropped)))
            counts[metric] += size * np.array([found.rate, found.ties])
    return {metric: (float(a / triples), float(b / triples)) for metric, (a, b) in counts.items()}


def calibration_curve(
    sinks: Sequence[float] = GRID,
    alphas: Sequence[float] = (0.1,),
    *,
    triples: int = TRIPLES,
    metrics: Sequence[str] = METRICS,
    parts: int = PARTS,
    seed: int = SEED,
) -> pd.DataFrame:
    """Reversal rates by α, mean sink mass and metric, with 99 % Monte Carlo intervals.

    Columns: alpha, sink, metric, rate, low, high, ties, triples (fractions). About a second a point.
    """
    import pandas as pd

    lines = []
    for alpha in alphas:
        for sink in sinks:
            found = reversal_rates(sink, alpha, triples=triples, metrics=metrics, parts=parts, seed=seed)
            for metric, (rate, ties) in found.items():
                half = Z * np.sqrt(rate * (1 - rate) / triples)
                lines.append(
                    (alpha, sink, metric, rate, max(0.0, rate - half), min(1.0, rate + half), ties, triples)
                )
    columns = ["alpha", "sink", "metric", "rate", "low", "high", "ties", "triples"]
    return pd.DataFrame(lines, columns=columns)


def expected_rate(curve: pd.DataFrame, sink: float, metric: str, alpha: float = 0.1) -> float:
    """The curve's rate at a sink mass: linear between its points, its end's value beyond them."""
    points = curve[(curve["metric"] == metric) & np.isclose(curve["alpha"], alpha)].sort_values("sink")
    if points.empty:
        known = sorted({(m, float(a)) for m, a in zip(curve["metric"], curve["alpha"])})
        raise InputError(f"the curve has no points for {metric!r} at alpha {alpha}; it has {known}")
    return float(np.interp(sink, points["sink"], points["rate"]))


def place(curve: pd.DataFrame, sink: float, rates: Mapping[str, float], alpha: float = 0.1) -> pd.DataFrame:
    """A measured model on the curve: metric, sink, rate, expected, deviation = rate − expected.

    sink: the mass of the sink in the model's signatures; rates: fractions, by metric. Metrics that the curve
    lacks are left out, except Fisher–Rao, which takes Hellinger's points.
    """
    import pandas as pd

    on_curve = set(curve["metric"])
    lines = []
    for metric, rate in rates.items():
        source = "hellinger" if metric == "fisher_rao" else metric
        if source in on_curve:
            expected = expected_rate(curve, sink, source, alpha)
            lines.append((metric, sink, rate, expected, rate - expected))
    return pd.DataFrame(lines, columns=["metric", "sink", "rate", "expected", "deviation"])


def published_models() -> pd.DataFrame:
    """The paper's ten models (Table 2): model, title, sink_row, sink_signature, metric, rate, sd; fractions.

    Fisher–Rao is printed with Hellinger. Collapse disagreement stands in its own column.
    """
    import pandas as pd

    by_model: dict[str, dict[str, tuple[float, float]]] = {}
    titles: dict[str, str] = {}
    for entry in published("attention", "table-2").entries.values():
        scale = 100.0 if entry.unit == "%" else 1.0
        value = entry.value / scale, float(entry.more.get("sd", 0)) / scale
        by_model.setdefault(entry.more["model"], {})[entry.more["quantity"]] = value
        titles[entry.more["model"]] = entry.more["title"]
    lines = [
        (
            model,
            titles[model],
            facts["sink_row"][0],
            facts["sink_signature"][0],
            metric,
            *facts[metric],
            facts["collapse_disagreement"][0],
        )
        for model, facts in by_model.items()
        for metric in ("cosine", "jensen_shannon", "euclidean", "hellinger")
    ]
    columns = [
        "model",
        "title",
        "sink_row",
        "sink_signature",
        "metric",
        "rate",
        "sd",
        "collapse_disagreement",
    ]
    return pd.DataFrame(lines, columns=columns)


def tracking(curve: pd.DataFrame, alpha: float = 0.1) -> pd.DataFrame:
    """The paper's models against the curve at their signature sink: 10 models × the curve's metrics.

    Columns of `published_models`, and expected and deviation. The paper states the mean and the maximum of
    |deviation| over cosine, JS and Euclid.
    """
    models = published_models()
    models = models[models["metric"].isin(set(curve["metric"]))].copy()
    models["expected"] = [
        expected_rate(curve, sink, metric, alpha)
        for sink, metric in zip(models["sink_signature"], models["metric"])
    ]
    models["deviation"] = models["rate"] - models["expected"]
    return models.reset_index(drop=True)
