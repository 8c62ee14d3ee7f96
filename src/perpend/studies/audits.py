"""Audits of what is read off head signatures: which of it is the estimator, the metric or a convention.

    study = audit_signatures(log_signatures, sink=[0], arithmetic=means)

Everything here comes from saved signatures (layers, heads, keys) of a survey; no model is run. Rates are
exact, over all head triples, never sampled; fractions.

    tail          share of squared d_A⊥ on coordinates that are small in either head
    rivals        Hellinger and Fisher-Rao order all pairs alike; Hellinger on content against dropped-row JS
    content       dropped-row JS against d_A⊥: ranking, nearest neighbours, taxonomies
    aggregation   reversal rates on arithmetic and on Aitchison means
    temperature   content logits times τ: d_A⊥ → τ·d_A⊥, so no verdict moves; dropped-row JS has no such law
    sink_set      first key against first four: content distances are nested projections
    taxonomy      clusters of heads, kept against dropped
    witness       Theorem 1 in the wild: the triples on which all classical verdicts reverse at once

Source: "Which Question Is Your Attention Metric Answering?", Appendix E.1, E.2, Tables 5-8, Figure 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.errors import InputError, PerpendError
from perpend.progress import Advance, Progress, silent
from perpend.studies import taxonomy
from perpend.studies.audit_intervals import REPLICATES, BlockSums, audit_intervals
from perpend.studies.audit_measures import (
    CLASSICAL,
    content_channel,
    flips,
    heated,
    nearest,
    retention,
    rivals,
    same_order,
    sink_set,
    tail,
    temperature,
    witness,
    worst,
)
from perpend.studies.audit_words import findings
from perpend.studies.result import Study
from perpend.studies.reversal import matrices

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "CLASSICAL",
    "Audit",
    "BlockSums",
    "audit_signatures",
    "content_channel",
    "flips",
    "heated",
    "nearest",
    "retention",
    "rivals",
    "same_order",
    "sink_set",
    "tail",
    "temperature",
    "witness",
    "worst",
]

PARTS = ("distances", "temperature", "aggregation", "sink set", "taxonomy", "witness")  # told as progress


class Audit(Study):
    """The audits of one survey."""


def audit_signatures(
    log_signatures: np.ndarray,
    sink: Sequence[int] = (0,),
    arithmetic: np.ndarray | None = None,
    blocks: BlockSums | None = None,
    replicates: int = REPLICATES,
    progress: Progress = silent,
) -> Audit:
    """All audits of signatures (layers, heads, keys), log-probabilities; `arithmetic` are probabilities.

    `blocks`: sums per block of sequences, for intervals of every rate from `replicates` resamples. Heads
    without a signature (NaN) are left out. Raises InputError with fewer than four heads that have one,
    and for a sink outside the keys.
    """
    resamples = replicates + 1 if replicates and blocks is not None and len(blocks.rows) > 1 else 0
    with progress(total=len(PARTS) + resamples, unit="parts", description="audit") as advance:
        return _audited(log_signatures, sink, arithmetic, blocks, replicates, advance)


def _audited(
    log_signatures: np.ndarray,
    sink: Sequence[int],
    arithmetic: np.ndarray | None,
    blocks: BlockSums | None,
    replicates: int,
    advance: Advance,
) -> Audit:
    """The audits; `advance` after each of PARTS and each resample."""
    import pandas as pd

    defined = np.isfinite(log_signatures).all(-1)
    index = [(int(layer), int(head)) for layer, head in np.argwhere(defined)]
    if len(index) < 4:
        raise InputError(f"an audit needs at least four heads with a signature, and there are {len(index)}")
    rows, sink, undefined = log_signatures[defined], sorted(int(key) for key in sink), {}
    keys = rows.shape[1]
    if not sink or not 0 <= sink[0] <= sink[-1] < keys:
        raise InputError(f"the sink {sink} is not among keys 0 to {keys - 1}")
    pairs = matrices(rows, sink)
    advance(1)
    if not np.array_equal(*pairs["content"]):
        raise PerpendError("d_A⊥ differs between keep and drop, which it cannot: please report this")
    results: dict[str, Any] = {
        "heads": len(index),
        "sink": {"columns": sink, "signature_mass": float(np.exp(rows[:, sink]).sum(1).mean())},
        "tail": tail(rows, sink),
        "rivals": rivals(pairs),
        "content": content_channel(pairs["jensen_shannon"][1], pairs["content"][1]),
        "temperature": temperature(rows, sink),
    }
    advance(1)
    results["temperature_worst"] = worst(results["temperature"])
    results["aggregation"] = {"aitchison": {m: flips(*pairs[m]) for m in CLASSICAL}, "arithmetic": None}
    if arithmetic is None or not (arithmetic[defined] > 0).all():
        undefined["aggregation"] = (
            "no arithmetic signatures" if arithmetic is None else "arithmetic signatures with zeros"
        )
    else:
        native = matrices(np.log(arithmetic[defined]), sink, CLASSICAL)
        results["aggregation"]["arithmetic"] = {m: flips(*native[m]) for m in CLASSICAL}
    advance(1)
    four = list(range(4))
    if set(sink) < set(four) and keys > 6:
        results["sink_set"] = sink_set(rows, sink, four)
    else:
        results["sink_set"] = None
        undefined["sink_set"] = f"the sink {sink} of {keys} keys is not a part of the first four"
    advance(1)
    clusters = taxonomy.stability({metric: pairs[metric] for metric in taxonomy.METRICS})
    average = clusters[clusters["linkage"] == "average"].groupby("metric", sort=False)["ari"].mean()
    results["taxonomy"] = {"between_conventions": {m: float(v) for m, v in average.items()}}
    advance(1)
    found = witness(pairs)
    advance(1)
    results["witness"] = {"share": found.share, "margin": found.margin, "triple": None}
    if found.triple is None:
        undefined["witness"] = "no triple of heads reverses cosine, Jensen-Shannon and Euclidean at once"
    else:
        results["witness"]["triple"] = _told(found.triple, index, pairs)
    results["intervals"] = {}
    if blocks is None or len(blocks.rows) < 2:
        undefined["intervals"] = (
            "the survey has a single block of sequences"
            if blocks is not None
            else "no sums per block of sequences: a survey that keeps them gives intervals"
        )
    elif replicates:
        results["intervals"] = audit_intervals(results, blocks, defined, replicates, advance=advance)
    tables = {
        "temperature": pd.DataFrame(results["temperature"]),
        "taxonomy": clusters,
        "heads": _plane(index, pairs),
    }
    if results["intervals"]:
        tables["intervals"] = pd.DataFrame(
            [{"rate": name, **number} for name, number in results["intervals"].items()]
        )
    arrays = {
        "triple": rows[list(found.triple)] if found.triple else np.empty((0, keys)),
        "content_distance": pairs["content"][1],
        "jensen_shannon_keep": pairs["jensen_shannon"][0],
        "jensen_shannon_drop": pairs["jensen_shannon"][1],
    }
    return Audit(results, tables, arrays, findings(results), undefined)


def _told(triple: tuple[int, int, int], index: Sequence[tuple[int, int]], pairs: Any) -> dict[str, Any]:
    p, q, r = triple
    return {
        **{name: list(index[head]) for name, head in zip("pqr", triple)},
        "distances": {
            metric: {
                policy: {"pq": float(d[p, q]), "pr": float(d[p, r])}
                for policy, d in zip(("keep", "drop"), pairs[metric])
            }
            for metric in (*CLASSICAL, "content")
        },
    }


def _plane(index: Sequence[tuple[int, int]], pairs: Any) -> pd.DataFrame:
    """Where each head lies on a plane, under three questions, and its cluster of six there."""
    import pandas as pd

    table = pd.DataFrame(index, columns=["layer", "head"])
    questions = {
        "js_keep": pairs["jensen_shannon"][0],
        "js_drop": pairs["jensen_shannon"][1],
        "content": pairs["content"][1],
    }
    for name, distances in questions.items():
        places = taxonomy.plane(distances)
        table[f"{name}_x"], table[f"{name}_y"] = places[:, 0], places[:, 1]
        table[f"{name}_cluster"] = taxonomy.cut(taxonomy.merges(distances), min(6, len(index)))
    return table
