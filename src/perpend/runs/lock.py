"""One run at a time in a folder: a lock that the system drops when its process dies, however it dies."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from perpend.errors import PerpendError
from perpend.runs.files import explained

NAME = ".lock"


class FolderLock:
    """Held from construction to `release`; a second holder, in any process, is refused."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / NAME
        self._handle: int | None = None
        flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
        with explained("lock", self._path):
            handle = os.open(self._path, flags, 0o666)
        try:
            _lock(handle)
            # The last holder may have removed this very file between our opening and our locking it.
            if not os.path.exists(self._path) or not os.path.samestat(os.fstat(handle), os.stat(self._path)):
                raise BlockingIOError
            with suppress(OSError):  # a note for the refused; a full disk is told by the first real write
                os.ftruncate(handle, 0)
                os.write(handle, str(os.getpid()).encode())
        except BlockingIOError as error:
            holder = os.read(handle, 20).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise PerpendError(
                f"{folder} is in use by another run (process {holder}); wait for it or choose "
                "another folder, out="
            ) from error
        except OSError as error:
            os.close(handle)
            raise PerpendError(
                f"{folder} is on a file system without locks ({error.strerror}); choose another folder, out="
            ) from error
        self._handle = handle

    def release(self) -> None:
        """Drops the lock; the file goes first, so that nobody can lock a file about to vanish unseen."""
        if self._handle is not None:
            self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = None

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


if os.name == "nt":

    def _lock(handle: int) -> None:
        import msvcrt

        try:
            msvcrt.locking(handle, msvcrt.LK_NBLCK, 1)
        except OSError as error:
            raise BlockingIOError(error.errno, error.strerror) from error
else:

    def _lock(handle: int) -> None:
        import fcntl

        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
