"""Several models in one study: does the sink grow with size, and do reversals grow with the sink?

    measured = [measure(survey, name="pythia-70m", parameters=70_426_624, family="gpt_neox"), …]
    study = scale_study(measured, written)

Each model is one survey under the same protocol. Sink mass is put against parameters, the reversal rate
against the sink mass of the signatures, over the curve that no model enters (`studies.calibration`), and the
adjusted Rand index of the models' taxonomies against the sink mass. Predictions are scored by rank, within
families where there are any.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.3 (2), Figure 5a, Appendix E.6 (2).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.errors import InputError
from perpend.studies import predictions, reversal, taxonomy
from perpend.studies.calibration import calibration_curve, expected_rate
from perpend.studies.regime import regime
from perpend.studies.result import Study

if TYPE_CHECKING:
    from perpend.surveys.attention import AttentionSurvey

CLASSICAL = ("cosine", "jensen_shannon", "euclidean")
METRICS = (*CLASSICAL, "content", "aitchison")
REPLICATES = 100
TRIPLES = 20_000  # of the intervals; the rates themselves are over all triples
CURVE_TRIPLES = 5_000


@dataclass(frozen=True)
class Model:
    """One model, measured: `values` name → number, `intervals` name → (low, high) over resampled text.

    Names: `row_mass`, `signature_mass`, `cv`, `total`, `content`, `dispersion`; `reversal_<metric>` (exact,
    all triples) and `ari_<metric>` (average linkage, mean over K of 4, 6, 8) for METRICS. Entropies in nats.
    """

    name: str
    family: str
    parameters: int
    layers: int
    heads: int
    weights: str
    values: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    regime: str
    support: str
    position_0: str = ""
    regime_applies: bool = True

    @property
    def classical_ari(self) -> float:
        """Mean over cosine, JS and Euclidean of the ARI between conventions; NaN with too few heads."""
        return float(np.mean([self.values[f"ari_{metric}"] for metric in CLASSICAL]))


def measure(
    survey: AttentionSurvey,
    *,
    name: str,
    parameters: int,
    family: str = "",
    weights: str = "",
    position_0: str = "",
    replicates: int = REPLICATES,
    seed: int = 0,
) -> Model:
    """What a survey says of one model. Raises InputError with fewer than four heads that have a signature.

    Intervals are 95 %, from resampled blocks of sequences: reflected for means and rates, quantiles for the
    ARI, which jumps.
    """
    defined = np.isfinite(survey.signatures).all(-1)
    if defined.sum() < 4:
        raise InputError(
            f"{name}: {int(defined.sum())} heads have a signature; the study needs at least four"
        )
    sink = list(survey.support.columns.sink)
    table = survey.per_layer()
    values = _of_signatures(survey.signatures[defined], sink)
    values |= {
        "row_mass": float(np.nanmean(table["row_mass"])),
        "total": float(np.nanmean(table["total"])),
        "content": float(np.nanmean(table["content"])),
        "dispersion": float(np.nanmean(table["dispersion"])),
    }
    verdict = regime(survey.signature_sink, len(sink) / survey.support.columns.parts)
    values["cv"] = float(verdict.cv)
    intervals: dict[str, tuple[float, float]] = {}
    if replicates and len(survey.blocks) > 1:
        chosen = reversal.sample_triples(int(defined.sum()), TRIPLES, seed)
        base = _of_signatures(survey.signatures[defined], sink, chosen)
        drawn = [_of_signatures(rows[defined], sink, chosen) for rows in survey.replicates(replicates, seed)]
        rows = [
            {
                key: float(np.nanmean(means[source]))
                for key, source in (("row_mass", "sink_mass"), ("total", "total"), ("content", "content"))
            }
            for means in survey.statistic_replicates(replicates, seed)
        ]
        for each in (drawn, rows):
            for key in each[0]:
                low, high = np.quantile([one[key] for one in each], [0.025, 0.975])
                if not key.startswith(
                    "ari_"
                ):  # about the value on the same triples, then about the exact one
                    middle = base.get(key, values[key])
                    low, high = values[key] + middle - high, values[key] + middle - low
                    if not key.startswith(("total", "content")):
                        low, high = max(0.0, low), min(1.0, high)
                intervals[key] = float(low), float(high)
    return Model(
        name=name,
        family=family,
        parameters=int(parameters),
        layers=len(survey.sites),
        heads=int(defined.sum()),
        weights=weights,
        values=values,
        intervals=intervals,
        regime=verdict.verdict,
        support=survey.support.words,
        position_0=position_0,
        regime_applies=verdict.applies,
    )


def _of_signatures(
    rows: np.ndarray, sink: Sequence[int], triples: np.ndarray | None = None
) -> dict[str, float]:
    """Sink mass, reversal rates (exact, or on `triples`: of many heads far quicker) and Rand indices."""
    found = {"signature_mass": float(np.exp(rows[:, list(sink)]).sum(1).mean())}
    for metric, (keep, drop) in reversal.matrices(rows, sink, METRICS).items():
        if triples is None:
            found[f"reversal_{metric}"] = float(reversal.exact_rates(keep, drop)[0].mean())
        else:
            both = (reversal.verdicts(distances, triples) for distances in (keep, drop))
            found[f"reversal_{metric}"] = reversal.compare(*both).rate
        trees = [taxonomy.merges(distances) for distances in (keep, drop)]
        aris = [
            taxonomy.adjusted_rand(*(taxonomy.cut(tree, k) for tree in trees))
            for k in taxonomy.CLUSTERS
            if k <= len(rows)
        ]
        found[f"ari_{metric}"] = float(np.mean(aris)) if aris else float("nan")
    return found


class ScaleStudy(Study):
    """Several models, from the smallest to the largest."""


def distinct(measured: Sequence[Model]) -> None:
    """InputError where two models have the same weights."""
    for one, other in itertools.combinations(measured, 2):
        if one.weights and one.weights == other.weights:
            raise InputError(f"{one.name} and {other.name} have the same weights; name each model once")


def scale_study(
    measured: Sequence[Model],
    written: Mapping[str, Any] | None = None,
    *,
    curve_triples: int = CURVE_TRIPLES,
) -> ScaleStudy:
    """All models on one map, and the predictions scored.

    written: what `predictions.write` kept before the first model was measured (None: nothing was predicted,
    and nothing is scored). Raises InputError with fewer than two models, and where two have the same weights.
    """
    import pandas as pd

    if len(measured) < 2:
        raise InputError("a study of scale needs at least two models")
    distinct(measured)
    table = pd.DataFrame([_row(model) for model in measured])
    curve = calibration_curve(triples=curve_triples, metrics=CLASSICAL)
    points = pd.DataFrame(
        [
            {
                "model": model.name,
                "metric": metric,
                "sink_mass": model.values["signature_mass"],
                "rate": model.values[f"reversal_{metric}"],
                "expected": expected_rate(curve, model.values["signature_mass"], metric),
            }
            for model in measured
            for metric in CLASSICAL
        ]
    )
    points["deviation"] = points["rate"] - points["expected"]
    off = points["deviation"].abs()
    results: dict[str, Any] = {
        "models": [_plain(row) for row in table.to_dict("records")],
        "families": {
            family: [m.name for m in sorted(group, key=lambda m: m.parameters)]
            for family, group in _families(measured).items()
        },
        "calibration": {
            "alpha": 0.1,
            "triples": curve_triples,
            "mean_deviation": float(off.mean()),
            "largest_deviation": float(off.max()),
        },
    }
    undefined: dict[str, str] = {}
    findings = _findings(measured, results)
    if written is not None:
        scored = predictions.told(written, _scores(measured))
        results["predictions"] = scored
        findings += predictions.sentences(scored)
        undefined = {s["name"]: s["why"] for s in scored["scored"] if s["outcome"] == "undefined"}
    return ScaleStudy(
        results,
        {
            "models": table,
            "calibration": points,
            "calibration_curve": curve.rename(columns={"sink": "sink_mass"}),
        },
        findings=findings,
        undefined=undefined,
    )


def _row(model: Model) -> dict[str, Any]:
    row: dict[str, Any] = {
        "model": model.name,
        "family": model.family,
        "parameters": model.parameters,
        "layers": model.layers,
        "heads": model.heads,
    }
    for name, value in model.values.items():
        row[name] = value
        if name in model.intervals:
            row[f"{name}_low"], row[f"{name}_high"] = model.intervals[name]
    return {
        **row,
        "classical_ari": model.classical_ari,
        "regime": model.regime,
        "regime_applies": model.regime_applies,
        "position_0": model.position_0,
        "weights_sha256": model.weights,
    }


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {key: None if isinstance(value, float) and value != value else value for key, value in row.items()}


def _families(measured: Sequence[Model]) -> dict[str, list[Model]]:
    found: dict[str, list[Model]] = {}
    for model in measured:
        found.setdefault(model.family or model.name, []).append(model)
    return found


def tau(pairs: Sequence[tuple[tuple[float, float], tuple[float, float]]]) -> float | None:
    """Kendall's τ over given pairs of points: (concordant − discordant) / pairs; None without a pair.

    Pairs with equal first coordinates say nothing and are left out; equal second ones count as neither.
    """
    told = [(a, b) for a, b in pairs if a[0] != b[0]]
    if not told:
        return None
    return float(np.mean([np.sign((a[0] - b[0]) * (a[1] - b[1])) for a, b in told]))


def _scores(measured: Sequence[Model]) -> list[predictions.Score]:
    hardest = {  # the model that comes nearest to contradicting the prediction
        metric: max(measured, key=lambda m, name=f"ari_{metric}": m.values[name])
        if metric != "content"
        else min(measured, key=lambda m: m.values["ari_content"])
        for metric in (*CLASSICAL, "content")
    }
    found = [
        predictions.clusters_differ(
            {metric: model.values[f"ari_{metric}"] for metric, model in hardest.items()},
            CLASSICAL,
            {
                metric: model.intervals[f"ari_{metric}"]
                for metric, model in hardest.items()
                if f"ari_{metric}" in model.intervals
            },
        )
    ]
    worst = sorted({hardest[metric].name for metric in CLASSICAL})
    found[0] = replace(found[0], numbers={**found[0].numbers, "highest in": ", ".join(worst)})
    points = [(m.values["signature_mass"], m.classical_ari) for m in measured]
    few = "" if len(measured) >= 3 else f"{len(measured)} models make no trend; it needs three"
    value = None if few else tau(list(itertools.combinations(points, 2)))
    numbers = {"models": len(measured)} | ({} if value is None else {"tau": value})
    found.append(predictions.by_order(predictions.ARI_FALLS.name, value, -1, numbers, few))
    families = [group for group in _families(measured).values() if len(group) > 1]
    for prediction, name in (
        (predictions.SINK_RISES, "row_mass"),
        (predictions.REVERSAL_RISES, "reversal_jensen_shannon"),
    ):
        pairs = [
            sorted(pair, key=lambda m: m.parameters)
            for group in families or [list(measured)]
            for pair in itertools.combinations(group, 2)
        ]
        scope = "within families" if families else "over all models, of different families"
        value = tau([tuple((m.parameters, m.values[name]) for m in pair) for pair in pairs])
        numbers = {"pairs": len(pairs), "scope": scope} | ({} if value is None else {"tau": value})
        unequal = [(a, b) for a, b in pairs if a.parameters != b.parameters]
        rises = [rise(a, b, name) for a, b in unequal]
        told = [each for each in rises if each is not None]
        numbers["pairs told apart"] = sum(low > 0 or high < 0 for _, low, high in told)
        if len(told) == 1:
            numbers["difference"] = list(told[0])
        signs = [None if each is None else int(each[1] > 0) - int(each[2] < 0) or None for each in rises]
        found.append(
            predictions.by_pairs(
                prediction.name,
                signs,
                numbers,
                "all models have the same number of parameters",
                "the differences lie within their 95 % intervals over resampled text; more sequences would "
                "narrow them"
                if len(told) == len(rises)
                else "no interval, so no difference can be told from that of another text; ask for "
                "a bootstrap of 100 and more sequences than one block",
            )
        )
    return found


def rise(small: Model, large: Model, name: str) -> tuple[float, float, float] | None:
    """Value of the larger model minus that of the smaller, and its 95 % interval; None without intervals.

    The ends add the two models' own half-widths in squares, as for independent errors (Newcombe 1998, square
    and add): the same text moves models alike, so that the interval is rather too wide than too narrow.
    """
    ends = small.intervals.get(name), large.intervals.get(name)
    if ends[0] is None or ends[1] is None:
        return None
    (a_low, a_high), (b_low, b_high) = ends
    a, b = small.values[name], large.values[name]
    down, up = np.hypot(b - b_low, a_high - a), np.hypot(b_high - b, a - a_low)
    return b - a, float(b - a - down), float(b - a + up)


def _findings(measured: Sequence[Model], results: Mapping[str, Any]) -> list[str]:
    def told(model: Model, name: str) -> str:
        ends = model.intervals.get(name)
        return f"{model.values[name]:.1%}" + (f" ({ends[0]:.1%} to {ends[1]:.1%})" if ends else "")

    ordered = sorted(measured, key=lambda m: m.parameters)
    intervals = any(model.intervals for model in measured)
    note = " (one seed's text" + (", with 95 % intervals over resampled text)" if intervals else ")")
    off = results["calibration"]
    return [
        f"Sink mass of rows, from the smallest model to the largest{note}: "
        + "; ".join(f"{m.name} {told(m, 'row_mass')}" for m in ordered)
        + ".",
        f"Jensen-Shannon verdicts that reverse when the sink is dropped{note}: "
        + "; ".join(f"{m.name} {told(m, 'reversal_jensen_shannon')}" for m in ordered)
        + ". Under the content distance none can.",
        "From the curve that knows only the signature's sink mass, reversal rates (cosine, JS, Euclidean) "
        f"lie {off['mean_deviation']:.1%} away on average and {off['largest_deviation']:.1%} at most.",
    ]
