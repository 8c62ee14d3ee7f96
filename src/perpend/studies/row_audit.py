"""The closer-head question on single rows: do verdicts reverse where no mean has been taken?

    reading = row_audit(survey)           # a survey of survey_attention(..., row_sample=256)

At each sampled place (a sequence and a query) the rows of three heads are compared, the same place for all
three: is q's row or r's closer to p's? A reversal is a verdict that differs between keep and drop. Places are
a seeded uniform sample (`perpend.surveys.places`); at each one `triples` triples of heads are drawn anew.
Intervals are from resampled sequences, with all the places of each, for every rate.

Source: "Which Question Is Your Attention Metric Answering?", Section 7: audits there are of signatures, not
rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.errors import InputError
from perpend.geometry.dissimilarity import dissimilarities
from perpend.studies import reversal
from perpend.studies.readings import Reading
from perpend.studies.resampling import FRACTION, basic_interval, draws, said

if TYPE_CHECKING:
    from perpend.surveys.attention_result import AttentionSurvey

METRICS = ("cosine", "jensen_shannon", "euclidean", "hellinger", "content", "aitchison")
COUNTED = ("reversal", "ties", "agrees_keep", "agrees_drop")
RESAMPLES = 1000


def row_audit(
    survey: AttentionSurvey,
    triples: int = 1000,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> Reading:
    """Verdicts on the sampled single rows of a survey.

    results: `places`, `sequences` (with a place), `triples` a place, `heads`, and `metrics`: metric →
    `reversal` and `ties` between keep and drop on rows, `agrees_keep` and `agrees_drop` (row verdicts that
    are those of the heads' signatures), each {value, low, high}, and `signatures`, the exact reversal rate of
    signatures. Table `row_audit`: one row a place and metric. Raises InputError for a survey without single
    rows, or without a place where three heads have one.
    """
    import pandas as pd

    picked = survey.picked
    if picked is None:
        raise InputError("this survey kept no single rows: survey_attention(..., row_sample=256)")
    sink = list(survey.support.columns.sink)
    known = np.isfinite(survey.signatures).all(-1)
    if known.sum() < 3:
        raise InputError("fewer than three heads have a signature: there is no verdict to ask for")
    pairs = reversal.matrices(survey.signatures[known], sink, METRICS)
    number = np.full(known.shape, -1)
    number[known] = np.arange(known.sum())
    generator = np.random.default_rng(seed)
    rows = []
    for place in range(len(picked.places)):
        logs = picked.log_rows(place)
        here = known & np.isfinite(logs).all(-1)
        if here.sum() < 3:
            continue
        chosen = reversal.sample_triples(int(here.sum()), triples, int(generator.integers(2**32)))
        counts = _place(logs[here], number[here], chosen, sink, pairs)
        at = {"sequence": int(picked.places.sequence[place]), "query": int(picked.places.query[place])}
        rows += [{**at, "metric": m, "triples": len(chosen), **counts[m]} for m in METRICS]
    if not rows:
        raise InputError("at none of the sampled places do three heads have a row on the whole support")
    table = pd.DataFrame(rows)
    metrics = {}
    for metric in METRICS:
        numbers = rates(table[table["metric"] == metric], resamples, seed)
        exact = float(reversal.exact_rates(*pairs[metric])[0].mean())
        metrics[metric] = {**numbers, "signatures": exact}
    sequences = int(table["sequence"].nunique())
    results: dict[str, Any] = {
        "places": len(table) // len(METRICS),
        "sequences": sequences,
        "triples": triples,
        "heads": int(known.sum()),
        "metrics": metrics,
    }
    js = metrics["jensen_shannon"]
    findings = [
        f"On single rows (three heads at the same place, sink rule {survey.support.rule!r}, "
        f"{results['places']} places in {sequences} sequences) Jensen-Shannon verdicts reverse in "
        f"{said(js['reversal'])} of triples when the sink is dropped; on signatures in "
        f"{js['signatures']:.1%}. The signatures' verdict is that of the rows in {said(js['agrees_keep'])} "
        f"with the sink and {said(js['agrees_drop'])} without; under d_A⊥ no row verdict can reverse, and "
        f"{said(metrics['content']['agrees_drop'])} agree with the signatures'."
    ]
    return Reading(results, {"row_audit": table}, findings)


def rates(table: Any, resamples: int = RESAMPLES, seed: int = 0) -> dict[str, dict[str, float]]:
    """Rates of one metric's places, as in the table `row_audit`, with intervals over sequences.

    Each {value, low, high}: counts summed over places, over their triples; without an interval for a single
    sequence.
    """
    sums = table.groupby("sequence", sort=True)[[*COUNTED, "triples"]].sum()
    counts, total = sums[list(COUNTED)].to_numpy(np.float64), sums["triples"].to_numpy(np.float64)
    values = counts.sum(0) / total.sum()
    found = {name: {"value": float(value)} for name, value in zip(COUNTED, values)}
    if len(sums) < 2 or not resamples:
        return found
    weights = draws(len(sums), resamples, seed)
    replicates = (weights @ counts) / (weights @ total)[:, None]
    for i, name in enumerate(COUNTED):
        ends = basic_interval(values[i], values[i], replicates[:, i], FRACTION)
        if ends is not None:
            found[name] |= {"low": ends[0], "high": ends[1]}
    return found


def _place(
    rows: np.ndarray,
    number: np.ndarray,
    chosen: np.ndarray,
    sink: list[int],
    pairs: dict[str, tuple[np.ndarray, np.ndarray]],
) -> dict[str, dict[str, int]]:
    """Counts at one place, by metric: rows (heads, parts), `number` of each head among the signatures."""
    p, q, r = (rows[part] for part in chosen.T)
    signs: dict[str, list[np.ndarray]] = {metric: [] for metric in METRICS}
    for policy in ("keep", "drop"):
        near = dissimilarities(p, q, METRICS, sink=sink, policy=policy, log=True)
        far = dissimilarities(p, r, METRICS, sink=sink, policy=policy, log=True)
        for metric in METRICS:
            signs[metric].append(np.sign(near[metric] - far[metric]))
    counts = {}
    for metric, (keep, drop) in signs.items():
        told = [reversal.verdicts(matrix, number[chosen]) for matrix in pairs[metric]]
        counts[metric] = {
            "reversal": int((keep * drop < 0).sum()),
            "ties": int((keep * drop == 0).sum()),
            "agrees_keep": int((keep * told[0] > 0).sum()),
            "agrees_drop": int((drop * told[1] > 0).sum()),
        }
    return counts
