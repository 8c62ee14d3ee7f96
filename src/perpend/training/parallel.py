"""One model on several processes: DistributedDataParallel, or FSDP2 where the states should be divided.

Started by `torchrun --nproc-per-node N -m perpend train …`. Every process builds the same model from the
same seed; the batch of a step is the same whatever the number of processes, so the loss curve is, within
rounding.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)

from perpend import distributed
from perpend.errors import unknown_name
from perpend.training.model import Decoder

STRATEGIES = ("ddp", "fsdp")
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def device() -> torch.device:
    """This process's accelerator, or the processor."""
    chosen = distributed.local_device() or ("cuda" if torch.cuda.is_available() else "cpu")
    if chosen.startswith("cuda:"):
        torch.cuda.set_device(chosen)
    return torch.device(chosen)


def spread(model: Decoder, strategy: str) -> nn.Module:
    """The model as the processes share it; one process gets it back as it is."""
    if strategy not in STRATEGIES:
        raise unknown_name("parallel strategy", strategy, STRATEGIES)
    if distributed.world() == 1:
        return model
    distributed.barrier()  # makes the process group
    here = next(model.parameters()).device
    if strategy == "ddp":
        return nn.parallel.DistributedDataParallel(model, [here] if here.type == "cuda" else None)

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(here.type, (distributed.world(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def last_pass(model: nn.Module, last: bool) -> AbstractContextManager[Any]:
    """Gradients are exchanged after the last micro-batch of a step only."""
    if isinstance(model, nn.parallel.DistributedDataParallel):
        return nullcontext() if last else model.no_sync()
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return nullcontext()


def clip_gradient(model: nn.Module, limit: float) -> Tensor:
    """Scales the gradient down to norm `limit` (0: leaves it) and returns the norm that it had."""
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))
    return norm.full_tensor() if hasattr(norm, "full_tensor") else norm


def mean(value: Tensor) -> Tensor:
    """The mean over processes."""
    if distributed.world() == 1:
        return value
    value = value.clone()
    dist.all_reduce(value)
    return value / distributed.world()


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Weights and optimizer states, undivided, on the CPU of the main process. All processes call it."""
    weights, moments = get_state_dict(model, optimizer, options=_WHOLE)
    return {"model": weights, "optimizer": moments}


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """The weights, undivided, on the CPU of the main process. All processes call it."""
    return get_model_state_dict(model, options=_WHOLE)


def restore(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Puts back what `whole_state` gave, on any number of processes."""
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=StateDictOptions(full_state_dict=True),
    )
