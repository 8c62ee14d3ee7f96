"""What do prune sets change in a model that has no next-token loss: an image model or an encoder?

    found = evaluate_agreement(model, pixels, [set_a, set_b])
    found.measure                    # "top1_agreement" or "cosine"
    found.values[found.measure]      # [sets, n]: one number an image or a sequence

With a head that has classes (an image classifier, a masked-language head) the pruned model is held against
the unpruned one by top-1 agreement and KL(unpruned || pruned), of one answer an image or of every token.
Without a head by its embedding, the class token of an image model and the mean over tokens of an encoder: the
cosine of the two embeddings, and whether an input keeps its nearest neighbour among all inputs. Where labels
are given, a classifier's accuracy stands beside them. There is no perplexity here.
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
from perpend.errors import InputError, PerpendError
from perpend.models.inputs import model_inputs
from perpend.models.placement import input_device
from perpend.progress import Progress, silent
from perpend.studies.prune_sets import Head
from perpend.studies.prune_walk import UNPRUNED, Walk, distinct_sets, stand_ins, zero_anyway
from perpend.studies.resampling import draws

CLASSES = ("top1_agreement", "kl")
EMBEDDING = ("cosine", "neighbour_agreement")


@dataclass(frozen=True)
class SetAgreement:
    """How far each set leaves the unpruned model, input by input.

    `values[name]` [sets, n], names CLASSES or EMBEDDING; `measure` is the first of them, higher is nearer.
    With labels there is `accuracy` too, 1 where the answer is the label; `right` [n] is the unpruned model's.
    `count`: inputs (images or sequences). `cost`: layers run, as a fraction of one full pass for each
    distinct set and the unpruned model. `zero_anyway`: heads that added nothing before they were removed.
    """

    sets: tuple[tuple[Head, ...], ...]
    values: dict[str, np.ndarray]
    count: int
    cost: float
    zero_anyway: tuple[Head, ...] = ()
    right: np.ndarray | None = None

    @property
    def measure(self) -> str:
        return next(iter(self.values))

    def of(self, heads: Sequence[Head], name: str) -> np.ndarray:
        """One value an input, [n]; no heads change nothing."""
        if not len(heads):
            if name == "accuracy" and self.right is not None:
                return self.right
            return np.full(self.count, 0.0 if name == "kl" else 1.0)
        return self.values[name][self.sets.index(tuple(sorted(heads)))]

    def interval(self, heads: Sequence[Head], *, resamples: int = 1000, seed: int = 0) -> tuple[float, float]:
        """The 95 % interval of the mean of `measure`, inputs resampled."""
        values = self.of(heads, self.measure)
        low, high = np.quantile(draws(len(values), resamples, seed) @ values, [0.025, 0.975])
        return float(low), float(high)


def evaluate_agreement(
    model: nn.Module,
    inputs: Tensor,
    sets: Sequence[Sequence[Head]],
    *,
    labels: Tensor | None = None,
    batch: int = 8,
    store: Store = direct,
    progress: Progress = silent,
) -> SetAgreement:
    """Hold each distinct set of heads against the unpruned model, batch by batch (the unit of resuming).

    inputs   images [n, 3, height, width], or token ids [n, T] of an encoder, all real
    labels   [n], the class of each image in the classifier's own numbering; None: no accuracy

    Raises PerpendError where an ablated aggregate does not reach the output projection as zero, InputError
    for a model whose output is neither logits nor hidden states.
    """
    distinct = distinct_sets(sets)
    cuts = starts(len(inputs), batch)
    first, device = next(model.parameters()), input_device(model)

    with progress(total=len(inputs), unit="inputs", description="pruned models") as advance:

        def compute(block: int) -> dict[str, Tensor]:
            rows = inputs[cuts[block] : cuts[block] + batch]
            rows = rows.to(device, first.dtype) if rows.is_floating_point() else rows.to(device)
            walk = Walk(model, rows, distinct)
            truth = None if labels is None else labels[cuts[block] : cuts[block] + batch].to(device)
            outputs = _Outputs(model, rows, len(distinct), truth)
            walk.run(outputs.leaf)
            advance(len(rows))
            ran = torch.tensor([walk.runs, walk.blocks])
            return {**outputs.kept(), "ran": ran, "alive": walk.alive}

        done = map_blocks(len(cuts), compute, store=store, name="pruned")
    if "plain" in done[0]:
        plain, pruned = (
            torch.cat([torch.as_tensor(p[key]) for p in done], -2) for key in ("plain", "pruned")
        )
        values, right = _embedded(plain.double(), pruned.double()), None
    else:
        names = (*CLASSES, "accuracy") if labels is not None else CLASSES
        values = {name: np.concatenate([np.asarray(p[name]) for p in done], -1) for name in names}
        right = np.concatenate([np.asarray(p["right"]) for p in done]) if labels is not None else None
    runs, plain_runs = np.sum([np.asarray(p["ran"]) for p in done], 0)
    return SetAgreement(
        tuple(distinct),
        values,
        len(inputs),
        cost=float(runs / ((len(distinct) + 1) * plain_runs)),
        zero_anyway=zero_anyway(distinct, [p["alive"] for p in done]),
        right=right,
    )


class _Outputs:
    """What the model makes of one batch, set by set as the walk reaches them."""

    def __init__(self, model: nn.Module, rows: Tensor, sets: int, labels: Tensor | None = None) -> None:
        self.model, self.rows, self.sets, self.labels = model, rows, sets, labels
        self.plain: Tensor | None = None
        self.classes = False
        self.found: dict[str, Tensor] = {}

    def leaf(self, hidden: Tensor, members: Sequence[int]) -> None:
        with stand_ins(self.model, hidden):
            output = self.model(**model_inputs(self.model, self.rows))
        logits = getattr(output, "logits", None)
        self.classes = isinstance(logits, Tensor)
        if self.classes:
            now = torch.log_softmax(logits.float(), -1).reshape(len(self.rows), -1, logits.shape[-1])
        else:
            now = self._embedding(output).float()
        if members[0] == UNPRUNED:
            self.plain = now
            if self.classes:
                shape = (self.sets, len(self.rows))
                self.found = {name: torch.zeros(shape, dtype=torch.float64) for name in CLASSES}
                if self.labels is not None:
                    self.found["accuracy"] = torch.zeros(shape, dtype=torch.float64)
                    self.found["right"] = self._right(now)
            else:
                self.found = {"pruned": torch.zeros(self.sets, *now.shape)}
        if self.plain is None:
            raise PerpendError("the unpruned branch was not walked first")
        for member in (m for m in members if m != UNPRUNED):
            if not self.classes:
                self.found["pruned"][member] = now.cpu()
                continue
            p = self.plain
            self.found["kl"][member] = (p.exp() * (p - now)).nan_to_num(0.0).double().sum(-1).mean(-1).cpu()
            same = (p.argmax(-1) == now.argmax(-1)).double()
            self.found["top1_agreement"][member] = same.mean(-1).cpu()
            if self.labels is not None:
                self.found["accuracy"][member] = self._right(now)

    def _right(self, answers: Tensor) -> Tensor:
        """1 where the one answer an image is its label, [n]."""
        return (answers[:, 0].argmax(-1) == self.labels).double().cpu()

    def kept(self) -> dict[str, Tensor]:
        """Numbers an input; without a head the embeddings, whose neighbours are in other batches."""
        if self.classes:
            return self.found
        assert self.plain is not None
        return {"plain": self.plain.cpu(), "pruned": self.found["pruned"]}

    def _embedding(self, output: Any) -> Tensor:
        hidden = getattr(output, "last_hidden_state", None)
        if not isinstance(hidden, Tensor) or hidden.ndim != 3:
            raise InputError(
                f"{type(self.model).__name__} returns neither logits nor hidden states [batch, tokens, "
                "width]: there is nothing to compare"
            )
        return hidden[:, 0] if self.rows.is_floating_point() else hidden.mean(1)


def _embedded(plain: Tensor, pruned: Tensor) -> dict[str, np.ndarray]:
    """Cosine, and whether the nearest other input is the same, of embeddings [n, d] and [sets, n, d]."""
    a, b = (x / torch.linalg.vector_norm(x, dim=-1, keepdim=True).clamp(min=1e-30) for x in (plain, pruned))
    own = torch.eye(len(a), dtype=torch.bool)
    before = (a @ a.T).masked_fill(own, -torch.inf).argmax(-1)
    after = (b @ b.transpose(-1, -2)).masked_fill(own, -torch.inf).argmax(-1)
    return {
        "cosine": (a * b).sum(-1).numpy(),
        "neighbour_agreement": (before == after).double().numpy(),
    }
