"""Counted patches of names that several attachments may share: the first puts one, the last takes it away."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

Undo = Callable[[], None]
Put = Callable[[], Undo]

lock = threading.RLock()
installed: dict[tuple[int, str], tuple[int, Undo]] = {}


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
