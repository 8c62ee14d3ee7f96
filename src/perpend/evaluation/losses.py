"""Per-token losses of a language model, and how far one model is from another, streamed.

Only the losses are kept, [n, T]; logits exist for a slice of tokens at a time (`chunk`), in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perpend.batching import starts
from perpend.errors import InputError
from perpend.evaluation.windows import Windows, as_windows
from perpend.models.head import evaluating, halves
from perpend.models.limits import check_ids
from perpend.models.placement import input_device
from perpend.progress import Progress, silent

CHUNK = 1024  # tokens whose logits exist at one time


@dataclass(frozen=True)
class TokenNLL:
    """Negative log-likelihoods in nats. values: [n, T - 1] float32, `values[i, t - 1]` for token t of
    window i.

    `scored` has the same shape; values where it is False are 0 and mean nothing. `agreement` and `kl` [n, T
    - 1] are there after `divergence`: whether the top token equals the reference's, and KL(reference ||
    model) in nats.
    """

    values: Tensor
    scored: Tensor
    windows: Windows
    agreement: Tensor | None = None
    kl: Tensor | None = None

    @property
    def sums(self) -> np.ndarray:
        """Summed nats per sequence, float64, in the order of the first window of each."""
        return self._per_sequence(self.values.double())

    @property
    def counts(self) -> np.ndarray:
        """Scored tokens per sequence."""
        return self._per_sequence(self.scored.double())

    @property
    def nonfinite(self) -> int:
        return int((~torch.isfinite(self.values) & self.scored).sum())

    def mean_by_position(self, what: str = "values") -> np.ndarray:
        """[T - 1] mean over windows at each token position of `values`, `kl` or `agreement`; NaN where none
        is scored.
        """
        table = getattr(self, what)
        if table is None:
            raise InputError(f"{what} exists only after `divergence` against a reference model")
        table = torch.where(self.scored, table.double(), 0.0)
        count = self.scored.sum(0).double()
        return torch.where(count > 0, table.sum(0) / count.clamp(min=1), math.nan).numpy()

    def _per_sequence(self, table: Tensor) -> np.ndarray:
        unit = self.windows.sequence
        rows = torch.where(self.scored, table, 0.0).sum(1)
        total = torch.zeros(int(unit.max()) + 1, dtype=torch.float64).index_add_(0, unit, rows)
        present = torch.unique(unit)
        return total[present].numpy()


def _slices(length: int, batch: int, chunk: int) -> list[slice]:
    step = max(1, chunk // batch)
    return [slice(a, min(a + step, length)) for a in range(0, length, step)]


@torch.no_grad()
def token_nll(
    model: nn.Module,
    tokens: Tensor | Windows,
    *,
    batch: int = 8,
    chunk: int = CHUNK,
    progress: Progress = silent,
) -> TokenNLL:
    """-log p(token t | tokens before it in its window), nats, for every scored token.

    tokens: [n, T] or `Windows`. The log-softmax is taken in fp32 whatever the model's dtype, on `chunk`
    tokens at a time.
    """
    windows = as_windows(tokens)
    check_ids(model, windows.tokens)
    device = input_device(model)
    n, length = windows.tokens.shape
    values = torch.zeros(n, length - 1)
    with evaluating(model), progress(total=n, unit="sequences", description="loss") as advance:
        parts = halves(model)
        for start in starts(n, batch):
            rows = windows.tokens[start : start + batch].to(device)
            hidden = parts.trunk(rows[:, :-1])
            for part in _slices(length - 1, len(rows), chunk):
                logs = parts.head(hidden[:, part]).float()
                target = rows[:, 1:][:, part, None]
                # logsumexp - logit: one [.., V] tensor fewer than a log-softmax, the same number
                loss = torch.logsumexp(logs, -1) - logs.gather(-1, target)[..., 0]
                values[start : start + len(rows), part] = loss.cpu()
            advance(len(rows))
    scored = windows.scored[:, 1:]
    return TokenNLL(torch.where(scored, values, 0.0), scored, windows)


@torch.no_grad()
def divergence(
    base: nn.Module,
    other: nn.Module,
    tokens: Tensor | Windows,
    *,
    within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    batch: int = 8,
    chunk: int = CHUNK,
    progress: Progress = silent,
) -> tuple[TokenNLL, TokenNLL]:
    """Both models' losses in one pass, and how far `other` is from `base` at every token.

    Returns (base, other); the second carries `kl` = KL(base || other) in nats and `agreement` (same top
    token). `other` may be the same model as `base`: `within()` is entered for its half, for example
    `within=lambda: perpend.edit(model, site="residual.mlp", parallel=0.0)`.
    """
    windows = as_windows(tokens)
    check_ids(base, windows.tokens)
    check_ids(other, windows.tokens)
    device, far = input_device(base), input_device(other)
    n, length = windows.tokens.shape
    tables = {name: torch.zeros(n, length - 1) for name in ("base", "other", "kl", "agreement")}
    with evaluating(base, other), progress(total=n, unit="sequences", description="divergence") as advance:
        first, second = halves(base), halves(other)
        for start in starts(n, batch):
            rows = windows.tokens[start : start + batch].to(device)
            hidden = first.trunk(rows[:, :-1])
            with within():
                altered = second.trunk(rows[:, :-1].to(far))
            for part in _slices(length - 1, len(rows), max(1, chunk // 2)):
                p = torch.log_softmax(first.head(hidden[:, part]).float(), -1)
                with within():
                    q = torch.log_softmax(second.head(altered[:, part]).float(), -1).to(device)
                if p.shape != q.shape:
                    raise InputError(
                        f"vocabularies differ: {p.shape[-1]} against {q.shape[-1]}; KL needs one"
                    )
                target = rows[:, 1:][:, part, None]
                # p log(p/q) with p = 0 where the log is -inf: both models may forbid a token
                terms = torch.where(p > -math.inf, p.exp() * (p - q), 0.0)
                here = slice(start, start + len(rows))
                tables["base"][here, part] = -p.gather(-1, target)[..., 0].cpu()
                tables["other"][here, part] = -q.gather(-1, target)[..., 0].cpu()
                tables["kl"][here, part] = terms.sum(-1).cpu()
                tables["agreement"][here, part] = (p.argmax(-1) == q.argmax(-1)).float().cpu()
            advance(len(rows))
    scored = windows.scored[:, 1:]
    clean = {name: torch.where(scored, table, 0.0) for name, table in tables.items()}
    return (
        TokenNLL(clean["base"], scored, windows),
        TokenNLL(clean["other"], scored, windows, agreement=clean["agreement"], kl=clean["kl"]),
    )
