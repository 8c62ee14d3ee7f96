"""Counted patches of names that several attachments may share: the first puts one, the last takes it away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn

Undo = Callable[[], None]
Put = Callable[[], Undo]

lock = threading.RLock()
installed: dict[tuple[int, str], tuple[int, Undo]] = {}


def as_written(modules: Iterable[nn.Module]) -> Mapping[tuple[int, str], Put]:
    """The patch under which what torch has compiled runs as it is written; none where no module is compiled.

    What was compiled before a hook came does not call it, and what is compiled with a hook calls it after it
    has gone. Compiled code is kept, and runs again afterwards.
    """
    if any("_orig_mod" in m._modules or m._compiled_call_impl is not None for m in modules):
        return {(id(torch.compiler), "stance"): _run_as_written}
    return {}


def _run_as_written() -> Undo:
    stance = torch.compiler.set_stance("force_eager")
    return lambda: stance.__exit__(None, None, None)


@contextmanager
def patched(patches: Mapping[tuple[int, str], Put]) -> Iterator[None]:
    """Keep these patches in place while the block lasts; `put` makes one and returns what undoes it.

    The key is the patched namespace's id and the name in it. Attachments of several threads and models count
    together, in whatever order they end.
    """
    done = []
    try:
        for key, put in patches.items():
            with lock:
                if key in installed:
                    count, undo = installed[key]
                else:
                    count, undo = 0, put()
                installed[key] = (count + 1, undo)
            done.append(key)
        yield
    finally:
        for key in reversed(done):
            with lock:
                count, undo = installed.pop(key)
                if count > 1:
                    installed[key] = (count - 1, undo)
                else:
                    undo()
