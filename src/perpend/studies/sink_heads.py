"""How many heads are sink heads? The share whose first key's importance passes a threshold: Sink^ε.

    α_k = Σ_{q≥k} A_qk / (T − k),     Sink^ε_k = share of heads with α_k > ε, averaged over sequences

with whole causal rows of T = 64 tokens, k = 0 and ε = 0.3 as the field reports it.

Source: Gu et al., "When attention sink emerges in language models: an empirical view" (ICLR 2025).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.attention import AttentionCall, attach, row_logits
from perpend.models.inputs import run_trunk

LENGTH = 64
THRESHOLD = 0.3


@dataclass(frozen=True)
class SinkHeads:
    """`share`: mean over sequences of the share of heads above the threshold; `importance` (layers, heads)
    mean importance of the key; fractions. `length` tokens a sequence, `sequences` of them."""

    share: float
    importance: Tensor
    threshold: float
    length: int
    sequences: int


def sink_heads(
    model: nn.Module,
    tokens: Tensor,
    *,
    key: int = 0,
    length: int = LENGTH,
    threshold: float = THRESHOLD,
    batch: int = 8,
) -> SinkHeads:
    """Sink^ε of one key on the first `length` tokens of each sequence, `tokens` [n, T] without padding.

    Learned sinks take their share of each row, as in the model. Raises InputError for sequences shorter than
    `length`.
    """
    if tokens.shape[1] < length:
        raise InputError(f"Sink^ε is defined on {length} tokens, and the sequences hold {tokens.shape[1]}")
    seen: dict[int, list[Tensor]] = {}

    def look(call: AttentionCall, output: Tensor) -> None:
        rows = slice(key, None)
        weight = (row_logits(call, rows, slice(key, key + 1))[..., 0] - call.lse[:, :, rows]).exp()
        seen.setdefault(call.layer, []).append(weight.double().mean(-1).cpu())

    with torch.no_grad(), attach(model, look, need_lse=True):
        for part in tokens[:, :length].split(batch):
            run_trunk(model, part)
    importance = [torch.cat(seen[layer]) for layer in sorted(seen)]  # each [n, heads]
    above = torch.cat([(layer > threshold).double() for layer in importance], dim=1)
    return SinkHeads(
        float(above.mean()),
        torch.nn.utils.rnn.pad_sequence(
            [layer.mean(0) for layer in importance], batch_first=True, padding_value=float("nan")
        ),
        threshold,
        length,
        len(tokens),
    )
