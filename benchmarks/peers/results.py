"""The numbers of a measured cell: medians of ratios, memory, who does the job, who is first or level."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import comb, inf
from statistics import median, quantiles
from typing import Any

from peers.jobs import Job

US = "perpend"
CONFIDENCE = 0.95  # of the interval of a median
ROOM = 0.01  # of memory, within which two are level whatever the A/A row says


@dataclass(frozen=True)
class Result:
    """One job at one size. rounds: {contender: seconds} each; added: bytes above what the process held, None
    where it is not known; gap: how far an answer is from perpend's; failed: contender -> its error; weights:
    the model's bytes; noise: a share of the time by which two may differ and be level (`noise_of`)."""

    job: Job
    sizes: Mapping[str, int]
    rounds: Sequence[Mapping[str, float]]
    added: Mapping[str, int | None] = field(default_factory=dict)
    gap: Mapping[str, float] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)
    weights: int = 0
    noise: float = 0.0

    def by_round(self, contender: str, other: str | None = None) -> list[float]:
        """Its seconds over the `other`'s (None: the baseline's), of each round that both ran."""
        base = other or self.job.baseline
        return [seen[contender] / seen[base] for seen in self.rounds if contender in seen and base in seen]

    @property
    def times(self) -> dict[str, float]:
        """Contender -> median of its ratios, of those that came to the end."""
        names = {name for seen in self.rounds for name in seen} - self.failed.keys()
        return {name: median(values) for name in names if (values := self.by_round(name))}

    def quartiles(self, contender: str) -> tuple[float, float]:
        """First and third quartile of its ratios; the one ratio twice where there is one round."""
        values = self.by_round(contender)
        if len(values) == 1:
            return values[0], values[0]
        low, _, high = quantiles(values, n=4, method="inclusive")
        return low, high

    def seconds(self, contender: str) -> float | None:
        """Median; None where it did not run."""
        values = [seen[contender] for seen in self.rounds if contender in seen]
        return median(values) if values else None

    @property
    def memory(self) -> dict[str, float]:
        """Contender -> the weights and what its run adds at its peak, over the same of the baseline."""
        base = self.added.get(self.job.baseline)
        if base is None:
            return {}
        known = {name: bytes_ for name, bytes_ in self.added.items() if bytes_ is not None}
        return {name: (self.weights + bytes_) / (self.weights + base) for name, bytes_ in known.items()}

    def disagrees(self, contender: str) -> bool:
        return self.gap.get(contender, 0.0) > self.job.tolerance

    @property
    def ranked(self) -> tuple[str, ...]:
        """perpend and those whose answers are its own; a plain pass has no answer, the A/A row no rank."""
        agreeing = [name for name in self.gap if not self.disagrees(name) and name != self.job.again]
        return tuple(name for name in (US, *agreeing) if name in self.times)

    @property
    def of_tools(self) -> Result:
        """The same without the contenders that are code for one model."""
        return replace(
            self, gap={name: gap for name, gap in self.gap.items() if name not in self.job.by_hand}
        )

    @property
    def quickest(self) -> tuple[str, ...]:
        """The ranked with the least time, then those level with it: the median of their ratios to it, round
        by round, does not lie above 1 by more than `noise`, or its interval does not."""
        first, others = self._ranked_by(self.times)
        return (*first, *(name for name in others if self._level(self.by_round(name, first[0]))))

    def _level(self, ratios: Sequence[float]) -> bool:
        return median(ratios) <= 1 + self.noise or median_interval(ratios)[0] <= 1

    @property
    def leanest(self) -> tuple[str, ...]:
        """The ranked with the least memory, then those level with it: within what the A/A row differs by, or
        ROOM where that is larger."""
        memory = self.memory
        first, others = self._ranked_by(memory)
        room = 1 + max(ROOM, abs(memory.get(self.job.again, 1.0) - 1))
        return (*first, *(name for name in others if memory[name] <= room * memory[first[0]]))

    def _ranked_by(self, values: Mapping[str, float]) -> tuple[list[str], list[str]]:
        """The first of the ranked (none if none has a value), and the others, ascending."""
        ascending = sorted((name for name in self.ranked if name in values), key=values.__getitem__)
        return ascending[:1], ascending[1:]


def median_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float]:
    """The interval of the median that the sign test gives: two of the ordered values, as far inside as
    `confidence` allows; of 15 the fourth and the twelfth. Fewer than six values tell nothing: (-∞, ∞)."""
    ordered, count = sorted(values), len(values)
    outside, rank = 0.0, 0  # P(the median lies below the first `rank` values), and above the last
    while (outside := outside + comb(count, rank) / 2**count) <= (1 - confidence) / 2:
        rank += 1
    return (ordered[rank - 1], ordered[count - rank]) if rank else (-inf, inf)


def results(book: Mapping[str, Any], known: Mapping[str, Job]) -> dict[str, list[Result]]:
    """Job -> its measured cells by size, of jobs that are known, in their order."""
    found: dict[str, list[Result]] = {name: [] for name in known}
    for cell in book["cells"]:
        if cell["rounds"] and cell["job"] in known:
            weights = book["weights"].get(str(cell["sizes"].get("layers")), 0)
            values = {key: value for key, value in cell.items() if key != "job"}
            found[cell["job"]].append(Result(known[cell["job"]], weights=weights, **values))
    noise = noise_of(cell for cells in found.values() for cell in cells)
    return {
        name: [replace(cell, noise=noise) for cell in sorted(cells, key=by_size)]
        for name, cells in found.items()
        if cells
    }


def noise_of(cells: Iterable[Result]) -> float:
    """What the baseline's time differs by from its own, in 19 of 20 cells: where a process happens to lie in
    memory, say, which no number of its rounds averages out."""
    apart = sorted(abs(cell.times[cell.job.again] - 1) for cell in cells if cell.job.again in cell.times)
    return apart[int(0.95 * (len(apart) - 1))] if apart else 0.0


def by_size(result: Result) -> tuple[int, ...]:
    """By length, then sequences, then layers; jobs without a model by their own sizes."""
    return tuple(result.sizes.get(key, 0) for key in ("length", "sequences", "layers", "heads", "keys"))


def ends(cells: Sequence[Result], axis: str) -> tuple[Result, Result] | None:
    """The smallest and the largest cell along an axis, of the longest line with the other sizes equal."""
    lines: dict[tuple[tuple[str, int], ...], list[Result]] = {}
    for cell in cells:
        others = tuple(sorted((key, size) for key, size in cell.sizes.items() if key != axis))
        lines.setdefault(others, []).append(cell)
    line = sorted(max(lines.values(), key=len), key=lambda cell: cell.sizes[axis])
    return (line[0], line[-1]) if len(line) > 1 else None


def by_length(cells: Sequence[Result]) -> list[Result]:
    """One cell a length: the grid of lengths, without the cells that grow in layers or sequences."""
    found: dict[int, Result] = {}
    for cell in sorted(cells, key=by_size):
        found.setdefault(cell.sizes["length"], cell)
    return list(found.values())
