"""Several processes on one job: who am I, which part is mine, and exact sums over all of them.

Started by `torchrun --nproc-per-node N -m perpend …`; without torchrun everything here is the one-process
case and imports nothing. Work is cut into *blocks* (about 32 sequences), each computed wholly by one process,
and the blocks' sums are gathered and added in block order: the results are those of one process, bit for bit.

    sums = map_blocks(count, lambda block: survey_block(block), store=run.step)
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from perpend.errors import PerpendError

T = TypeVar("T")
Store = Callable[[str, Callable[[], Any]], Any]


def direct(name: str, compute: Callable[[], T]) -> T:
    """The store that stores nothing: surveys outside a run folder compute every step."""
    return compute()


def rank() -> int:
    """This process's number, from 0."""
    return int(os.environ.get("RANK", "0"))


def world() -> int:
    """How many processes share the job."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_main() -> bool:
    """Whether this process writes files and prints: exactly one does."""
    return rank() == 0


def local_device() -> str | None:
    """The accelerator that torchrun gives this process, else None (perpend chooses)."""
    if world() == 1 or "LOCAL_RANK" not in os.environ:
        return None
    import torch

    return f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else None


def shard(items: Sequence[T]) -> list[T]:
    """The items that are this process's: every world-th, so that neighbours of like cost spread evenly."""
    return list(items[rank() :: world()])


def map_blocks(
    count: int, compute: Callable[[int], Any], *, store: Store = direct, name: str = "block"
) -> list[Any]:
    """`compute(0), …, compute(count - 1)`, in this order on every process, each computed by one of them.

    `store(f"{name}-{index}", …)` keeps each block as soon as it is there, so that a resumed run, with as many
    processes or another number, computes only what is missing. `compute` must not communicate.
    """
    mine = {i: store(f"{name}-{i}", lambda i=i: compute(i)) for i in shard(range(count))}
    every = gather_blocks(mine)
    return [every[i] for i in range(count)]


def gather_blocks(mine: Mapping[int, Any]) -> dict[int, Any]:
    """The union of every process's blocks, in ascending order, on every process; nothing is added up."""
    if world() == 1:
        return dict(sorted(mine.items()))
    gathered: dict[int, Any] = {}
    for part in gather(dict(mine)):
        twice = gathered.keys() & part.keys()
        if twice:
            raise PerpendError(
                f"block {min(twice)} was computed by two processes; use shard() to divide the blocks"
            )
        gathered |= part
    return dict(sorted(gathered.items()))


def gather(value: T) -> list[T]:
    """Every process's value, by rank, on every process. Tensors arrive on the CPU, bits unchanged."""
    if world() == 1:
        return [value]
    import torch.distributed as dist

    out: list[Any] = [None] * world()
    with _peers():
        dist.all_gather_object(out, _to_cpu(value), group=_group())
    return out


def broadcast(value: T) -> T:
    """The main process's value on every process."""
    if world() == 1:
        return value
    import torch.distributed as dist

    box = [_to_cpu(value) if is_main() else None]
    with _peers():
        dist.broadcast_object_list(box, src=0, group=_group())
    return box[0]


def main_first(action: Callable[[], T]) -> T:
    """`action()` on the main process only; its result, or its error, on every process."""
    if world() == 1:
        return action()
    outcome: tuple[bool, Any] | None = None
    if is_main():
        try:
            outcome = (True, action())
        except PerpendError as error:
            outcome = (False, error)
        except BaseException as error:  # the others must not wait for a process that has stopped
            broadcast((False, PerpendError(f"the main process stopped: {type(error).__name__}: {error}")))
            raise
    good, value = broadcast(outcome)
    if not good:
        value.told = not is_main()  # by the main process: once is enough
        raise value
    return value


def barrier() -> None:
    """Waits until every process is here."""
    gather(rank())


def shutdown() -> None:
    """Leaves the group, if there is one; the processes may end in any order afterwards."""
    global _cpu_group
    if world() > 1:
        import torch.distributed as dist

        if dist.is_initialized():
            # A model that was shared holds the group in reference cycles. What is left of it when the
            # interpreter ends takes running threads with it, and the process aborts after all its work.
            _cpu_group = None
            gc.collect()
            dist.destroy_process_group()


_cpu_group: Any = None


def _group() -> Any:
    """The gloo group, made on first use: values here are small and on the CPU whatever the model is on."""
    global _cpu_group
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        with _peers():
            if torch.cuda.is_available() and "LOCAL_RANK" in os.environ:
                torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
                dist.init_process_group("cpu:gloo,cuda:nccl", timeout=_timeout())
            else:
                dist.init_process_group("gloo", timeout=_timeout())
        _cpu_group = None
    if _cpu_group is None:
        _cpu_group = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")
    return _cpu_group


def _timeout() -> Any:
    """Blocks may take long and ranks drift apart; a dead peer is noticed at once, not after this."""
    from datetime import timedelta

    return timedelta(hours=float(os.environ.get("PERPEND_TIMEOUT_HOURS", "12")))


@contextmanager
def _peers() -> Iterator[None]:
    """A collective that fails means a process is gone: said so, instead of a stack of sockets."""
    try:
        yield
    except (RuntimeError, ConnectionError, EOFError) as error:
        raise PerpendError(
            f"another process of this run has died (process {rank()}: {str(error).splitlines()[0]}); "
            "the blocks that were complete are kept: run the same again with resume=True"
        ) from error


def _to_cpu(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _to_cpu(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_to_cpu(item) for item in value)
    return value.detach().cpu() if hasattr(value, "detach") and hasattr(value, "cpu") else value
