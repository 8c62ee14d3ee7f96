"""Further readings of one survey: what a window, a weight or a third sink convention does to its verdicts.

    windows(survey)        rows on the first W keys, several W: reversals, d_A⊥ between windows, retained mass
    conventions(survey)    keep, drop and drop-both: reversal between each pair
    weights(survey)        rows weighted by their values before closure, side by side with the plain ones

Each takes a survey whose pass read them (`survey_attention(windows=…, drop_both=…, value_weights=…)`) and
returns a `Reading`. Rates are exact over all triples of heads; intervals come from resampled blocks of
sequences, the same resamples for everything compared, on TRIPLES sampled triples.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.2 (windows), Appendix E.3; Section 7.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats

from perpend.errors import InputError
from perpend.geometry import pairwise
from perpend.studies import reversal
from perpend.studies.collapse import entropy_disagreement
from perpend.studies.resampling import CORRELATION, FRACTION, SIZE, intervals, said

if TYPE_CHECKING:
    import pandas as pd

    from perpend.surveys.attention_result import AttentionSurvey

METRICS = ("cosine", "jensen_shannon", "euclidean", "hellinger", "aitchison")
TRIPLES = 20_000
REPLICATES = 200
LAYER = ("total", "binary", "content", "weighted_content", "sink_mass", "dispersion")

Signatures = Mapping[str, np.ndarray]  # name -> log-signatures (heads, parts) of the same heads


@dataclass(frozen=True)
class Reading:
    """Plain results: `results` as in run.json, `tables` by name, `findings` in words, `undefined` named."""

    results: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    findings: list[str]
    undefined: dict[str, str] = field(default_factory=dict)


def windows(survey: AttentionSurvey, replicates: int = REPLICATES, triples: int = TRIPLES) -> Reading:
    """Verdicts and content distances on several windows, and the mass each holds of the whole row.

    results: `by_window` (list: `window`, `rows`, `retained`, `signature_mass`, `reversal` by metric) and
    `between` (list: `first`, `second`, `spearman` of d_A⊥ over pairs of heads, `flips` of d_A⊥ verdicts);
    numbers are {value, low, high}. Raises InputError for a survey without windows, or with fewer than three
    heads that all windows define.
    """
    import pandas as pd

    found = {str(width): each for width, each in survey.windows.items()}
    if not found:
        raise InputError("this survey read no further windows: survey_attention(..., windows=(32, 64, 128))")
    sinks = {name: list(each.support.columns.sink) for name, each in found.items()}
    defined = _defined(found)
    chosen = reversal.sample_triples(int(defined.sum()), triples)

    def measure(signatures: Signatures, exact: bool = False) -> dict[str, float]:
        rates: dict[str, float] = {}
        content = {}
        for name, rows in signatures.items():
            rates |= _rates(rows, sinks[name], chosen, exact, f"reversal/{name}/")
            content[name] = pairwise(rows, "content", sink=sinks[name], log=True)
        for first, second in combinations(found, 2):
            pair = content[first], content[second]
            rates[f"spearman/{first}/{second}"] = _spearman(*pair)
            rates[f"flips/{first}/{second}"] = _flips(*pair, chosen, exact)
        return rates

    numbers = _with_intervals(found, defined, measure, replicates)
    kept = _retained(found, replicates)
    by_window = [
        {
            "window": int(name),
            "rows": int(each.rows.max()),
            "retained": kept[name],
            "signature_mass": float(np.exp(_rows(each, defined)[:, sinks[name]]).sum(1).mean()),
            "reversal": {metric: numbers[f"reversal/{name}/{metric}"] for metric in METRICS},
        }
        for name, each in found.items()
    ]
    between = [
        {
            "first": int(first),
            "second": int(second),
            "spearman": numbers[f"spearman/{first}/{second}"],
            "flips": numbers[f"flips/{first}/{second}"],
        }
        for first, second in combinations(found, 2)
    ]
    tables = {
        "windows": pd.DataFrame(
            [
                {
                    "window": row["window"],
                    "metric": metric,
                    "rows": row["rows"],
                    **_flat("retained", row["retained"]),
                    "signature_mass": row["signature_mass"],
                    **_flat("reversal", rate),
                }
                for row in by_window
                for metric, rate in row["reversal"].items()
            ]
        ),
        "windows_between": pd.DataFrame(
            [
                {
                    "first": row["first"],
                    "second": row["second"],
                    **_flat("spearman", row["spearman"]),
                    **_flat("flips", row["flips"]),
                }
                for row in between
            ]
        ),
    }
    js = [row["reversal"]["jensen_shannon"] for row in by_window]
    names = ", ".join(str(row["window"]) for row in by_window)
    findings = [
        f"On the first {names} keys, Jensen-Shannon verdicts reverse in "
        f"{'; '.join(said(rate) for rate in js)} of triples when the sink (rule {survey.support.rule!r}) is "
        f"dropped; these windows hold {', '.join(said(row['retained']) for row in by_window)} of a row."
    ]
    if between:
        worst = min(between, key=lambda row: row["spearman"]["value"])
        findings.append(
            f"Content distances of two windows rank pairs of heads alike with a Spearman ρ of at least "
            f"{said(worst['spearman'], '.3f')} (windows {worst['first']} and {worst['second']}), and "
            f"{said(worst['flips'])} of their closer-head verdicts differ."
        )
    queries = "their own queries, t ≥ W"
    if len({(each.support.first, each.support.last) for each in found.values()}) == 1:
        queries = "the same queries"
    results = {"by_window": by_window, "between": between, "queries": queries, "heads": int(defined.sum())}
    return Reading(results, tables, findings, _lost(found, defined))


def conventions(survey: AttentionSurvey, replicates: int = REPLICATES, triples: int = TRIPLES) -> Reading:
    """Reversal between each pair of keep, drop and drop-both (the sink leaves as a query row too).

    results: metric → `keep_drop`, `keep_drop_both`, `drop_drop_both`, each {value, low, high}. `content`
    reverses between drop and drop-both only because their means are over other rows. Raises InputError for a
    survey without drop-both.
    """
    import pandas as pd

    if "drop-both" not in survey.variants:
        raise InputError("this survey did not read drop-both: survey_attention(..., drop_both=True)")
    found = {"all": survey, "both": survey.variants["drop-both"]}
    sink, defined = list(survey.support.columns.sink), _defined(found)
    chosen = reversal.sample_triples(int(defined.sum()), triples)
    metrics = (*METRICS, "content")
    pairs = {"keep_drop": (0, 1), "keep_drop_both": (0, 2), "drop_drop_both": (1, 2)}

    def measure(signatures: Signatures, exact: bool = False) -> dict[str, float]:
        rates = {}
        for metric in metrics:
            keep, drop = reversal.matrices(signatures["all"], sink, (metric,))[metric]
            both = pairwise(signatures["both"], metric, sink=sink, policy="drop", log=True)
            three = keep, drop, both
            for name, (a, b) in pairs.items():
                rates[f"{metric}/{name}"] = _flips(three[a], three[b], chosen, exact)
        return rates

    numbers = _with_intervals(found, defined, measure, replicates)
    results: dict[str, Any] = {
        metric: {name: numbers[f"{metric}/{name}"] for name in pairs} for metric in metrics
    }
    table = [
        {"metric": metric, "between": name, **_flat("reversal", rate)}
        for metric, row in results.items()
        for name, rate in row.items()
    ]
    js, own = results["jensen_shannon"], results["content"]
    findings = [
        f"Three conventions for the sink (rule {survey.support.rule!r}): Jensen-Shannon verdicts reverse in "
        f"{said(js['keep_drop'])} of triples between keep and drop, in {said(js['keep_drop_both'])} between "
        f"keep and drop-both, and in {said(js['drop_drop_both'])} between drop and drop-both; under d_A⊥ the "
        f"sink's own rows move {said(own['drop_drop_both'])}."
    ]
    return Reading(results, {"conventions": pd.DataFrame(table)}, findings, _lost(found, defined))


def weights(survey: AttentionSurvey, replicates: int = REPLICATES, triples: int = TRIPLES) -> Reading:
    """All statistics on plain and on value-weighted rows, side by side.

    results: kind (`plain`, and `value`, `output` as surveyed) → `row_mass`, `signature_mass`, `total`,
    `content`, `dispersion` (means over heads), `disagreement` of H with H(π) over layers, `reversal` by
    metric, and against the plain rows `spearman` of d_A⊥ and `flips` of kept Jensen-Shannon and of d_A⊥
    verdicts. Raises InputError for a survey without weighted rows.
    """
    import pandas as pd

    if not survey.weighted:
        raise InputError("this survey read no weighted rows: survey_attention(..., value_weights=('value',))")
    found = {"plain": survey, **survey.weighted}
    sink, defined = list(survey.support.columns.sink), _defined(found)
    chosen = reversal.sample_triples(int(defined.sum()), triples)

    def measure(signatures: Signatures, exact: bool = False) -> dict[str, float]:
        rates: dict[str, float] = {}
        content = {n: pairwise(rows, "content", sink=sink, log=True) for n, rows in signatures.items()}
        whole = {n: pairwise(rows, "jensen_shannon", log=True) for n, rows in signatures.items()}
        for name, rows in signatures.items():
            rates |= _rates(rows, sink, chosen, exact, f"{name}/reversal/")
            rates[f"{name}/signature_mass"] = float(np.exp(rows[:, sink]).sum(1).mean())
            if name != "plain":
                rates[f"{name}/spearman"] = _spearman(content["plain"], content[name])
                rates[f"{name}/flips_content"] = _flips(content["plain"], content[name], chosen, exact)
                rates[f"{name}/flips_jensen_shannon"] = _flips(whole["plain"], whole[name], chosen, exact)
        return rates

    numbers = _with_intervals(found, defined, measure, replicates)
    means = _row_means(found, defined, replicates)
    results: dict[str, Any] = {}
    layers = []
    for name, each in found.items():
        table = each.per_layer().rename(columns={"row_mass": "sink_mass"})
        layers.append(
            table[["layer", *LAYER, "signature_mass"]].assign(weight=name)[
                ["weight", "layer", *LAYER, "signature_mass"]
            ]
        )
        step = entropy_disagreement(table["total"].to_numpy(), table["content"].to_numpy())
        results[name] = {
            **{key.split("/")[1]: value for key, value in means.items() if key.startswith(f"{name}/")},
            **{
                key.removeprefix(f"{name}/"): value
                for key, value in numbers.items()
                if key.startswith(f"{name}/") and "reversal" not in key
            },
            "disagreement": step.rate if np.isfinite(step.rate) else None,
            "reversal": {metric: numbers[f"{name}/reversal/{metric}"] for metric in METRICS},
        }
    tidy = [
        {"weight": name, "quantity": quantity, **_flat("value", number)}
        for name, row in results.items()
        for quantity, number in [
            *((k, v) for k, v in row.items() if isinstance(v, dict) and k != "reversal"),
            *((f"reversal_{m}", v) for m, v in row["reversal"].items()),
        ]
    ]
    told = {"value": "‖v_j‖", "output": "‖W_O^h v_j‖"}
    plain = results["plain"]
    findings = [
        f"Weighted by {told[name]} before closure, the sink (rule {survey.support.rule!r}) takes "
        f"{said(row['row_mass'])} of a row instead of {said(plain['row_mass'])}, and "
        f"{said(row['reversal']['jensen_shannon'])} of Jensen-Shannon verdicts reverse when it is dropped "
        f"instead of {said(plain['reversal']['jensen_shannon'])}; d_A⊥ keeps a rank correlation of "
        f"{said(row['spearman'], '.3f')} with that of plain rows."
        for name, row in results.items()
        if name != "plain"
    ]
    tables = {"weights": pd.DataFrame(tidy), "weights_layers": pd.concat(layers, ignore_index=True)}
    return Reading(results, tables, findings, _lost(found, defined))


def _defined(found: Mapping[str, AttentionSurvey]) -> np.ndarray:
    """Heads with a signature in every survey, (layers, heads)."""
    every = [np.isfinite(each.signatures).all(-1) for each in found.values()]
    defined = np.logical_and.reduce(every)
    if defined.sum() < 3:
        raise InputError(
            f"only {int(defined.sum())} heads have a signature under all of {', '.join(found)}; verdicts "
            "need three"
        )
    return defined


def _lost(found: Mapping[str, AttentionSurvey], defined: np.ndarray) -> dict[str, str]:
    """Which readings define fewer heads than another, in words."""
    counts = {name: int(np.isfinite(each.signatures).all(-1).sum()) for name, each in found.items()}
    most, left = max(counts.values()), int(defined.sum())
    if left == most:
        return {}
    few = ", ".join(f"{name}: {count}" for name, count in counts.items() if count < most)
    return {"heads": f"{most - left} heads have no signature in some reading ({few}) and are left out of all"}


def _rows(survey: AttentionSurvey, defined: np.ndarray) -> np.ndarray:
    return survey.signatures[defined]


def _rates(
    rows: np.ndarray, sink: list[int], chosen: np.ndarray, exact: bool, prefix: str
) -> dict[str, float]:
    pairs = reversal.matrices(rows, sink, METRICS)
    return {prefix + metric: _flips(*pair, chosen, exact) for metric, pair in pairs.items()}


def _flips(first: np.ndarray, second: np.ndarray, chosen: np.ndarray, exact: bool) -> float:
    """Share of triples whose verdict is opposite: all of them, or the chosen ones."""
    if exact:
        return float(reversal.exact_rates(first, second)[0].mean())
    return reversal.compare(reversal.verdicts(first, chosen), reversal.verdicts(second, chosen)).rate


def _spearman(first: np.ndarray, second: np.ndarray) -> float:
    upper = np.triu_indices(len(first), 1)
    return float(stats.spearmanr(first[upper], second[upper]).statistic)


def _with_intervals(
    found: Mapping[str, AttentionSurvey],
    defined: np.ndarray,
    measure: Callable[..., dict[str, float]],
    replicates: int,
) -> dict[str, dict[str, float]]:
    """`measure` on all sequences, exact, with intervals from the same resamples of every survey's blocks."""
    full = {name: _rows(each, defined) for name, each in found.items()}
    exact = measure(full, exact=True)
    if not replicates or len(next(iter(found.values())).blocks) < 2:
        return intervals(exact, {}, ())
    rows = (measure(signatures) for signatures in _resampled(found, defined, replicates))
    return intervals(exact, measure(full), rows, _bounds)


def _bounds(name: str) -> tuple[float, float]:
    return CORRELATION if "spearman" in name else FRACTION


def _resampled(
    found: Mapping[str, AttentionSurvey], defined: np.ndarray, replicates: int
) -> Iterator[dict[str, np.ndarray]]:
    streams = [each.replicates(replicates) for each in found.values()]
    for together in zip(*streams):
        yield {name: signatures[defined] for name, signatures in zip(found, together)}


def _retained(found: Mapping[str, AttentionSurvey], replicates: int) -> dict[str, dict[str, float]]:
    values = {name: float(np.nanmean(each.statistics["retained"])) for name, each in found.items()}
    if not replicates or len(next(iter(found.values())).blocks) < 2:
        return intervals(values, {}, ())
    streams = [each.statistic_replicates(replicates) for each in found.values()]
    rows = (
        {name: float(np.nanmean(means["retained"])) for name, means in zip(found, together)}
        for together in zip(*streams)
    )
    return intervals(values, values, rows)


def _row_means(
    found: Mapping[str, AttentionSurvey], defined: np.ndarray, replicates: int
) -> dict[str, dict[str, float]]:
    """Means over rows and heads of each survey, with intervals; `kind/quantity` → number."""
    named = {"row_mass": "sink_mass", "total": "total", "content": "content", "dispersion": "dispersion"}

    def read(name: str, means: Mapping[str, np.ndarray]) -> dict[str, float]:
        return {f"{name}/{key}": float(means[of][defined].mean()) for key, of in named.items()}

    values = {k: v for name, each in found.items() for k, v in read(name, each.statistics).items()}
    if not replicates or len(next(iter(found.values())).blocks) < 2:
        return intervals(values, {}, ())
    streams = [each.statistic_replicates(replicates) for each in found.values()]
    rows = (
        {k: v for name, means in zip(found, together) for k, v in read(name, means).items()}
        for together in zip(*streams)
    )
    return intervals(values, values, rows, lambda name: FRACTION if name.endswith("mass") else SIZE)


def _flat(name: str, number: Mapping[str, float]) -> dict[str, float | None]:
    """A number with its interval as columns: `name`, `name_low`, `name_high`."""
    return {
        name: number["value"],
        f"{name}_low": number.get("low", np.nan),
        f"{name}_high": number.get("high", np.nan),
    }
