"""Files that are either whole or absent: atomic writes, and JSON without NaN.

A write goes to a temporary file beside its target, is flushed to the disk, and is renamed over it: whatever
kills the process, the target holds the old content or the new one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from perpend.errors import InputError, PerpendError

TEMPORARY = ".writing-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,99}")
_LONGEST = 120


@contextmanager
def explained(what: str, path: Path) -> Iterator[None]:
    """Turns the operating system's refusals into errors that say what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise PerpendError(
                f"no space left to {what} {path}: free some space or choose another folder, out=; "
                "steps that were complete are kept, and resume=True continues from them"
            ) from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise PerpendError(
                f"cannot {what} {path}: {error.strerror}; choose a folder you may write to, out="
            ) from error
        if error.errno in (errno.ENOTDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR):
            raise PerpendError(
                f"cannot {what} {path}: {error.strerror}; choose another folder, out="
            ) from error
        raise PerpendError(f"cannot {what} {path}: {error.strerror or error}") from error


def write_atomically(path: Path, content: bytes | str) -> None:
    """Writes `content` so that `path` is never seen half written, also after a power cut."""
    data = content.encode() if isinstance(content, str) else content
    with explained("write", path):
        handle, temporary = tempfile.mkstemp(prefix=TEMPORARY, dir=path.parent)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's 0600 would hide a shared run from colleagues
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                os.unlink(temporary)
            raise
        _sync_folder(path.parent)


def safe_name(name: str, kind: str) -> str:
    """A table's or array's name; refuses anything that could leave the run folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name) or ".." in name:
        raise InputError(
            f"{name!r} is no name for {kind}: use letters, digits, '_', '-' and '.', a letter or digit first"
        )
    return name


def step_file(name: str) -> str:
    """A file name for any step name: escaped, one level, and short enough for every file system."""
    if not isinstance(name, str) or not name:
        raise InputError(f"a step needs a name, not {name!r}")
    escaped = quote(name, safe="").replace(".", "%2E")
    if len(escaped) > _LONGEST:
        escaped = f"{escaped[: _LONGEST - 33]}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return f"{escaped}.safetensors"


def plain(value: Any) -> Any:
    """`value` as JSON holds it: arrays become lists, numpy and torch scalars numbers, NaN and ±inf null."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(plain(key)): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        items = sorted(value, key=str) if isinstance(value, (set, frozenset)) else value
        return [plain(item) for item in items]
    if isinstance(value, (Path, np.dtype)):
        return str(value)
    if is_tensor(value):
        return plain(value.detach().cpu().tolist())
    if isinstance(value, (np.ndarray, np.generic)):
        return plain(value.tolist())
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        return plain(value.to_dict(orient="records"))
    if type(value).__module__ == "torch":  # dtypes and devices
        return str(value).removeprefix("torch.")
    raise InputError(f"JSON cannot hold a {type(value).__name__}; give numbers, strings, lists or dicts")


def to_json(value: Any) -> str:
    return json.dumps(plain(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def read_json(path: Path) -> Any:
    """The document in `path`; says what is wrong, and what is still there, if it is damaged."""
    with explained("read", path):
        data = path.read_bytes()
    try:
        return json.loads(data)
    except (ValueError, RecursionError) as error:
        raise PerpendError(
            f"{path} is damaged ({error}); nothing was changed, and tables and arrays beside it may still be "
            "read directly. To run again, choose another folder, out=, or move the folder away"
        ) from error


def is_tensor(value: Any) -> bool:
    """Whether `value` is a torch tensor, asked without importing torch."""
    return (
        type(value).__module__.split(".")[0] == "torch"
        and hasattr(value, "detach")
        and hasattr(value, "dtype")
    )


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current


def _sync_folder(folder: Path) -> None:
    """Makes the rename itself survive a power cut, where the platform can."""
    if os.name == "nt":
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
