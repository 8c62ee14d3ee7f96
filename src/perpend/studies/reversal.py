"""Which of two heads is more similar: how often does the answer depend on keeping or dropping the sink?

A *verdict* on distinct heads (p, q, r) says whether q or r is closer to p. A *reversal* is a verdict that is
strict under both conventions and opposite between them; a triple that is tied under either is counted apart.

    rate = reversals / all triples

`rate` estimates it from sampled triples (the papers' protocol: 50,000, seeded); `exact_rates` counts every
triple: for a fixed p a reversal is a discordant pair of the two orderings of the other heads, so that the
rate is (1 − Kendall τ_p)/2 where nothing is tied, in O(n² log n) for all heads.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.2 (1), Theorem 1, Table 2.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from perpend.errors import InputError
from perpend.geometry import METRICS as REGISTRY
from perpend.geometry import pairwise

FIRST = (
    "cosine",
    "jensen_shannon",
    "euclidean",
    "hellinger",
    "fisher_rao",
    "content",
    "aitchison",
)
METRICS = (
    *FIRST,
    *(name for name, one in REGISTRY.items() if name not in FIRST and not one.takes_weight),
)
"""Metrics of the survey, those of one's own files last; `aitchison` kept against dropped is full d_A against
d_A⊥."""

Matrices = Mapping[str, tuple[np.ndarray, np.ndarray]]


def matrices(
    log_signatures: np.ndarray, sink: int | Sequence[int] = 0, metrics: Sequence[str] = METRICS
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Distance matrices of heads under both conventions.

    `log_signatures` (heads, keys) are log-probabilities. Returns metric → (keep, drop), each (heads, heads).
    """
    return {
        metric: tuple(  # type: ignore[misc]
            pairwise(log_signatures, metric, sink=sink, policy=policy, log=True)
            for policy in ("keep", "drop")
        )
        for metric in metrics
    }


def sample_triples(heads: int, count: int = 50_000, seed: int = 0) -> np.ndarray:
    """`count` ordered triples (p, q, r) of distinct heads, uniform, (count, 3); a seed fixes them.

    Raises InputError with fewer than three heads.
    """
    if heads < 3:
        raise InputError(f"a closer-head verdict needs at least three heads, and there are {heads}")
    generator = np.random.default_rng(seed)
    p = generator.integers(0, heads, count)
    q = generator.integers(0, heads - 1, count)
    r = generator.integers(0, heads - 2, count)
    # Shifting past the heads already taken keeps the draw uniform over distinct triples.
    q += q >= p
    low, high = np.minimum(p, q), np.maximum(p, q)
    r += r >= low
    r += r >= high
    return np.stack([p, q, r], axis=1)


def verdicts(distances: np.ndarray, triples: np.ndarray) -> np.ndarray:
    """Sign of d(p, q) − d(p, r) for each triple: −1 where q is closer, +1 where r is, 0 at a tie."""
    p, q, r = triples.T
    return np.sign(distances[p, q] - distances[p, r]).astype(np.int8)


@dataclass(frozen=True)
class Reversal:
    """Share of triples whose verdict reverses, and the share tied under either convention (fractions)."""

    rate: float
    ties: float


def compare(keep: np.ndarray, drop: np.ndarray) -> Reversal:
    """Reversal rate of two vectors of verdicts on the same triples."""
    product = keep.astype(np.int8) * drop
    return Reversal(float(np.mean(product < 0)), float(np.mean(product == 0)))


def exact_rates(keep: np.ndarray, drop: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reversal and tie rates over *all* triples, one of each per head p: two arrays (heads,).

    Their means are the rates over all triples.
    """
    heads = len(keep)
    if heads < 3:
        raise InputError(f"a closer-head verdict needs at least three heads, and there are {heads}")
    pairs = (heads - 1) * (heads - 2) / 2
    reversal, tied = np.empty(heads), np.empty(heads)
    for p in range(heads):
        x, y = np.delete(keep[p], p), np.delete(drop[p], p)
        x_ties, y_ties, both = _tied_pairs(x), _tied_pairs(y), _tied_pairs(np.stack([x, y], axis=1))
        strict = pairs - x_ties - y_ties + both
        reversal[p] = _discordant(x, y, strict, (pairs - x_ties) * (pairs - y_ties)) / pairs
        tied[p] = (pairs - strict) / pairs
    return reversal, tied


def _discordant(x: np.ndarray, y: np.ndarray, strict: float, room: float) -> int:
    """Pairs ordered oppositely; `strict` pairs tie in neither, `room` = Π (pairs − ties)."""
    if len(x) == 2:  # scipy's asymptotic p-value needs three points
        return int((x[0] - x[1]) * (y[0] - y[1]) < 0)
    # τ_b is (concordant − discordant)/√room; the counts are whole numbers, so rounding recovers them.
    tau = stats.kendalltau(x, y, method="asymptotic").statistic if room > 0 else 0.0
    return round((strict - tau * np.sqrt(room)) / 2)


def _tied_pairs(values: np.ndarray) -> float:
    counts = np.unique(values, axis=0, return_counts=True)[1].astype(np.float64)
    return float((counts * (counts - 1) / 2).sum())


@dataclass(frozen=True)
class FlipOrNoise:
    """Are reversals more than sampling noise? All fractions of the sampled triples, by metric.

    `significant`: share of triples whose verdict has the same sign in at least `level` of the bootstrap
    replicates, under both conventions. `rate`: reversals among those. `floor_keep`, `floor_drop`: share of
    verdicts that differ between two halves of the text under one and the same convention; what a reversal
    rate would be if the convention did nothing but the text were another.
    """

    significant: float
    rate: float
    floor_keep: float
    floor_drop: float
    level: float


@dataclass(frozen=True)
class Bootstrap:
    """Reversal rates over replicates of the text: interval, and the flip-or-noise reading."""

    low: float
    high: float
    replicates: int
    noise: FlipOrNoise


def bootstrap(
    full: Matrices,
    replicates: Iterable[np.ndarray],
    halves: Iterable[tuple[np.ndarray, np.ndarray]],
    triples: np.ndarray,
    sink: int | Sequence[int] = 0,
    *,
    confidence: float = 0.95,
) -> dict[str, Bootstrap]:
    """Intervals of the reversal rates and the flip-or-noise reading.

    `replicates` are log-signatures (heads, keys) of resampled sequence blocks, `halves` pairs of
    log-signatures of two halves of the text. Basic (reflected) bootstrap intervals of the rate on `triples`.
    A verdict is significant when it keeps its sign in at least `confidence` of the replicates. Metrics with
    identical matrices under both conventions give 0.
    """
    metrics = tuple(full)
    rates: dict[str, list[float]] = {metric: [] for metric in metrics}
    signs = {metric: np.zeros((2, len(triples)), np.int32) for metric in metrics}
    count = 0
    for signatures in replicates:
        count += 1
        for metric, (keep, drop) in matrices(signatures, sink, metrics).items():
            both = verdicts(keep, triples), verdicts(drop, triples)
            rates[metric].append(compare(*both).rate)
            signs[metric] += both
    if count < 2:
        raise InputError("a bootstrap needs at least two replicates; ask for more or for none")
    floors = {metric: np.zeros(2) for metric in metrics}
    splits = 0
    for first, second in halves:
        splits += 1
        one, other = matrices(first, sink, metrics), matrices(second, sink, metrics)
        for metric in metrics:
            for policy in range(2):
                pair = (verdicts(side[metric][policy], triples) for side in (one, other))
                floors[metric][policy] += compare(*pair).rate
    result = {}
    tail = (1 - confidence) / 2
    for metric, (keep, drop) in full.items():
        product = verdicts(keep, triples) * verdicts(drop, triples)
        # |Σ sign| ≥ (2·level − 1)·count: the same sign in at least `level` of the replicates.
        sure = (np.abs(signs[metric]) >= (2 * confidence - 1) * count).all(axis=0)
        rate = float(np.mean(product < 0))
        # Resampling adds noise of its own, which moves every replicate the same way; reflecting about the
        # rate itself takes that shift out.
        upper, lower = np.quantile(rates[metric], [tail, 1 - tail])
        low, high = max(0.0, 2 * rate - lower), min(1.0, 2 * rate - upper)
        floor = floors[metric] / splits if splits else np.full(2, np.nan)
        noise = FlipOrNoise(
            significant=float(sure.mean()),
            rate=float(np.mean(product[sure] < 0)) if sure.any() else float("nan"),
            floor_keep=float(floor[0]),
            floor_drop=float(floor[1]),
            level=confidence,
        )
        result[metric] = Bootstrap(float(low), float(high), count, noise)
    return result


def all_triples(heads: int) -> Iterator[tuple[int, int, int]]:
    """Every unordered question (p; q < r), for small numbers of heads."""
    for p in range(heads):
        others = [head for head in range(heads) if head != p]
        for i, q in enumerate(others):
            for r in others[i + 1 :]:
                yield p, q, r
