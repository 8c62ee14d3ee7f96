"""What do prune sets cost a language model? All sets evaluated on the same text, by the walk of `prune_walk`.

    losses = evaluate_sets(model, windows, [set_a, set_b])    # per sequence: nats, KL, top-1 agreement
    losses.cost                                               # layer runs over layer runs of one pass a set

Models without next-token losses (image models, encoders) have `studies.prune_agreement`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perpend.batching import starts
from perpend.distributed import Store, direct, map_blocks
from perpend.errors import PerpendError
from perpend.evaluation.windows import Windows, as_windows
from perpend.models.head import halves
from perpend.models.limits import check_ids
from perpend.models.placement import input_device
from perpend.progress import Progress, silent
from perpend.studies.prune_sets import Head
from perpend.studies.prune_walk import UNPRUNED, Walk, distinct_sets, stand_ins, zero_anyway
from perpend.studies.resampling import draws

CHUNK = 512
KEPT = 2**30  # bytes of the unpruned model's log-probabilities that are kept, not computed for each set again
MEASURES = ("loss", "kl", "agreement")


@dataclass(frozen=True)
class SetLosses:
    """Losses of the unpruned model and of each set, on the same sequences.

    `base` [n] and `loss`, `kl`, `agreement` [sets, n]: means over the scored tokens of each sequence (nats
    per token, nats per token, fraction). `cost`: layers run, as a fraction of one full pass for each
    distinct set and the unpruned model. `zero_anyway`: heads that added nothing before they were removed.
    """

    sets: tuple[tuple[Head, ...], ...]
    base: np.ndarray
    loss: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray
    tokens: int
    cost: float
    zero_anyway: tuple[Head, ...] = ()

    def index(self, heads: Sequence[Head]) -> int:
        """Where a set stands."""
        return self.sets.index(tuple(sorted(heads)))

    @property
    def base_perplexity(self) -> float:
        return float(np.exp(self.base.mean()))

    def of(self, heads: Sequence[Head], name: str) -> np.ndarray:
        """`loss`, `kl` or `agreement` without these heads, one a sequence [n]; no heads change nothing."""
        if not len(heads):
            return {"loss": self.base, "kl": 0 * self.base, "agreement": 0 * self.base + 1}[name]
        return getattr(self, name)[self.index(heads)]

    def perplexity(self, heads: Sequence[Head]) -> float:
        """The perplexity without these heads."""
        return float(np.exp(self.of(heads, "loss").mean()))


def evaluate_sets(
    model: nn.Module,
    tokens: Tensor | Windows,
    sets: Sequence[Sequence[Head]],
    *,
    batch: int = 4,
    store: Store = direct,
    progress: Progress = silent,
) -> SetLosses:
    """Evaluate each distinct set of heads on `tokens` [n, T], batch by batch (the unit of resuming).

    Raises PerpendError where an ablated aggregate does not reach the output projection as zero, InputError
    for a model that is no causal language model.
    """
    windows = as_windows(tokens)
    check_ids(model, windows.tokens)
    distinct = distinct_sets(sets)
    cuts = starts(len(windows.tokens), batch)
    parts = halves(model)
    device = input_device(model)

    with progress(total=len(windows.tokens), unit="sequences", description="pruned models") as advance:

        def compute(block: int) -> dict[str, Tensor]:
            rows = windows.tokens[cuts[block] : cuts[block] + batch].to(device)
            walk = Walk(model, rows[:, :-1], distinct)
            measured = _Losses(model, parts, rows, len(distinct))
            walk.run(measured.leaf)
            advance(len(rows))
            ran = torch.tensor([walk.runs, walk.blocks])
            return {"base": measured.base, **measured.found, "ran": ran, "alive": walk.alive}

        done = map_blocks(len(cuts), compute, store=store, name="pruned")
    joined = {name: np.concatenate([np.asarray(p[name]) for p in done], -1) for name in ("base", *MEASURES)}
    runs, plain = np.sum([np.asarray(p["ran"]) for p in done], 0)
    return SetLosses(
        tuple(distinct),
        joined["base"],
        *(joined[name] for name in MEASURES),
        tokens=int(windows.scored[:, 1:].sum()),
        cost=float(runs / ((len(distinct) + 1) * plain)),
        zero_anyway=zero_anyway(distinct, [p["alive"] for p in done]),
    )


class _Losses:
    """The losses of one batch, set by set as the walk reaches them."""

    def __init__(self, model: nn.Module, parts: Any, rows: Tensor, sets: int) -> None:
        self.model, self.parts, self.rows = model, parts, rows
        self.plain: Tensor | None = None
        self.logs: dict[int, Tensor] = {}  # of the unpruned model, by the slice's start
        self.found = {name: torch.zeros(sets, len(rows), dtype=torch.float64) for name in MEASURES}
        self.base = torch.zeros(len(rows), dtype=torch.float64)

    def leaf(self, hidden: Tensor, members: Sequence[int]) -> None:
        with stand_ins(self.model, hidden):
            last = self.parts.trunk(self.rows[:, :-1])
        if members[0] == UNPRUNED:
            self.plain = last
        if self.plain is None:
            raise PerpendError("the unpruned branch was not walked first")
        measured = self._measure(last)
        for member in members:
            if member == UNPRUNED:
                self.base = measured["loss"]
            else:
                for name in MEASURES:
                    self.found[name][member] = measured[name]

    def _measure(self, last: Tensor) -> dict[str, Tensor]:
        step = max(1, CHUNK // len(self.rows))
        sums = {name: torch.zeros(len(self.rows), dtype=torch.float64) for name in MEASURES}
        length = last.shape[1]
        for start in range(0, length, step):
            span = slice(start, start + step)
            q = torch.log_softmax(self.parts.head(last[:, span]).float(), -1)
            target = self.rows[:, 1:][:, span, None]
            sums["loss"] -= q.gather(-1, target)[..., 0].double().sum(1).cpu()
            if last is self.plain:
                if q.numel() * q.element_size() * (length / q.shape[1]) <= KEPT:
                    self.logs[start] = q
                sums["agreement"] += float(q.shape[1])
                continue
            p = self.logs.get(start)
            if p is None:
                p = torch.log_softmax(self.parts.head(self.plain[:, span]).float(), -1)  # type: ignore[index]
            sums["kl"] += (p.exp() * (p - q)).nan_to_num(0.0).double().sum((1, 2)).cpu()
            sums["agreement"] += (p.argmax(-1) == q.argmax(-1)).double().sum(1).cpu()
        return {name: value / length for name, value in sums.items()}


def paired_change(losses: SetLosses, heads: Sequence[Head], *, resamples: int = 1000, seed: int = 0) -> Any:
    """Change of the mean loss by pruning, nats per token, and its 95 % interval over sequences."""
    change = losses.of(heads, "loss") - losses.base
    low, high = np.quantile(draws(len(change), resamples, seed) @ change, [0.025, 0.975])
    return float(change.mean()), float(low), float(high)
