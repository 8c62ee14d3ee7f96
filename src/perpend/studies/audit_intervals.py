"""Intervals over sequences for every rate of an audit, from the sums per block that a survey's run keeps.

    sums = BlockSums.of(run.arrays)                 # None for a run without them
    study = audit_signatures(signatures, sink, arithmetic, blocks=sums)

A replicate resamples the blocks, forms the signatures of that text and measures everything again: verdicts on
TRIPLES sampled triples (the rates themselves are exact over all), trees by average linkage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy import stats

from perpend.geometry import pairwise
from perpend.progress import Advance
from perpend.studies import audit_measures as measures
from perpend.studies import reversal, taxonomy
from perpend.studies.resampling import CORRELATION, FRACTION, intervals

TRIPLES = 20_000
REPLICATES = 100


@dataclass(frozen=True)
class BlockSums:
    """Sums per block of sequences, float64: logits and rows' probabilities [blocks, layers, heads, keys].

    `rows` [blocks, layers]. `arithmetic` may be missing.
    """

    logits: np.ndarray
    rows: np.ndarray
    arithmetic: np.ndarray | None = None

    @classmethod
    def of(cls, arrays: Mapping[str, np.ndarray]) -> BlockSums | None:
        """Those of a run folder; None where the run kept none."""
        if "block_logits" not in arrays or "block_rows" not in arrays:
            return None
        return cls(arrays["block_logits"], arrays["block_rows"], arrays.get("block_arithmetic"))

    def replicates(
        self, defined: np.ndarray, count: int, seed: int = 0
    ) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
        """Log-signatures and arithmetic means (heads, keys) of the `defined` heads, of resampled blocks.

        A resample without a row in some layer is passed over.
        """
        generator, blocks = np.random.default_rng(seed), len(self.rows)
        for _ in range(count):
            weights = np.bincount(generator.integers(0, blocks, blocks), minlength=blocks).astype(np.float64)
            rows = weights @ self.rows
            with np.errstate(divide="ignore", invalid="ignore"):
                mean = (np.tensordot(weights, self.logits, 1) / rows[:, None, None])[defined]
            if not np.isfinite(mean).all():
                continue
            top = mean.max(-1, keepdims=True)
            logs = mean - top - np.log(np.exp(mean - top).sum(-1, keepdims=True))
            native = None
            if self.arithmetic is not None:
                native = (np.tensordot(weights, self.arithmetic, 1) / rows[:, None, None])[defined]
            yield logs, native


def audit_intervals(
    results: Mapping[str, Any],
    blocks: BlockSums,
    defined: np.ndarray,
    replicates: int = REPLICATES,
    seed: int = 0,
    advance: Advance = lambda amount=1: None,
) -> dict[str, dict[str, float]]:
    """name → {value, low, high} for the rates of `results` (an audit's), 95 %, basic bootstrap.

    Names are paths in `results`: `rivals/hellinger`, `temperature/jensen_shannon/0.5/flips`, ….
    `advance` is called after each resample.
    """
    values = flat(results)
    sink = list(results["sink"]["columns"])
    heads = int(defined.sum())
    chosen = reversal.sample_triples(heads, TRIPLES, seed)
    whole = next(
        BlockSums(
            blocks.logits.sum(0, keepdims=True),
            blocks.rows.sum(0, keepdims=True),
            None if blocks.arithmetic is None else blocks.arithmetic.sum(0, keepdims=True),
        ).replicates(defined, 1)
    )
    wanted = set(values)

    def read(pair: tuple[np.ndarray, np.ndarray | None]) -> dict[str, float]:
        found = measure(*pair, sink, chosen, results)
        advance(1)
        return {name: found[name] for name in wanted & set(found)}

    return intervals(
        values,
        read(whole),
        (read(pair) for pair in blocks.replicates(defined, replicates, seed)),
        lambda name: CORRELATION if name.endswith(("spearman", "ari")) or "taxonomy" in name else FRACTION,
    )


def flat(results: Mapping[str, Any]) -> dict[str, float]:
    """The resampled rates of an audit's results, by path; those without a value are left out."""
    found: dict[str, float | None] = {"sink/signature_mass": results["sink"]["signature_mass"]}
    for threshold, row in results["tail"].items():
        found[f"tail/{threshold}"] = row["share"]
    rival = results["rivals"]
    for name in ("hellinger", "fisher_rao", "hellinger_content_neighbours"):
        found[f"rivals/{name}"] = rival[name]
    for sparsity, value in rival["hellinger_content_prune_sets"].items():
        found[f"rivals/prune_sets/{sparsity}"] = value
    found |= {f"content/{name}": results["content"][name] for name in ("spearman", "neighbours", "cross_ari")}
    for row in results["temperature"]:
        if row["metric"] == "jensen_shannon":  # d_A⊥ changes nothing in any resample either
            found[f"temperature/jensen_shannon/{row['tau']:g}/flips"] = row["flips"]
            found[f"temperature/jensen_shannon/{row['tau']:g}/retention"] = row["retention"]
    worst = results["temperature_worst"]["jensen_shannon"]
    found |= {f"temperature_worst/jensen_shannon/{name}": worst[name] for name in ("flips", "retention")}
    for kind in ("aitchison", "arithmetic"):
        for metric, value in (results["aggregation"][kind] or {}).items():
            found[f"aggregation/{kind}/{metric}"] = value
    if results["sink_set"]:
        found |= {f"sink_set/{m}": results["sink_set"][m] for m in ("jensen_shannon", "content")}
    for metric, value in results["taxonomy"]["between_conventions"].items():
        found[f"taxonomy/{metric}"] = value
    found["witness/share"] = results["witness"]["share"]
    return {name: float(value) for name, value in found.items() if value is not None}


def measure(
    rows: np.ndarray,
    arithmetic: np.ndarray | None,
    sink: Sequence[int],
    chosen: np.ndarray,
    results: Mapping[str, Any],
) -> dict[str, float]:
    """Everything `flat` names, of one text's signatures (heads, keys), verdicts on the chosen triples."""
    pairs = reversal.matrices(rows, sink)
    js, own = pairs["jensen_shannon"][1], pairs["content"][1]

    def flips(first: np.ndarray, second: np.ndarray) -> float:
        return reversal.compare(*(reversal.verdicts(d, chosen) for d in (first, second))).rate

    found: dict[str, float | None] = {"sink/signature_mass": float(np.exp(rows[:, list(sink)]).sum(1).mean())}
    thresholds = [float(threshold) for threshold in results["tail"]]
    for threshold, row in measures.tail(rows, sink, thresholds).items():
        found[f"tail/{threshold}"] = row["share"]
    found |= {f"rivals/{name}": flips(*pairs[name]) for name in ("hellinger", "fisher_rao")}
    hellinger = pairs["hellinger"][1]
    found["rivals/hellinger_content_neighbours"] = float(
        np.mean(measures.nearest(hellinger) == measures.nearest(js))
    )
    for sparsity in results["rivals"]["hellinger_content_prune_sets"]:
        found[f"rivals/prune_sets/{sparsity}"] = measures.shared_prune_set(hellinger, js, float(sparsity))
    upper = np.triu_indices(len(rows), 1)
    found["content/spearman"] = float(stats.spearmanr(js[upper], own[upper]).statistic)
    found["content/neighbours"] = float(np.mean(measures.nearest(js) == measures.nearest(own)))
    found["content/cross_ari"] = taxonomy.between(js, own)
    found |= _temperature(rows, sink, flips, sorted({row["tau"] for row in results["temperature"]}))
    found |= {f"aggregation/aitchison/{m}": flips(*pairs[m]) for m in measures.CLASSICAL}
    if arithmetic is not None and (arithmetic > 0).all():
        native = reversal.matrices(np.log(arithmetic), sink, measures.CLASSICAL)
        found |= {f"aggregation/arithmetic/{m}": flips(*native[m]) for m in measures.CLASSICAL}
    if results["sink_set"]:
        large = results["sink_set"]["large"]
        for metric, before in (("jensen_shannon", js), ("content", own)):
            after = pairwise(rows, metric, sink=large, policy="drop", log=True)
            found[f"sink_set/{metric}"] = flips(before, after)
    for metric in results["taxonomy"]["between_conventions"]:
        found[f"taxonomy/{metric}"] = taxonomy.between(*pairs[metric])
    found["witness/share"] = _witnesses(pairs, chosen)
    return {name: np.nan if value is None else float(value) for name, value in found.items()}


def _temperature(
    rows: np.ndarray, sink: Sequence[int], flips: Any, temperatures: Sequence[float]
) -> dict[str, float]:
    found, base = {}, measures.heated(rows, sink, 1.0, "jensen_shannon")
    worst = {"flips": 0.0, "retention": 1.0}
    for tau in temperatures:
        after = measures.heated(rows, sink, tau, "jensen_shannon")
        flipped, kept = flips(base, after), measures.retention(base, after)
        found[f"temperature/jensen_shannon/{tau:g}/flips"] = flipped
        found[f"temperature/jensen_shannon/{tau:g}/retention"] = kept
        worst = {"flips": max(worst["flips"], flipped), "retention": min(worst["retention"], kept)}
    return {**found, **{f"temperature_worst/jensen_shannon/{name}": v for name, v in worst.items()}}


def _witnesses(pairs: Mapping[str, tuple[np.ndarray, np.ndarray]], chosen: np.ndarray) -> float:
    """Share of the chosen triples on which all classical verdicts reverse at once, the same way."""
    keep, drop = (
        np.stack([reversal.verdicts(pairs[metric][policy], chosen) for metric in measures.CLASSICAL])
        for policy in range(2)
    )
    together = (keep == keep[0]).all(0) & (drop == -keep[0]).all(0) & (keep[0] != 0)
    return float(together.mean())
