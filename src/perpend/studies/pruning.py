"""What do prune sets cost? All sets evaluated on the same text, no layer run twice under the same masks.

Two sets that agree on their first layers share them: the sets form a tree whose branches are the masks of one
layer, and a depth-first walk runs each branch once. Equal sets are one leaf.

    losses = evaluate_sets(model, windows, [set_a, set_b])    # per sequence: nats, KL, top-1 agreement
    losses.cost                                               # layer runs over layer runs of one pass a set
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perpend.compression.replay import Replay, capture, stand_ins
from perpend.distributed import Store, direct, map_blocks
from perpend.errors import PerpendError
from perpend.evaluation.windows import Windows, as_windows
from perpend.models.attention import AttentionCall, attach, attention_sites
from perpend.models.head import halves
from perpend.progress import Progress, silent
from perpend.studies.prune_sets import Head
from perpend.studies.resampling import draws

CHUNK = 512
MEASURES = ("loss", "kl", "agreement")


@dataclass(frozen=True)
class SetLosses:
    """Losses of the unpruned model and of each set, on the same sequences.

    `base` [n] and `loss`, `kl`, `agreement` [sets, n]: means over the scored tokens of each sequence (nats
    per token, nats per token, fraction). `cost`: layers run, as a fraction of one full pass for each
    distinct set.
    """

    sets: tuple[tuple[Head, ...], ...]
    base: np.ndarray
    loss: np.ndarray
    kl: np.ndarray
    agreement: np.ndarray
    tokens: int
    cost: float

    def index(self, heads: Sequence[Head]) -> int:
        """Where a set stands."""
        return self.sets.index(tuple(sorted(heads)))

    @property
    def base_perplexity(self) -> float:
        return float(np.exp(self.base.mean()))

    def perplexity(self, heads: Sequence[Head]) -> float:
        return float(np.exp(self.loss[self.index(heads)].mean()))


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

    Raises PerpendError where an ablated aggregate does not reach the output projection as zero.
    """
    windows = as_windows(tokens)
    distinct = sorted({tuple(sorted((int(a), int(b)) for a, b in heads)) for heads in sets} - {()})
    starts = range(0, len(windows.tokens), batch)
    layers = len(attention_sites(model))
    plain_cost = (len(distinct) + 1) * layers

    with progress(total=len(windows.tokens), unit="sequences", description="pruned models") as advance:

        def compute(block: int) -> dict[str, Tensor]:
            rows = windows.tokens[starts[block] : starts[block] + batch]
            walk = _Walk(model, rows, distinct)
            found = walk.run()
            advance(len(rows))
            return {**found, "runs": torch.tensor(float(walk.runs))}

        parts = map_blocks(len(starts), compute, store=store, name="pruned")
    joined = {name: np.concatenate([np.asarray(p[name]) for p in parts], -1) for name in ("base", *MEASURES)}
    runs = float(np.mean([float(p["runs"]) for p in parts]))
    return SetLosses(
        tuple(distinct),
        joined["base"],
        *(joined[name] for name in MEASURES),
        tokens=int(windows.scored[:, 1:].sum()),
        cost=runs / plain_cost,
    )


class _Walk:
    """One batch through the tree of masks."""

    def __init__(self, model: nn.Module, rows: Tensor, sets: Sequence[tuple[Head, ...]]) -> None:
        self.model, self.rows = model, rows.to(next(model.parameters()).device)
        self.sets, self.parts, self.runs = sets, halves(model), 0
        self.replay: Replay = capture(model, self.rows[:, :-1])
        self.sites = attention_sites(model)
        self.site_of = {site.block: site.index for site in self.sites}
        self.masks = [_by_layer(heads) for heads in sets]
        self.now: dict[int, tuple[int, ...]] = {}
        self.plain: Tensor | None = None
        shape = (len(sets), len(rows))
        self.found = {name: torch.zeros(shape, dtype=torch.float64) for name in MEASURES}
        self.base = torch.zeros(len(rows), dtype=torch.float64)

    def run(self) -> dict[str, Tensor]:
        with torch.no_grad(), attach(self.model, self._zero):
            # The unpruned model is the branch without masks, walked first: other leaves are held against it.
            self._branch(0, self.replay.hidden, [-1, *range(len(self.sets))])
        return {"base": self.base, **self.found}

    def _zero(self, call: AttentionCall, output: Tensor) -> Tensor | None:
        chosen = self.now.get(call.layer)
        if not chosen:
            return None
        kept = output.clone()
        kept[:, :, list(chosen)] = 0
        return kept

    def _branch(self, block: int, hidden: Tensor, members: Sequence[int]) -> None:
        if block == len(self.replay.blocks):
            self._leaf(hidden, members)
            return
        layer = self.site_of.get(block, -1)
        groups: dict[tuple[int, ...], list[int]] = {}
        for member in members:
            mask = () if member < 0 else self.masks[member].get(layer, ())
            groups.setdefault(mask, []).append(member)
        for mask in sorted(groups, key=len):  # the empty mask first
            self.now = {layer: mask}
            after = self.replay.run(block, hidden)
            self.runs += 1
            self._branch(block + 1, after, groups[mask])

    def _leaf(self, hidden: Tensor, members: Sequence[int]) -> None:
        with stand_ins(self.model, hidden):
            last = self.parts.trunk(self.rows[:, :-1])
        if members[0] < 0:
            self.plain = last
        if self.plain is None:
            raise PerpendError("the unpruned branch was not walked first")
        measured = self._measure(last)
        for member in members:
            if member < 0:
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
            if last is not self.plain:
                p = torch.log_softmax(self.parts.head(self.plain[:, span]).float(), -1)  # type: ignore[index]
                sums["kl"] += (p.exp() * (p - q)).nan_to_num(0.0).double().sum((1, 2)).cpu()
                sums["agreement"] += (p.argmax(-1) == q.argmax(-1)).double().sum(1).cpu()
        return {name: value / length for name, value in sums.items()}


def _by_layer(heads: Sequence[Head]) -> dict[int, tuple[int, ...]]:
    found: dict[int, list[int]] = {}
    for layer, head in heads:
        found.setdefault(layer, []).append(head)
    return {layer: tuple(sorted(chosen)) for layer, chosen in found.items()}


def paired_change(losses: SetLosses, heads: Sequence[Head], *, resamples: int = 1000, seed: int = 0) -> Any:
    """Change of the mean loss by pruning, nats per token, and its 95 % interval over sequences."""
    change = losses.loss[losses.index(heads)] - losses.base
    low, high = np.quantile(draws(len(change), resamples, seed) @ change, [0.025, 0.975])
    return float(change.mean()), float(low), float(high)
