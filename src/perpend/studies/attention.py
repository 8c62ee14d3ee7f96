"""What a survey of attention says: sink, entropy split, reversals, collapse, regime, from saved sums.

    result = attention_study({0: survey, 1: other}, triples=50_000)
    result.results["reversal"]["jensen_shannon"]["mean"]

Takes one survey a seed (`surveys.attention`), runs nothing on a model, and returns plain numbers, tables and
arrays. Scalars and per-layer values are means over the seeds; `sd` is the population sd over them. Intervals,
split halves and signatures are those of the first seed.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.2, Tables 2 and 3, Appendix E.5.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.errors import InputError
from perpend.geometry import entropy
from perpend.report.notebook import Rich
from perpend.studies import readings, reversal
from perpend.studies.collapse import Disagreement, dispersion_disagreement, entropy_disagreement
from perpend.studies.readings import Reading
from perpend.studies.regime import CAVEAT, NO_SINK, coefficient_of_variation, regime
from perpend.studies.row_audit import row_audit
from perpend.studies.whole_rows import whole_rows

if TYPE_CHECKING:
    import pandas as pd

    from perpend.surveys.attention import AttentionSurvey

PER_LAYER = ("total", "binary", "content", "weighted_content", "sink_mass", "dispersion")
REPLICATES = 200
SPLITS = 8
BLOCK_BYTES = 64 << 20  # sums of one kind, for audits: 64 blocks of 600 heads on 64 keys are 19 MB


@dataclass(frozen=True, repr=False)
class AttentionStudy(Rich):
    """Plain results: `results` as in run.json, `tables` by name, `arrays` by name, `findings` in words."""

    results: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    arrays: dict[str, np.ndarray]
    findings: list[str]
    conventions: dict[str, Any]
    undefined: dict[str, str] = field(default_factory=dict)


def attention_study(
    surveys: Mapping[int, AttentionSurvey],
    *,
    triples: int = 50_000,
    replicates: int = REPLICATES,
    splits: int = SPLITS,
) -> AttentionStudy:
    """All of the survey's questions, from one survey a seed: {0: survey} for one.

    `triples` sampled questions a seed; `replicates` bootstrap resamples of the first seed's sequence blocks
    and `splits` random halves of them (0 for none). Raises InputError without a survey, or with fewer than
    three heads that have a signature.
    """
    if not surveys:
        raise InputError("an attention study needs at least one survey")
    first = next(iter(surveys.values()))
    layers = {seed: _layers(survey) for seed, survey in surveys.items()}
    mean = {
        name: np.mean([table[name] for table in layers.values()], axis=0)
        for name in next(iter(layers.values()))
    }
    cv = [coefficient_of_variation(survey.signature_sink) for survey in surveys.values()]
    uniform = len(first.support.columns.sink) / first.support.columns.parts
    verdict = regime(first.signature_sink, uniform)
    entropy_steps = [entropy_disagreement(t["total"], t["content"]) for t in layers.values()]
    dispersion_steps = [dispersion_disagreement(t["total"], t["dispersion"]) for t in layers.values()]
    rates, heads_table = _reversals(surveys, triples, replicates, splits)
    parts = first.support.columns.parts
    sinks = len(first.support.columns.sink)
    results = {
        "sink": {
            "row_mass": _nanmean(mean["sink_mass"]),
            "signature_mass": _nanmean(mean["signature"]),
            "signature_cv": float(np.mean(cv)),
            "per_layer": [
                {"row": _number(row), "signature": _number(signature)}
                for row, signature in zip(mean["sink_mass"], mean["signature"])
            ],
            "uniform_mass": sinks / parts,
            "columns": list(first.support.columns.sink),
            **({"sink_heads_0.3": first.sink_rate()} if "importance" in first.blocks[0] else {}),
        },
        "entropy": {
            "per_layer": [
                {name: _number(mean[name][layer]) for name in PER_LAYER}
                for layer in range(len(mean["total"]))
            ],
            "uniform": {"total": float(np.log(parts)), "content": float(np.log(parts - sinks))},
        },
        "reversal": rates,
        "collapse": {
            "disagreement": _mean_rate(entropy_steps),
            "disagreement_dispersion": _mean_rate(dispersion_steps),
            "steps": entropy_steps[0].steps,
            "layers": list(entropy_steps[0].where),
        },
        "regime": verdict.verdict,
        "regime_applies": verdict.applies,
    }
    lacking = no_interval(first, replicates)
    further = further_readings(first, replicates)
    for name, reading in further.items():
        results[name] = reading.results
    import pandas as pd

    where = set(entropy_steps[0].where)
    table = pd.DataFrame({"layer": np.arange(len(mean["total"])), **mean})
    table["disagrees_with_next"] = [layer in where for layer in table["layer"]]
    return AttentionStudy(
        results,
        {
            "layers": table.rename(
                columns={"signature": "signature_sink_mass", "sink_mass": "row_sink_mass"}
            ),
            "heads": heads_table,
            "reversal": pd.DataFrame([{"metric": name, **_flat(rate)} for name, rate in rates.items()]),
            **{name: each for reading in further.values() for name, each in reading.tables.items()},
        },
        {
            "signatures": first.signatures,
            "arithmetic": first.arithmetic,
            **block_sums(first),
        },
        _findings(results, first, len(surveys))
        + ([f"{lacking[0].upper()}{lacking[1:]}."] if lacking else [])
        + [line for reading in further.values() for line in reading.findings],
        {
            "sink": first.support.rule,
            "support": first.support.words,
            "notes": list(first.notes),
            "triples": triples,
            "regime_rule": CAVEAT,
            "sd": "population, over seeds; none of one seed",
            "seeds": f"numbers are means over {_seeds(surveys)}; intervals, floors and signatures are of "
            f"seed {next(iter(surveys))}",
            "interval": f"95 %, {len(first.blocks)} blocks of consecutive sequences resampled "
            f"({first.sequences} sequences)",
            "entropy": "nats; total = binary + weighted_content (+ within_sink for a sink of several keys)",
            "reversal": "reversals / all triples; ties counted apart; exact over all triples",
        },
        {
            **{str(layer): why for layer, why in first.undefined.items()},
            **({"intervals": lacking} if lacking else {}),
            **{
                f"{name}.{what}": why
                for name, reading in further.items()
                for what, why in reading.undefined.items()
            },
        },
    )


def no_interval(survey: AttentionSurvey, replicates: int) -> str:
    """Why a survey has no intervals though they were asked for, and how to get them; empty where it has."""
    if not replicates or len(survey.blocks) > 1:
        return ""
    return (
        f"no intervals: all {survey.sequences} sequences are in one block, and blocks are what is resampled; "
        "give more sequences, or smaller batches or blocks"
    )


def _seeds(surveys: Mapping[int, AttentionSurvey]) -> str:
    return f"seed{'s' if len(surveys) > 1 else ''} {', '.join(map(str, surveys))}"


def further_readings(survey: AttentionSurvey, replicates: int = REPLICATES) -> dict[str, Reading]:
    """What else the survey's pass read, by name: windows, conventions, weights, whole_rows, row_audit."""
    found: dict[str, Reading] = {}
    if survey.windows:
        found["windows"] = readings.windows(survey, replicates)
    if "drop-both" in survey.variants:
        found["conventions"] = readings.conventions(survey, replicates)
    if survey.weighted:
        found["weights"] = readings.weights(survey, replicates)
    if survey.whole is not None:
        found["whole_rows"] = whole_rows(survey, replicates)
    if survey.picked is not None:
        found["row_audit"] = row_audit(survey, resamples=5 * replicates)
    return found


def block_sums(survey: AttentionSurvey) -> dict[str, np.ndarray]:
    """The sums per block of sequences from which audits resample, float64; none where they are large.

    `block_logits` and `block_arithmetic` [blocks, layers, heads, parts], `block_rows` [blocks, layers]. Left
    out with a single block, and where one of them exceeds BLOCK_BYTES.
    """
    logits = survey.stacked("logits")
    if len(logits) < 2 or logits.nbytes > BLOCK_BYTES or survey.support.ragged:
        return {}
    rows = survey.stacked("rows").astype(np.float64)
    return {"block_logits": logits, "block_arithmetic": survey.stacked("arithmetic"), "block_rows": rows}


def _layers(survey: AttentionSurvey) -> dict[str, np.ndarray]:
    """Per layer (layers,): the entropy split and sink masses, means over heads and rows."""
    table = survey.per_layer().rename(columns={"row_mass": "sink_mass", "signature_mass": "signature"})
    return {name: table[name].to_numpy(np.float64) for name in (*PER_LAYER, "within_sink", "signature")}


def _reversals(
    surveys: Mapping[int, AttentionSurvey], triples: int, replicates: int, splits: int
) -> tuple[dict[str, Any], pd.DataFrame]:
    sampled: dict[str, list[reversal.Reversal]] = {metric: [] for metric in reversal.METRICS}
    exact: dict[str, list[np.ndarray]] = {metric: [] for metric in reversal.METRICS}
    kept: dict[str, Any] = {}
    for seed, survey in surveys.items():
        defined = np.isfinite(survey.signatures).all(-1)
        sink = list(survey.support.columns.sink)
        pairs = reversal.matrices(survey.signatures[defined], sink)
        chosen = reversal.sample_triples(int(defined.sum()), triples, seed)
        for metric, (keep, drop) in pairs.items():
            both = reversal.verdicts(keep, chosen), reversal.verdicts(drop, chosen)
            sampled[metric].append(reversal.compare(*both))
            exact[metric].append(reversal.exact_rates(keep, drop)[0])
        if not kept:
            kept = {"pairs": pairs, "triples": chosen, "defined": defined, "survey": survey, "sink": sink}
    rates: dict[str, Any] = {}
    for metric, found in sampled.items():
        values = [each.rate for each in found]
        rates[metric] = {
            "mean": float(np.mean(values)),
            "sd": float(np.std(values)) if len(values) > 1 else None,
            "ties": float(np.mean([each.ties for each in found])),
            "exact": float(np.mean([each.mean() for each in exact[metric]])),
        }
    survey, defined = kept["survey"], kept["defined"]
    if replicates and len(survey.blocks) > 1:
        intervals = reversal.bootstrap(
            kept["pairs"],
            (signatures[defined] for signatures in survey.replicates(replicates)),
            ((a[defined], b[defined]) for a, b in survey.halves(splits)),
            kept["triples"],
            kept["sink"],
        )
        for metric, found in intervals.items():
            noise = found.noise
            rates[metric] |= {
                "low": found.low,
                "high": found.high,
                "significant": noise.significant,
                "rate_among_significant": _number(noise.rate),
                "noise_floor_keep": _number(noise.floor_keep),
                "noise_floor_drop": _number(noise.floor_drop),
            }
    table = survey.per_head()
    table = table[np.isfinite(table["signature_mass"])].reset_index(drop=True)
    table["signature_entropy"] = entropy(survey.signatures[defined], log=True)
    for metric in reversal.METRICS:
        table[f"reversal_{metric}"] = exact[metric][0]
    return rates, table


def _findings(results: Mapping[str, Any], survey: AttentionSurvey, seeds: int) -> list[str]:
    """The three findings in words, with their numbers and intervals, and which seeds they speak of."""
    mean = f"mean over {seeds} seeds" if seeds > 1 else ""
    over, of_first = (f" ({mean})", " of the first") if mean else ("", "")
    rate, sink = results["reversal"]["jensen_shannon"], results["sink"]
    interval = f"95 % interval{of_first} {rate['low']:.1%} to {rate['high']:.1%}" if "low" in rate else ""
    told = "; ".join(part for part in (mean, interval) if part)
    interval = f" ({told})" if told else ""
    floor = ""
    if rate.get("noise_floor_keep") is not None:
        floor = (
            f" Between two halves of the text, under one convention, {rate['noise_floor_keep']:.1%} differ "
            f"(sink kept) or {rate['noise_floor_drop']:.1%} (dropped)."
        )
    lines = [
        f"{rate['exact']:.1%} of closer-head verdicts under Jensen-Shannon reverse when the sink is dropped"
        f"{interval}; under the content distance none can.{floor}",
        f"The sink (rule {survey.support.rule!r}) takes {sink['row_mass']:.1%} of a row on average and "
        f"{sink['signature_mass']:.1%} of a head's signature{over}; uniform attention would give "
        f"{sink['uniform_mass']:.1%}.",
    ]
    collapse = results["collapse"]
    if collapse["disagreement"] is not None:
        lines.append(
            f"Row entropy and content entropy move in opposite directions on {collapse['disagreement']:.1%} "
            f"of the {collapse['steps']} steps from one layer to the next{over}."
        )
    said = {
        "content": "prune by the content distance",
        "js": "prune by Jensen-Shannon with the sink",
        "abstain": "no prediction",
    }[results["regime"]]
    if not results["regime_applies"]:
        lines.append(
            f"The regime rule does not apply: it reads the spread of a sink over heads, and here the sink's "
            f"share of a signature is under {NO_SINK:g} times that of uniform attention "
            f"(coefficient of variation {sink['signature_cv']:.2f})."
        )
        return lines
    lines.append(
        f"The sink share varies over heads with a coefficient of variation of {sink['signature_cv']:.2f}: "
        f"the regime rule says {results['regime']!r} ({said}); it is {CAVEAT.split(':')[0]}."
    )
    return lines


def _flat(rate: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.nan if value is None else value for name, value in rate.items()}


def _mean_rate(found: list[Disagreement]) -> float | None:
    return _number(float(np.mean([each.rate for each in found])))


def _nanmean(values: np.ndarray) -> float | None:
    values = values[np.isfinite(values)]
    return float(values.mean()) if values.size else None


def _number(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None
