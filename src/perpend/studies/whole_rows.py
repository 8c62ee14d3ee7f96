"""What an entropy monitor would read, beside the fixed support: whole rows of every length.

    reading = whole_rows(survey)          # a survey of survey_attention(..., whole_rows="log")

The row entropy that monitors log is of whole rows, whose number of keys grows with the query's position; the
survey's is of rows on W keys. Both are told on the same queries (those of the fixed support), with the split
H = H_b(s) + (1−s)·H(π), and by position for the whole rows.

Source: "Which Question Is Your Attention Metric Answering?", Proposition 1, Section 5.2 (2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from perpend.errors import InputError
from perpend.studies.collapse import disagreement, entropy_disagreement
from perpend.studies.readings import REPLICATES, Reading
from perpend.studies.resampling import CORRELATION, FRACTION, SIZE, intervals, said
from perpend.surveys.whole_rows import MEANS

if TYPE_CHECKING:
    from perpend.surveys.attention_result import AttentionSurvey

COMPARED = ("total", "binary", "content", "weighted_content", "sink_mass")


def whole_rows(survey: AttentionSurvey, replicates: int = REPLICATES) -> Reading:
    """Whole rows by position and layer, and against rows on the fixed support on the same queries.

    results: `all` (means over every row, head and layer), `same_queries` (`whole` and `fixed` means, and
    `spearman` over heads between the two row entropies), numbers as {value, low, high}; `per_layer` of the
    same queries; `disagreement` of H with H(π) over layers on whole rows, and of whole with fixed H; `edges`
    of the bins; `left_out` and `without_content` per layer. Raises InputError without whole rows.
    """
    whole = survey.whole
    if whole is None:
        raise InputError("this survey read no whole rows: survey_attention(..., whole_rows='log')")
    first, last = survey.support.first, survey.support.last
    last = last if last is not None and last in whole.edges else None
    heads = np.array([[head < count for head in range(max(whole.heads))] for count in whole.heads])

    def measure(weights: np.ndarray | None, fixed: Mapping[str, np.ndarray]) -> dict[str, float]:
        every, same = whole.means(weights=weights), whole.means(first, last, weights)
        both = heads & np.isfinite(same["total"]) & np.isfinite(fixed["total"])
        numbers = {f"all/{name}": _mean(every[name][heads]) for name in MEANS}
        for name in COMPARED:
            numbers[f"whole/{name}"] = _mean(same[name][both])
            numbers[f"fixed/{name}"] = _mean(fixed[name][both])
        numbers["whole/uniform"] = _mean(same["uniform"][both])
        enough = both.sum() > 2
        rank = stats.spearmanr(same["total"][both], fixed["total"][both]).statistic if enough else np.nan
        return {**numbers, "spearman": float(rank)}

    values = measure(None, survey.statistics)
    rows = ()
    if replicates and len(survey.blocks) > 1:
        rows = (
            measure(weights, means)
            for weights, means in zip(survey.resampled(replicates), survey.statistic_replicates(replicates))
        )
    numbers = intervals(values, values, rows, _bounds)
    layers = _per_layer(survey, first, last)
    monitor = entropy_disagreement(layers["whole_total"], layers["whole_content"])
    between = disagreement(layers["whole_total"], layers["fixed_total"])
    results: dict[str, Any] = {
        "edges": list(whole.edges),
        "all": {name: _plain(numbers[f"all/{name}"]) for name in MEANS},
        "same_queries": {
            "first": first,
            "whole": {name: _plain(numbers[f"whole/{name}"]) for name in (*COMPARED, "uniform")},
            "fixed": {name: _plain(numbers[f"fixed/{name}"]) for name in COMPARED},
            "spearman": _plain(numbers["spearman"]),
        },
        "per_layer": [
            {name: _number(value) for name, value in row.items()} for row in layers.to_dict("records")
        ],
        "disagreement": _number(monitor.rate),
        "whole_against_fixed": _number(between.rate),
        "steps": between.steps,
        "left_out": whole.left_out.tolist(),
        "without_content": whole.without_content.tolist(),
    }
    undefined = {}
    if not np.isfinite(values["whole/total"]):
        undefined["whole_rows"] = "no layer has rows of both kinds on the queries of the fixed support"
    same = results["same_queries"]
    findings = [
        f"A row on all its keys has an entropy of {said(same['whole']['total'], '.3f')} nats, of which "
        f"{said(same['whole']['binary'], '.3f')} is H_b(s), and a sink share (rule "
        f"{survey.support.rule!r}) of {said(same['whole']['sink_mass'])}; on the fixed support of "
        f"{survey.support.window} keys and the same queries it is {said(same['fixed']['total'], '.3f')} nats "
        f"and {said(same['fixed']['sink_mass'])}. Heads rank by the two entropies with a Spearman ρ of "
        f"{said(same['spearman'], '.3f')}."
    ]
    if results["disagreement"] is not None:
        findings.append(
            f"On whole rows H and H(π) move in opposite directions on {results['disagreement']:.1%} of the "
            f"{monitor.steps} steps from one layer to the next; H of whole and of fixed rows do on "
            f"{results['whole_against_fixed'] or 0:.1%}."
        )
    tables = {"whole_rows": whole.per_position(), "whole_rows_layers": layers}
    return Reading(results, tables, findings, undefined)


def _per_layer(survey: AttentionSurvey, first: int, last: int | None) -> Any:
    """One row a layer: whole and fixed means over heads, on the queries of the fixed support."""
    import pandas as pd

    same, fixed = survey.whole.means(first, last), survey.statistics  # type: ignore[union-attr]
    rows = []
    for i, site in enumerate(survey.sites):
        own = slice(0, site.heads)
        rows.append(
            {
                "layer": site.index,
                **{f"whole_{name}": float(same[name][i, own].mean()) for name in (*COMPARED, "uniform")},
                **{f"fixed_{name}": float(fixed[name][i, own].mean()) for name in COMPARED},
            }
        )
    return pd.DataFrame(rows)


def _bounds(name: str) -> tuple[float, float]:
    if name == "spearman":
        return CORRELATION
    return FRACTION if name.endswith("mass") else SIZE


def _mean(values: np.ndarray) -> float:
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else float("nan")


def _plain(number: Mapping[str, float]) -> dict[str, float | None]:
    return {name: _number(value) for name, value in number.items()}


def _number(value: float) -> float | None:
    return value if isinstance(value, int) else float(value) if np.isfinite(value) else None
