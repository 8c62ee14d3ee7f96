"""How long, how fast and on what a model is trained: numbers only, and the paper's own as presets."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

from perpend.errors import InputError, unknown_name
from perpend.training.model import Shape


@dataclass(frozen=True)
class Recipe:
    """AdamW with linear warm-up and cosine decay. Batches count sequences, over all processes together."""

    steps: int = 1000
    batch: int = 32
    context: int = 256
    micro: int | None = (
        None  # sequences per process and forward pass; None: as many as a process has of a step
    )
    lr: float = 1e-3
    warmup: int = 100
    final_lr: float = 0.1  # the cosine ends at this fraction of lr
    weight_decay: float = 0.1  # of matrices; never of norms and gates
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0  # of the gradient's norm; 0: none
    dtype: str = "float32"  # bfloat16: autocast, master weights in float32
    compile: bool = False
    seed: int = 0  # of the initial weights and of the order of the data

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "context"):
            if getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.warmup < self.steps:
            raise InputError(
                f"warm-up of {self.warmup} steps must be shorter than the run's {self.steps}; set warmup="
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise unknown_name("dtype for training", self.dtype, ["float32", "bfloat16"])
        if not 0 < self.lr < math.inf:
            raise InputError(f"lr must be positive and finite, not {self.lr:g}")
        if not 0 <= self.final_lr <= 1:
            raise InputError(f"final_lr is a fraction of lr between 0 and 1, not {self.final_lr:g}")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} must be 0 or positive and finite, not {getattr(self, name):g}")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} must be at least 0 and below 1, not {getattr(self, name):g}")

    @property
    def tokens_per_step(self) -> int:
        return self.batch * self.context

    def accumulation(self, world: int) -> tuple[int, int]:
        """(sequences per forward pass, passes per step) of each of `world` processes."""
        share, rest = divmod(self.batch, world)
        micro = self.micro or share
        if rest or share % micro:
            raise InputError(
                f"a batch of {self.batch} sequences does not divide into {world} process(es) of whole "
                f"micro-batches of {micro}; choose batch= as a multiple of {world * micro}"
            )
        return micro, share // micro

    def lr_at(self, step: int) -> float:
        """The learning rate of the 0-based `step`."""
        if step < self.warmup:
            return self.lr * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - 1 - self.warmup)
        return self.lr * (
            self.final_lr + (1 - self.final_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        )

    def identity(self) -> dict[str, Any]:
        """What decides the result; `micro` and `compile` change rounding only and may change on resume."""
        return {k: v for k, v in asdict(self).items() if k not in ("micro", "compile")}


# Steps, batch, length, warm-up, cosine, AdamW, bf16, and the learning rates of the two largest are the
# paper's (Appendix E). It leaves out the learning rate of the smaller sizes (the 1.4B one is used), betas,
# weight decay, clipping and the cosine's end, which are what GPT-3-style runs use and the defaults above.
_PAPER = {
    "steps": 200_000,
    "batch": 256,
    "context": 2048,
    "warmup": 2000,
    "dtype": "bfloat16",
    "compile": True,
}
PRESETS: dict[str, tuple[str, Recipe]] = {
    "296M": ("openwebtext", Recipe(**_PAPER, micro=8, lr=4e-4)),
    "436M": ("openwebtext", Recipe(**_PAPER, micro=8, lr=4e-4)),
    "528M": ("openwebtext", Recipe(**_PAPER, micro=8, lr=4e-4)),
    "1.4B": ("fineweb", Recipe(**_PAPER, micro=4, lr=4e-4)),
    "2.7B": ("fineweb", Recipe(**_PAPER, micro=4, lr=3e-4)),
}


def recipe(**values: Any) -> Recipe:
    """A `Recipe` from names and values; unknown names are refused with near ones."""
    known = {f.name for f in fields(Recipe)}
    for name in values:
        if name not in known:
            raise unknown_name("training setting", name, known)
    return Recipe(**values)


def flops_per_token(shape: Shape) -> float:
    """Model FLOPs of forward and backward per token: 6 per weight that is multiplied, and causal attention.

    Weights: all but the input embedding's. Attention: 12 layers * dim * context / 2, since a causal model
    needs half of the T×T products; PaLM's convention counts them whole.
    """
    weights = shape.parameters() - (0 if shape.tied else shape.vocab * shape.dim)
    return 6.0 * weights + 6.0 * shape.layers * shape.dim * shape.context


# Dense bf16 peaks from the vendors' data sheets, FLOP/s; the key is part of the device's name.
PEAKS = {
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "H200": 989e12,
    "B200": 2250e12,
    "L40S": 362e12,
    "4090": 165e12,
}


def peak_flops(device: str) -> float | None:
    """The dense bf16 peak of the named device, or None where it is not known."""
    return next((peak for name, peak in PEAKS.items() if name in device), None)
