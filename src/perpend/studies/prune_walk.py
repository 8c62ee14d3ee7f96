"""Many sets of pruned heads in one walk: no layer runs twice on the same input under the same masks.

Two sets that agree on their first layers share them: the sets form a tree whose branches are the masks of one
layer, and a depth-first walk runs each branch once. Equal sets are one leaf. The unpruned model is the branch
without masks and is walked first.

    walk = Walk(model, rows, sets)
    walk.run(leaf)              # leaf(hidden, members): the stream after the last block, and whose it is
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from perpend.compression.replay import Replay, capture, stand_ins
from perpend.models.ablate import Ablation, as_head, heads_by_layer, zeroing
from perpend.models.attention import attention_sites
from perpend.studies.prune_sets import Head

UNPRUNED = -1
Leaf = Callable[[Tensor, Sequence[int]], None]


class Walk:
    """One batch, token ids [batch, T] or images [batch, 3, height, width], through the tree of masks.

    `runs` counts the layers run, `blocks` those of one plain pass. Every removed head is checked to be zero
    where the output projection reads it; `alive` [layers, heads] says which were not zero before they were
    removed. Raises PerpendError where a zero does not reach the output projection, InputError for a model
    that cannot be ablated.
    """

    def __init__(self, model: nn.Module, rows: Tensor, sets: Sequence[tuple[Head, ...]]) -> None:
        self.model, self.sets, self.runs = model, sets, 0
        self.replay: Replay = capture(model, rows)
        self.blocks = len(self.replay.blocks)
        self.sites = attention_sites(model)
        self._site_of = {site.block: site.index for site in self.sites}
        self._masks = [
            {layer: tuple(cut) for layer, cut in heads_by_layer(self.sites, heads).items()} for heads in sets
        ]
        layers = sorted({layer for masks in self._masks for layer in masks})
        self._now: dict[int, tuple[int, ...]] = dict.fromkeys(layers, ())
        self.record = Ablation(tuple(sorted({head for heads in sets for head in heads})))

    def run(self, leaf: Leaf) -> None:
        """Walk all sets; `leaf` gets the last stream of each and the numbers of its sets, UNPRUNED first."""
        with torch.no_grad(), zeroing(self.model, self.sites, self._now, self.record):
            self._branch(0, self.replay.hidden, [UNPRUNED, *range(len(self.sets))], leaf)

    @property
    def alive(self) -> Tensor:
        """[layers, heads] True where a removed head's contribution was not zero before."""
        found = torch.zeros(len(self.sites), max(site.heads for site in self.sites), dtype=torch.bool)
        for layer, head in set(self.record._alive) - set(self.record._unread):
            found[layer, head] = True
        return found

    def _branch(self, block: int, hidden: Tensor, members: Sequence[int], leaf: Leaf) -> None:
        if block == self.blocks:
            leaf(hidden, members)
            return
        layer = self._site_of.get(block, UNPRUNED)
        groups: dict[tuple[int, ...], list[int]] = {}
        for member in members:
            mask = () if member == UNPRUNED else self._masks[member].get(layer, ())
            groups.setdefault(mask, []).append(member)
        for mask in sorted(groups, key=len):  # the empty mask first
            if layer in self._now:
                self._now[layer] = mask
            after = self.replay.run(block, hidden)
            self.runs += 1
            self._branch(block + 1, after, groups[mask], leaf)


def distinct_sets(sets: Sequence[Sequence[Head]]) -> list[tuple[Head, ...]]:
    """Sorted, without repeats and without the empty set."""
    return sorted({tuple(sorted(map(as_head, heads))) for heads in sets} - {()})


def zero_anyway(sets: Sequence[tuple[Head, ...]], alive: Sequence[Tensor]) -> tuple[Head, ...]:
    """Heads of some set that added nothing in any batch before they were removed."""
    seen = torch.stack([torch.as_tensor(batch) for batch in alive]).any(0)
    heads = sorted({head for chosen in sets for head in chosen})
    return tuple(head for head in heads if not bool(seen[head]))


__all__ = ["UNPRUNED", "Leaf", "Walk", "distinct_sets", "stand_ins", "zero_anyway"]
