"""An attention written by hand: T × T probabilities, and the value-space edit straight from its definition.

Registered with transformers under a name of its own, it shares no code with the package: tests run a tiny
model on it in float64 and compare logits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask


@dataclass
class Oracle:
    """What to do in each layer (in the order of their calls): layer → (s∥, s⊥), numbers or tensors
    (heads,)."""

    scales: dict[int, tuple] = field(default_factory=dict)
    exclude_self: bool = True
    reference: str = "head"
    ablate: dict[int, list[int]] = field(default_factory=dict)
    layer: int = 0
    rows: list[Tensor] = field(default_factory=list)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: Tensor | None = None,
        is_causal: bool | None = None,
        **rest: object,
    ) -> tuple[Tensor, Tensor]:
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
        logits = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if attention_mask is not None:
            logits = logits + attention_mask[..., : key.shape[2]]
        if s_aux is not None:
            column = s_aux.view(1, -1, 1, 1).expand(*logits.shape[:3], 1).to(logits.dtype)
            rows = torch.cat([logits, column], -1).softmax(-1)[..., :-1]
        else:
            rows = logits.softmax(-1)
        self.rows.append(rows)
        output = rows @ value
        if self.layer in self.scales:
            output = self.edited(output, rows, value, *self.scales[self.layer])
        for head in self.ablate.get(self.layer, ()):
            output[:, head] = 0
        self.layer += 1
        return output.transpose(1, 2), rows

    def edited(self, o: Tensor, rows: Tensor, value: Tensor, parallel: object, across: object) -> Tensor:
        length, seen = rows.shape[-2:]
        own = torch.arange(length) + seen - length
        v = value[:, :, own]
        weight = rows[:, :, torch.arange(length), own]
        kept = weight[..., None] * v if self.exclude_self else torch.zeros_like(o)
        y = o - kept
        over = (1, 3) if self.reference == "token" else (3,)
        z = (v * v).sum(over, keepdim=True)
        along = (y * v).sum(over, keepdim=True) / torch.where(z == 0, 1.0, z) * v
        s, t = (torch.as_tensor(x, dtype=o.dtype).reshape(1, -1, 1, 1) for x in (parallel, across))
        return s * along + t * (y - along) + kept


@contextmanager
def running_on(model: nn.Module, oracle: Oracle) -> Iterator[Oracle]:
    """Run a model's attention on the oracle for as long as the `with` lasts."""
    AttentionInterface.register("by_hand", oracle.attend)
    AttentionMaskInterface.register("by_hand", eager_mask)
    own = model.config._attn_implementation
    start = model.register_forward_pre_hook(lambda *_: setattr(oracle, "layer", 0))
    model.set_attn_implementation("by_hand")
    try:
        yield oracle
    finally:
        start.remove()
        model.set_attn_implementation(own)
