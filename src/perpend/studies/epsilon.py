"""Does the replacement of zeros decide anything? The ε sweep, where it is idle and where it acts.

From logits nothing underflows, so no zero is ever replaced and ε has nothing to act on: the rates of the
survey are the same for every ε because ε does not enter them. From *probabilities* it does: a row stored in
half precision holds zeros wherever its mass fell below 2⁻²⁴, and log-ratios then depend on what is put in
their place.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.2 (4) and Appendix E.7; multiplicative
replacement after Martín-Fernández et al. (2003).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from perpend.geometry import replace_zeros
from perpend.models.attention import AttentionCall, attach, row_logits, valid_rows, visible
from perpend.models.inputs import run_trunk
from perpend.studies import reversal

EPSILONS = (1e-5, 1e-6, 1e-7)


@dataclass(frozen=True)
class EpsilonRates:
    """Reversal rates from half-precision probabilities with one ε.

    `zeros`: share of entries replaced; `empty`: share of rows left out because every kept key was lost.
    `exact`: metric → rate over all triples. All fractions.
    """

    epsilon: float
    zeros: float
    empty: float
    exact: dict[str, float]


def half_precision_signatures(
    model: nn.Module, tokens: Tensor, *, window: int = 64, epsilons: Sequence[float] = EPSILONS
) -> tuple[dict[float, np.ndarray], float, float]:
    """Head signatures from rows rounded to fp16 probabilities, for each ε, and shares of zeros and empties.

    `tokens` [n, T], one sequence a pass. A row is softmax over all the keys it sees, rounded to fp16, cut to
    the first `window` keys, its zeros replaced, re-closed. Signatures are log-probabilities (heads of all
    layers, keys). Rows that do not see the whole window are left out, and so is a layer without any other; a
    row none of whose kept keys survived the rounding is no composition, left out and counted.
    """
    sums: dict[tuple[int, float], Tensor] = {}
    counts: dict[int, Tensor] = {}
    entries = zeros = rows_seen = empty = 0

    def look(call: AttentionCall, output: Tensor) -> None:
        nonlocal entries, zeros, rows_seen, empty
        rows, keys = slice(window, None), slice(0, window)
        logits = row_logits(call, rows, keys)
        keep = valid_rows(call)[:, window:]
        seen = visible(call, rows, keys)
        if seen is not None:
            whole = seen.expand(*seen.shape[:2], logits.shape[2], logits.shape[3]).all(-1).all(1)
            keep = keep & whole
        stored = (logits - call.lse[:, :, window:, None]).exp().half().double()
        alive = keep[:, None, :] & (stored > 0).any(-1)  # by head: each has rows of its own
        heads = stored.shape[1]
        if call.layer not in counts:
            counts[call.layer] = torch.zeros(heads, dtype=torch.float64)
            sums.update({(call.layer, e): torch.zeros(heads, window, dtype=torch.float64) for e in epsilons})
        rows_seen += int(keep.sum()) * heads
        empty += int(keep.sum()) * heads - int(alive.sum())
        for head in range(heads):
            chosen = stored[:, head][alive[:, head]]
            if not len(chosen):
                continue
            entries += chosen.numel()
            zeros += int((chosen == 0).sum())
            counts[call.layer][head] += len(chosen)
            closed = chosen / chosen.sum(-1, keepdim=True)
            for epsilon in epsilons:
                sums[call.layer, epsilon][head] += replace_zeros(closed, epsilon).rows.log().sum(0).cpu()

    with torch.no_grad(), attach(model, look, need_lse=True):
        for sequence in tokens:
            run_trunk(model, sequence[None])
    signatures = {}
    for epsilon in epsilons:
        means = [
            sums[layer, epsilon][counts[layer] > 0] / counts[layer][counts[layer] > 0, None]
            for layer in sorted(counts)
        ]
        signatures[epsilon] = torch.cat(means).log_softmax(-1).numpy()
    return signatures, zeros / max(entries, 1), empty / max(rows_seen, 1)


def epsilon_sweep(
    model: nn.Module,
    tokens: Tensor,
    *,
    window: int = 64,
    sink: int | Sequence[int] = 0,
    epsilons: Sequence[float] = EPSILONS,
    metrics: Sequence[str] = reversal.METRICS,
) -> list[EpsilonRates]:
    """Exact reversal rates from fp16 probabilities, one record an ε."""
    signatures, zeros, empty = half_precision_signatures(model, tokens, window=window, epsilons=epsilons)
    result = []
    for epsilon, rows in signatures.items():
        pairs = reversal.matrices(rows, sink, metrics)
        exact = {metric: float(reversal.exact_rates(*pair)[0].mean()) for metric, pair in pairs.items()}
        result.append(EpsilonRates(epsilon, zeros, empty, exact))
    return result
