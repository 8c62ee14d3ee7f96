"""What a training run needs, computed before it starts: memory of each process, and hours at a stated
utilisation.

States: float32 weights, gradients and AdamW's two moments, 16 bytes a parameter; under FSDP divided by the
number of processes. Activations: what autograd keeps of one forward pass of one micro-batch, autocast's
copies of the weights among it, counted by running the model on fake tensors (nothing is allocated). Logits:
12 bytes each, since the loss holds their log-probabilities and their gradient in float32 beside the logits
and their cast. Not counted: fragmentation, exchange buffers and the CUDA context, some GB together.
`torch.compile` needs less than this.
"""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from perpend.training.model import Decoder, Shape, build
from perpend.training.parallel import device
from perpend.training.recipe import Recipe, flops_per_token
from perpend.training.variants import apply_variant


@dataclass(frozen=True)
class Estimate:
    """Bytes per process, and the whole run's tokens and model FLOPs."""

    parameters: int
    states: float
    activations: float
    logits: float
    tokens: float
    flops: float

    @property
    def memory(self) -> float:
        return self.states + self.activations + self.logits


def kept_bytes(shape: Shape, variant: str, micro: int, context: int, dtype: str) -> int:
    """Bytes that autograd keeps for the backward pass of one micro-batch, weights and logits not counted;
    autocast's bfloat16 copies of the weights are.

    Counted on the CPU's kernels: its fused attention keeps what CUDA's keeps (q, k, v, o and a log-sum-exp).
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    # two layer counts give the per-layer bytes exactly, so that large models cost no more than small ones
    def measure(layers: int) -> int:
        seen: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            seen[storage._cdata] = storage.nbytes()
            return tensor

        small = Shape(**{**shape.__dict__, "layers": layers})
        with FakeTensorMode():
            model = apply_variant(Decoder(small), variant)
            tokens = torch.zeros(micro, context, dtype=torch.long)
            low = torch.autocast("cpu", torch.bfloat16) if dtype == "bfloat16" else nullcontext()
            with low, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
                logits = model(tokens)
            own = {p.untyped_storage()._cdata for p in model.parameters()}
            own |= {b.untyped_storage()._cdata for b in model.buffers()}
            own |= {logits.untyped_storage()._cdata}
            return sum(size for key, size in seen.items() if key not in own)

    one, two = measure(1), measure(2)
    return one + (shape.layers - 1) * (two - one)


def estimate(
    shape: Shape, variant: str, recipe: Recipe, *, processes: int = 1, strategy: str = "ddp"
) -> Estimate:
    """Memory of each process and the arithmetic of the run."""
    micro, _ = recipe.accumulation(processes)
    parameters = shape.parameters()
    states = 16 * parameters / (processes if strategy == "fsdp" else 1)
    activations = kept_bytes(shape, variant, micro, recipe.context, recipe.dtype)
    logits = micro * recipe.context * shape.vocab * 12
    tokens = recipe.steps * recipe.tokens_per_step
    return Estimate(parameters, states, activations, logits, tokens, flops_per_token(shape) * tokens)


def measure(shape: Shape, variant: str, recipe: Recipe, evaluated: int = 0) -> float:
    """Seconds of the whole run here, from two steps of one micro-batch of random tokens: the second one's
    time, with the optimizer's step once a step and `evaluated` sequences read forward in all evaluations.
    """
    micro, passes = recipe.accumulation(1)
    here = device()
    model = apply_variant(build(shape), variant).to(here)
    optimizer = torch.optim.AdamW(model.parameters())
    low = torch.autocast(here.type, torch.bfloat16) if recipe.dtype == "bfloat16" else nullcontext()
    tokens = torch.randint(shape.vocab, (micro, recipe.context + 1), device=here)

    def now() -> float:
        if here.type == "cuda":
            torch.cuda.synchronize(here)
        return time.perf_counter()

    for _ in range(2):
        began = now()
        with low:
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        read = now()
        loss.backward()
        back = now()
        optimizer.step()
        stepped = now()
    forward = read - began
    return recipe.steps * (passes * (back - began) + stepped - back) + forward * math.ceil(evaluated / micro)
