"""Head distances as Clark et al. take them: Jensen-Shannon of rows, summed over all tokens of a text.

    found = summed_jensen_shannon(model, tokens, sink=(0, 127))
    found.keep, found.drop                       # (heads, heads), nats

No mean row is formed: every token's two rows are compared, each mixed with a little of the uniform row first
(1 − 0.001 of the row and 0.001 of 1/D a key), and the divergences are added up over tokens and sequences.

Source: Clark, Khandelwal, Levy, Manning, "What Does BERT Look At?" (2019), Section 6, and its published code;
dropping the sink is the other paper's convention: its columns go and rows are re-closed before smoothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from perpend.batching import starts
from perpend.distributed import Store, direct, map_blocks
from perpend.errors import InputError
from perpend.models.attention import AttentionCall, attach, attention_sites, row_logits
from perpend.progress import Progress, silent
from perpend.surveys.batches import runner, sequences

SMOOTHING = 1e-3
BLOCK = 32  # sequences whose sums stay apart


@dataclass(frozen=True)
class SummedJensenShannon:
    """`by_block` float64 [blocks, 2, heads, heads], keep then drop, nats; `heads` (layer, head) of each."""

    by_block: np.ndarray
    heads: tuple[tuple[int, int], ...]
    tokens: int
    smoothing: float

    @property
    def keep(self) -> np.ndarray:
        return self.by_block.sum(0)[0]

    @property
    def drop(self) -> np.ndarray:
        return self.by_block.sum(0)[1]

    def replicates(self, count: int = 100, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(keep, drop) of resampled blocks of sequences; a seed draws as in a survey of as many blocks."""
        generator, n = np.random.default_rng(seed), len(self.by_block)
        for _ in range(count):
            weights = np.bincount(generator.integers(0, n, n), minlength=n)
            keep, drop = np.tensordot(weights, self.by_block, 1)
            yield keep, drop


def summed_jensen_shannon(
    model: nn.Module,
    tokens: Tensor,
    sink: Sequence[int],
    *,
    smoothing: float = SMOOTHING,
    batch: int = 8,
    block: int = BLOCK,
    store: Store = direct,
    progress: Progress = silent,
) -> SummedJensenShannon:
    """Σ over rows of JS between every two heads, with and without the `sink` columns.

    tokens: ids [n, T] of an encoder, every key visible to every query. block: sequences whose sums stay
    apart, for resampling. Costs heads² · n · T² logarithms.
    Raises InputError for a causal model, padding, or a sink outside the keys.
    """
    if not 0 <= smoothing < 1:
        raise InputError(f"smoothing is a share of the uniform row, 0 to below 1, not {smoothing}")
    length = tokens.shape[1]
    dropped = sorted({int(key) for key in sink})
    if not dropped or not 0 <= dropped[0] <= dropped[-1] < length or len(dropped) > length - 2:
        raise InputError(f"the sink {list(sink)} leaves no content among keys 0 to {length - 1}")
    content = [key for key in range(length) if key not in set(dropped)]
    sites = attention_sites(model)
    data = sequences(tokens)
    run = runner(model, set(data.inputs), sites)
    seen: list[tuple[int, Tensor]] = []

    def collect(call: AttentionCall, output: Tensor) -> None:
        seen.append((call.layer, row_logits(call)))

    def compute(index: int) -> dict[str, Tensor]:
        total: Tensor | None = None
        last = min(len(tokens), (index + 1) * block)
        with torch.no_grad(), attach(model, collect, sites=sites):
            for start in starts(last, batch, first=index * block):
                seen.clear()
                run(data.batch(start, min(last, start + batch))[0])
                logits = torch.cat([rows for _, rows in sorted(seen, key=lambda one: one[0])], 1)
                if not bool(torch.isfinite(logits).all()):
                    raise InputError(
                        "summed divergences need rows that see every key: give an encoder and whole sequences"
                    )
                for rows in logits:
                    both = [
                        _divergences(torch.softmax(part, -1), smoothing)
                        for part in (rows, rows[..., content])
                    ]
                    total = torch.stack(both) if total is None else total + torch.stack(both)
                advance((min(last, start + batch) - start) * length)
        assert total is not None  # a block holds at least one sequence
        return {"sums": total.cpu()}

    blocks = -(-len(tokens) // block)
    with progress(total=len(tokens) * length, unit="tokens", description="summed JS") as advance:
        found = map_blocks(blocks, compute, store=store, name="summed-js")
    heads = tuple((site.index, head) for site in sites for head in range(site.heads))
    sums = np.stack([np.asarray(block["sums"], np.float64) for block in found])
    return SummedJensenShannon(sums, heads, int(tokens.numel()), smoothing)


def _divergences(rows: Tensor, smoothing: float) -> Tensor:
    """Σ over tokens of JS between heads of [heads, T, D], [heads, heads] float64."""
    rows = (smoothing / rows.shape[-1] + (1 - smoothing) * rows).flatten(1)
    heads = len(rows)
    own = torch.special.xlogy(rows, rows).sum(1, dtype=torch.float64)
    found = torch.zeros(heads, heads, dtype=torch.float64, device=rows.device)
    for head in range(heads - 1):
        middle = (rows[head] + rows[head + 1 :]) / 2
        mixed = torch.special.xlogy(middle, middle).sum(1, dtype=torch.float64)
        found[head, head + 1 :] = (own[head] + own[head + 1 :]) / 2 - mixed
    return (found + found.T).clamp_(min=0)
