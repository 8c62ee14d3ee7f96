"""How much the first tokens attend to each other, from which the attention-sink literature takes Sink^ε.

The importance of key k is Σ_q A_qk / (T−k) over the causal triangle of the first PREFIX tokens. The triangles
of layers with the same mask and sizes are taken together: few and large operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from perpend.models.attention import AttentionCall, row_logits, valid_rows, visible
from perpend.surveys.rows import most_logits

if TYPE_CHECKING:
    from perpend.surveys.capture import LayerSums

PREFIX = 64
SINK_SHARE = 0.3
Seen = tuple[Tensor | None, Tensor | None]
"""Which keys the first tokens see, and which sequences have as many tokens; None for all."""


def what_is_seen(call: AttentionCall) -> Seen:
    """What a call's mask says of its first tokens: nothing but the mask is read."""
    first = _first(call)
    seen = visible(call, first, first)
    padded = call.mask is not None or call.padding is not None or call.rule is not None
    whole = valid_rows(call)[:, first].all(-1) if padded else None
    return seen, None if whole is None or bool(whole.all()) else whole


def _first(call: AttentionCall) -> slice:
    return slice(0, min(PREFIX, call.query.shape[2]))


@dataclass(frozen=True)
class _Prefix:
    """The logits [B, H, t, t] of one layer's first tokens."""

    layer: LayerSums
    logits: Tensor
    seen: Seen
    sinks: Tensor | None

    def like(self, other: _Prefix) -> bool:
        """Whether both can be taken together."""
        return (
            self.seen is other.seen
            and self.logits.shape == other.logits.shape
            and (self.sinks is None) == (other.sinks is None)
        )


class Prefixes:
    """First tokens of several layers that wait; `settle` adds what they come to."""

    def __init__(self) -> None:
        self._waiting: list[_Prefix] = []

    def add(self, layer: LayerSums, call: AttentionCall, seen: Seen) -> None:
        """The first tokens of one call; `seen` is one object for calls that share their mask."""
        first = _first(call)
        logits = row_logits(call, first, first, hide=False)
        prefix = _Prefix(layer, logits, seen, call.sinks)
        if self._waiting and not (
            prefix.like(self._waiting[0])
            and (len(self._waiting) + 1) * logits.numel() <= most_logits(logits.device)
        ):
            self.settle()
        self._waiting.append(prefix)

    def settle(self) -> None:
        """Add the importance of what waits to its layers, for the sequences that have as many tokens."""
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return
        logits = torch.stack([prefix.logits for prefix in waiting])  # [layers, B, H, t, t]
        seen, whole = waiting[0].seen
        if seen is not None:
            logits = torch.where(seen, logits, float("-inf"))
        if waiting[0].sinks is None:
            weights = torch.softmax(logits, -1)
        else:
            sinks = torch.stack([prefix.sinks for prefix in waiting])[:, None, :, None, None]
            weights = logits - torch.logaddexp(logits.logsumexp(-1, keepdim=True), sinks.to(logits.dtype))
            weights = weights.exp_()
        if whole is not None:
            weights = weights[:, whole]
        steps = torch.arange(logits.shape[-1], 0, -1, device=weights.device)
        importance = weights.sum(3).double() / steps
        total, over = importance.sum(1), (importance > SINK_SHARE).sum(1)
        for i, prefix in enumerate(waiting):
            layer = prefix.layer
            if layer.importance is None:
                layer.importance, layer.over = torch.zeros_like(total[i]), torch.zeros_like(total[i])
            layer.importance += total[i]
            layer.over += over[i]
            layer.prefixes += importance.shape[1]
