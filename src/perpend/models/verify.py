"""The proof that perpend reads and edits this model rightly, one row a check, every layer.

    verification = perpend.verify(model, tokenizer)
    print(verification)         # a table; verification.passed says whether every check that applies holds

Each check compares two ways to the same number: what the model computes, and what perpend's definitions make
of the pieces it reads. A check that does not apply (a cache in an encoder, rows in linear attention) is
`skipped` with its reason, which is not a failure. docs/verify.md says what is guaranteed and what is not.

Errors are relative, per token or row: ‖a − b‖/‖b‖, the worst over tokens, layers and heads. Those that follow
from one rounding are held to a few machine epsilons, those that pass through the whole model in another order
of summation (cache, padding, batch) to `through(dtype)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError, PerpendError
from perpend.models.inputs import model_inputs
from perpend.models.layout import text_config

if TYPE_CHECKING:
    import pandas as pd

SEQUENCES, LENGTH, DECODED = 8, 48, 6
DISTINCT = 16  # different tokens that a text must hold to be worth reading
PATCHES = 8  # on a side of the images

# relative error of a whole pass in another order of summation, by the model's dtype
_THROUGH = {torch.float64: 1e-9, torch.float32: 2e-4, torch.float16: 2e-2, torch.bfloat16: 1e-1}
# relative error of one product or sum recomputed from the tensors that the model holds
_LOCAL = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@dataclass(frozen=True)
class Check:
    """One row: `status` ok, failed or skipped; `worst` error, `tolerance`; `seen`, what it looked at."""

    name: str
    question: str
    status: str
    worst: float | None = None
    tolerance: float | None = None
    seen: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Verification:
    """All checks of one model."""

    model: str
    rows: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(row for row in self.rows if row.status == "failed")

    @property
    def table(self) -> pd.DataFrame:
        """check, status, worst, tolerance, layers, detail."""
        import pandas as pd

        return pd.DataFrame(
            [(r.name, r.status, r.worst, r.tolerance, r.seen, r.detail or r.question) for r in self.rows],
            columns=["check", "status", "worst", "tolerance", "seen", "what"],
        )

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"checks": self.table}

    @property
    def results(self) -> dict[str, Any]:
        return {
            "passed": self.passed,
            "checks": {
                row.name: {
                    "status": row.status,
                    "worst": row.worst,
                    "tolerance": row.tolerance,
                    "seen": row.seen,
                    "detail": row.detail,
                }
                for row in self.rows
            },
        }

    def __str__(self) -> str:
        lines = [f"{self.model}: {'all checks passed' if self.passed else 'FAILED'}"]
        for row in self.rows:
            error = "" if row.worst is None else f"{row.worst:.1e} ≤ {row.tolerance:.0e}"
            if row.status == "failed" and row.worst is not None:
                error = f"{row.worst:.1e} > {row.tolerance:.0e}"
            lines.append(f"  {row.status:8} {row.name:34} {error:20} {row.detail or row.seen}".rstrip())
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return self.table.to_html(index=False, float_format="%.2g", na_rep="")


class Skip(Exception):
    """Raised by a check that does not apply, with the reason."""


@dataclass
class Found:
    """What a check saw: errors to hold against a tolerance, how much it looked at, words for the table."""

    tolerance: float
    errors: list[Tensor] = field(default_factory=list)
    seen: str = ""
    detail: str = ""

    def add(self, got: Tensor, expected: Tensor, real: Tensor | None = None) -> None:
        """Relative errors over the last axis, of the rows marked `real` (or all)."""
        wide = torch.float64 if got.device.type != "mps" else torch.float32
        got, expected = got.to(wide), expected.to(wide)
        error = torch.linalg.vector_norm(got - expected, dim=-1)
        size = torch.linalg.vector_norm(expected, dim=-1)
        # a row that is all but zero is held to the scale of the others
        scale = torch.maximum(size, 1e-3 * size.square().mean().sqrt() + torch.finfo(torch.float32).tiny)
        relative = error / scale
        relative = torch.where(torch.isfinite(relative), relative, torch.inf)
        self.errors.append((relative if real is None else relative[real]).reshape(-1))

    @property
    def worst(self) -> float:
        return max((float(error.max()) for error in self.errors if error.numel()), default=0.0)


@dataclass
class Probe:
    """The model and the inputs of all checks: `tokens` are ids [B, T] or images [B, 3, height, width]."""

    model: nn.Module
    tokens: Tensor

    @cached_property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.model.parameters() if p.is_floating_point())

    @property
    def local(self) -> float:
        return _LOCAL[self.dtype]

    @property
    def through(self) -> float:
        return _THROUGH[self.dtype]

    @property
    def images(self) -> bool:
        return torch.is_floating_point(self.tokens)

    @property
    def causal(self) -> bool:
        """Whether it is a decoder that can be run with a cache."""
        can = getattr(self.model, "can_generate", None)
        return not self.images and bool(can and can())

    @cached_property
    def plain(self) -> Tensor:
        """The model's output on all tokens, untouched."""
        return self.run()

    def run(self, tokens: Tensor | None = None, mask: Tensor | None = None, **more: Any) -> Tensor:
        """Logits, or last hidden states, [B, T, ·] (a classifier's [B, classes])."""
        tokens = self.tokens if tokens is None else tokens
        with torch.no_grad():
            return output_of(self.model(**model_inputs(self.model, tokens, mask), **more))


def verify(
    model: nn.Module,
    tokenizer: Any = None,
    *,
    tokens: Tensor | None = None,
    only: Sequence[str] | None = None,
) -> Verification:
    """Run every check on `model`; what fails is a row, not an exception.

    Inputs: `tokens`, ids [n, T] or images [n, 3, height, width], or else the first sequences of the built-in
    English text if there is a tokenizer that knows English, and seeded random ids or images if there is none.
    A few hundred tokens are enough: a wrong reading is wrong by far more than rounding. `only` names the
    checks to run.
    """
    from perpend.models.checks import CHECKS

    known = {check.title: check for check in CHECKS}
    if only is not None:
        from perpend.errors import unknown_name

        for name in only:
            if name not in known:
                raise unknown_name("check", name, known)
    chosen = [check for name, check in known.items() if only is None or name in only]
    if model.training:
        raise InputError("the model is in training mode: call model.eval() first, dropout is no rounding")
    probe = Probe(model, _inputs(model, tokenizer) if tokens is None else tokens)
    rows = tuple(_row(check, probe) for check in chosen)
    return Verification(getattr(model, "name_or_path", "") or type(model).__name__, rows)


def _row(check: Callable[[Probe], Found], probe: Probe) -> Check:
    name, question = check.title, (check.__doc__ or "").strip().split("\n")[0]
    try:
        found = check(probe)
    except Skip as reason:
        return Check(name, question, "skipped", detail=str(reason))
    except PerpendError as error:  # perpend refused what it could not do rightly: that is the finding
        return Check(name, question, "failed", detail=str(error))
    worst = found.worst
    status = "ok" if worst <= found.tolerance else "failed"
    return Check(name, question, status, worst, found.tolerance, found.seen, found.detail)


def _inputs(model: nn.Module, tokenizer: Any) -> Tensor:
    config = text_config(model)
    generator = torch.Generator().manual_seed(0)
    if getattr(config, "image_size", None) is not None and getattr(config, "vocab_size", None) is None:
        return _images(model, config, generator)
    length = min(LENGTH, getattr(config, "max_position_embeddings", None) or LENGTH)
    if hasattr(tokenizer, "encode"):
        from perpend import texts

        tokens = texts.sequences(texts.read_text(None), tokenizer, length=length).take(SEQUENCES, 0)
        # a vocabulary of other things than English reads one unknown token over and over: like values, whose
        # difference is rounding, are no test of anything
        if len(tokens.unique()) >= DISTINCT:
            return tokens
    vocabulary = int(getattr(config, "vocab_size", 0) or 0)
    if vocabulary < 2:
        raise InputError("the model's config has no vocab_size; give verify(..., tokens=...)")
    special = {getattr(config, f"{kind}_token_id", None) for kind in ("pad", "bos", "eos", "image")}
    ids = torch.tensor([i for i in range(vocabulary) if i not in special])
    return ids[torch.randint(len(ids), (SEQUENCES, length), generator=generator)]


def _images(model: nn.Module, config: Any, generator: torch.Generator) -> Tensor:
    """Random images; smaller than the model's own where it interpolates positions: passes stay short."""
    size, patch = config.image_size, getattr(config, "patch_size", 16)
    height, width = (size, size) if isinstance(size, int) else size
    patch = patch if isinstance(patch, int) else patch[0]
    channels = getattr(config, "num_channels", 3)
    images = torch.randn(SEQUENCES, channels, height, width, generator=generator)
    side = PATCHES * patch
    if min(height, width) <= side:
        return images
    try:
        with torch.no_grad():
            model(**model_inputs(model, images[:1, :, :side, :side]))
    except (ValueError, RuntimeError):  # it takes one size alone
        return images
    return images[:, :, :side, :side].contiguous()


def probe_inputs(model: nn.Module, count: int, length: int) -> dict[str, Any]:
    """Keyword arguments for a short pass: seeded random ids or images, `count` of them."""
    tokens = _inputs(model, None)[:count]
    return model_inputs(model, tokens if torch.is_floating_point(tokens) else tokens[:, :length])


def output_of(output: Any) -> Tensor:
    """Logits where there are any, else the last hidden states."""
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    if isinstance(output, Tensor):
        return output
    if isinstance(output, tuple) and isinstance(output[0], Tensor):
        return output[0]
    raise InputError(f"the model returned {type(output).__name__}: verify reads logits or last hidden states")
