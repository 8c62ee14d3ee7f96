"""Perplexities of a language model, each named, with everything needed to repeat it.

    windows = cut(ids, context=2048)                       # C4 style: consecutive windows of fixed length
    nll = token_nll(model, windows)                        # nats, per token
    perplexity("c4_loss", nll).results                     # loss, interval, tokens, context, stride, bos ...

Two perplexities of one text differ by 10-30 % when the context, the stride or the BOS differ, so a
`Perplexity` carries all of them. Intervals resample sequences, never tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from perpend.errors import InputError
from perpend.evaluation.losses import TokenNLL, divergence, token_nll
from perpend.evaluation.windows import Windows, as_windows, cut, rolling

__all__ = [
    "PairedLoss", "Perplexity", "TokenNLL", "Windows", "as_windows", "cut", "divergence", "paired",
    "perplexity", "resampled", "rolling", "token_nll",
]  # fmt: skip


@dataclass(frozen=True)
class Perplexity:
    """One named perplexity. `loss`: mean nats per unit ("token" or "word"); `perplexity` = exp(loss)."""

    name: str
    unit: str
    loss: float
    low: float
    high: float
    units: int
    tokens: int
    sequences: int
    context: int
    stride: int
    bos: bool
    split: str
    nonfinite: int
    nll: TokenNLL = field(repr=False, compare=False)

    @property
    def perplexity(self) -> float:
        return _exp(self.loss)

    @property
    def results(self) -> dict[str, Any]:
        """Everything a table needs; numbers that do not exist are None."""
        numbers = {
            "loss": self.loss,
            "loss_low": self.low,
            "loss_high": self.high,
            "perplexity": self.perplexity,
            "perplexity_low": _exp(self.low),
            "perplexity_high": _exp(self.high),
        }
        return {
            "name": self.name,
            "unit": self.unit,
            **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
            f"{self.unit}s": self.units,
            "tokens": self.tokens,
            "sequences": self.sequences,
            "context": self.context,
            "stride": self.stride,
            "bos": self.bos,
            "split": self.split,
            "nonfinite_tokens": self.nonfinite,
        }


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def perplexity(
    name: str, nll: TokenNLL, *, unit: str = "token", seed: int = 0, draws: int = 2000
) -> Perplexity:
    """Mean loss and its 95 % bootstrap interval over sequences. unit "word" needs windows that carry word
    counts.
    """
    sums, tokens = nll.sums, nll.counts
    if unit == "word":
        if nll.windows.words is None:
            raise InputError("a word perplexity needs windows made by `rolling`, which count the words")
        counts = nll.windows.words.double().numpy()[torch.unique(nll.windows.sequence).numpy()]
    elif unit == "token":
        counts = tokens
    else:
        raise InputError(f"unit must be 'token' or 'word', got {unit!r}")
    ratio = resampled(sums, counts, seed=seed, draws=draws)
    low, high = np.quantile(ratio, [0.025, 0.975]) if len(sums) > 1 else (math.nan, math.nan)
    w = nll.windows
    return Perplexity(
        name, unit, float(sums.sum() / counts.sum()), float(low), float(high), int(counts.sum()),
        int(tokens.sum()), len(sums), w.context, w.stride, w.bos, w.split, nll.nonfinite, nll,
    )  # fmt: skip


def resampled(sums: np.ndarray, counts: np.ndarray, *, seed: int = 0, draws: int = 2000) -> np.ndarray:
    """[draws] bootstrap replicates of Σ sums / Σ counts, whole sequences drawn with replacement."""
    rng = np.random.default_rng(seed)
    n = len(sums)
    replicates = np.empty(draws)
    for start in range(0, draws, 256):  # multinomial counts, 256 draws at a time: flat in memory
        weights = rng.multinomial(n, np.full(n, 1 / n), size=min(256, draws - start)).astype(float)
        replicates[start : start + len(weights)] = (weights @ sums) / (weights @ counts)
    return replicates


@dataclass(frozen=True)
class PairedLoss:
    """log of the ratio of two perplexities (= difference of mean losses, nats a token), other minus base.

    low, high: 95 % percentile bootstrap interval over sequences, the same sequences drawn for both models.
    """

    difference: float
    low: float
    high: float
    sequences: int
    tokens: int
    worse: float  # share of sequences on which the other model's loss is higher
    seed: int
    draws: int

    @property
    def ratio(self) -> float:
        """perplexity of other / perplexity of base."""
        return _exp(self.difference)

    @property
    def results(self) -> dict[str, Any]:
        row = {
            "difference": self.difference,
            "low": self.low,
            "high": self.high,
            "ratio": self.ratio,
            "worse": self.worse,
        }
        kept = {key: value if math.isfinite(value) else None for key, value in row.items()}
        return {
            **kept,
            "sequences": self.sequences,
            "tokens": self.tokens,
            "seed": self.seed,
            "draws": self.draws,
        }


def paired(base: TokenNLL, other: TokenNLL, *, seed: int = 0, draws: int = 2000) -> PairedLoss:
    """Compare two models on the same tokens. A sequence is the unit: tokens of one sequence are not
    independent.
    """
    if base.windows is not other.windows and not (
        torch.equal(base.windows.tokens, other.windows.tokens) and torch.equal(base.scored, other.scored)
    ):
        raise InputError("a paired comparison needs the same windows for both models")
    gap, counts = other.sums - base.sums, base.counts
    estimate = float(gap.sum() / counts.sum())
    if len(gap) > 1:
        low, high = np.quantile(resampled(gap, counts, seed=seed, draws=draws), [0.025, 0.975])
    else:
        low = high = math.nan
    return PairedLoss(
        estimate, float(low), float(high), len(gap), int(counts.sum()), float((gap > 0).mean()), seed, draws
    )
