"""A seeded sample of places (sequence, query) in a text: a reservoir that merges exactly.

Every place has a priority, a hash of (seed, sequence, query); the sample of size n is the n places of
smallest priority. So it is uniform without replacement, needs one pass and n entries, and the sample of a
union is the sample of the parts' samples: blocks, batches and processes change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


def priorities(seed: int, sequences: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Priorities, uint64, of places (n,): splitmix64 over seed, sequence and query."""
    mixed = np.full(np.shape(sequences), np.uint64(seed), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (sequences, queries):
            mixed = _mix(mixed + np.asarray(part).astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15))
    return mixed


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class Places:
    """Places in order of sequence and query: `sequence` and `query` (n,), int64."""

    sequence: np.ndarray
    query: np.ndarray

    def __len__(self) -> int:
        return len(self.sequence)

    def of(self, sequences: range) -> dict[int, list[int]]:
        """Queries by sequence, of those sequences."""
        inside = (self.sequence >= sequences.start) & (self.sequence < sequences.stop)
        found: dict[int, list[int]] = {}
        for sequence, query in zip(self.sequence[inside].tolist(), self.query[inside].tolist()):
            found.setdefault(sequence, []).append(query)
        return found


class Reservoir:
    """The `size` places of smallest priority among all that were offered."""

    def __init__(self, size: int, seed: int = 0) -> None:
        self.size, self.seed = size, seed
        self._held = (np.empty(0, np.uint64), np.empty(0, np.int64), np.empty(0, np.int64))

    def offer(self, sequence: int, queries: Iterable[int]) -> None:
        """Queries of one sequence; each place may be offered once."""
        at = np.fromiter(queries, np.int64)
        number = np.full(len(at), sequence, np.int64)
        self._take((priorities(self.seed, number, at), number, at))

    def merge(self, other: Reservoir) -> None:
        """What the other one holds, offered here; with one seed the result is that of a single reservoir."""
        if other.seed != self.seed:
            raise ValueError("reservoirs of different seeds do not merge")
        self._take(other._held)

    def _take(self, more: tuple[np.ndarray, ...]) -> None:
        every = tuple(np.concatenate(pair) for pair in zip(self._held, more))
        order = np.lexsort((every[2], every[1], every[0]))[: self.size]
        self._held = tuple(part[order] for part in every)  # type: ignore[assignment]

    @property
    def places(self) -> Places:
        """The sample."""
        _, sequence, query = self._held
        order = np.lexsort((query, sequence))
        return Places(sequence[order], query[order])


@dataclass(frozen=True)
class PickedRows:
    """Single rows of all heads at the same places of a text.

    `logits` (places, layers, heads, parts), float32, centred on the content; NaN where a layer has no row at
    that place (a sliding window), and for heads that a layer has not.
    """

    places: Places
    logits: np.ndarray

    def log_rows(self, place: int) -> np.ndarray:
        """Log-probabilities at one place, (layers, heads, parts), float64."""
        values = self.logits[place].astype(np.float64)
        values = values - values.max(-1, keepdims=True)
        return values - np.log(np.exp(values).sum(-1, keepdims=True))
