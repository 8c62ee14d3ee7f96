"""A run folder: what was asked, what came out, and everything needed to go on after a kill.

    with Run.start("runs/mine", command="attention", request={...}) as run:
        sums = run.step("block-0", compute)       # stored as soon as computed; not computed again on resume
        run.table("layers", frame)                # layers.csv
        run.array("signatures", array)            # in arrays.safetensors
        run.finish(results={...}, conventions={...}, findings=[...])

While a run is under way the folder holds `partial.json` (the request) and `steps/`; when it is finished it
holds `run.json`, the tables, `arrays.safetensors` and `report.html`. `run.json` is written last, so its
presence means that all is there.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

import perpend
from perpend import distributed
from perpend.errors import InputError, PerpendError
from perpend.progress import note
from perpend.runs.environment import environment, invocation
from perpend.runs.files import (
    TEMPORARY,
    explained,
    is_tensor,
    plain,
    read_json,
    safe_name,
    sha256_file,
    step_file,
    to_json,
    write_atomically,
)
from perpend.runs.lock import FolderLock
from perpend.runs.reader import ARRAYS, DOCUMENT, REPORT, FinishedRun
from perpend.runs.values import pack, unpack

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
_GENERIC = re.compile(
    r"final|last|latest|best|models|checkpoints?|snapshots?|weights|hf|(?:global_?|checkpoint-?|step[-_]?)+\d+"
    r"|[0-9a-f]{40}",
    re.IGNORECASE,
)
PARTIAL, STEPS, BASE = "partial.json", "steps", "runs"


class AlreadyFinished(PerpendError):
    """A `--resume` of a run that is complete: nothing to do, and its results are in `.run`."""

    def __init__(self, run: FinishedRun) -> None:
        super().__init__(
            f"{run.folder} is complete: nothing to resume (`perpend report {run.folder}` rebuilds its report)"
        )
        self.run = run


class Run:
    """A run being written. Use `Run.start` in a `with`; `Run.open` reads a finished one."""

    def __init__(
        self, folder: Path, command: str, request: dict[str, Any], lock: FolderLock | None, created: bool
    ) -> None:
        self.folder, self.command, self.request = folder, command, request
        self.tables: dict[str, pd.DataFrame] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.documents: dict[str, Any] = {}
        self.document: dict[str, Any] = {}
        self._lock, self._created, self._stored = lock, created, 0
        self._began = time.time()

    @classmethod
    def start(
        cls,
        out: str | Path | None,
        *,
        command: str,
        request: Mapping[str, Any],
        resume: bool = False,
    ) -> Run:
        """Opens a folder for this request; with several processes the main one does, and all get its answer.

        `out` None chooses `runs/<command>-<model>-<n>`. `request` is everything that decides the results:
        options, model and text with their hashes. Raises PerpendError where another run holds the folder,
        where it is finished (AlreadyFinished with `resume`), and where the request differs from the one
        being resumed.
        """
        asked = {"command": command, "perpend": perpend.__version__, **plain(dict(request))}
        lock: list[FolderLock] = []
        folder, created = distributed.main_first(lambda: _open_folder(out, command, asked, resume, lock))
        return cls(Path(folder), command, asked, lock[0] if lock else None, created)

    @staticmethod
    def open(folder: str | Path) -> FinishedRun:
        """A finished run, to read."""
        return FinishedRun(folder)

    @property
    def results(self) -> dict[str, Any]:
        return self.document.get("results", {})

    def step(self, name: str, compute: Callable[[], T]) -> T:
        """`compute()`, kept on the disk under `name`; a resumed run gets the kept value, bit for bit.

        Values: nested dicts, lists, tuples, numbers, strings, arrays, tensors, tables. With several
        processes a step belongs to the one that calls it (`perpend.distributed.map_blocks`); `compute`
        must not communicate.
        """
        path = self.folder / STEPS / step_file(name)
        if path.exists():
            try:
                value = unpack(path, name)
                self._stored += 1
                return value
            except ValueError as error:
                note(f"step {name!r} in {self.folder} is damaged ({error}); computing it again")
        content, value = pack(compute(), name)
        write_atomically(path, content)
        self._stored += 1
        return value

    def table(self, name: str, table: pd.DataFrame) -> None:
        """A tidy table, written as `<name>.csv` when the run finishes."""
        import pandas as pd

        if not isinstance(table, pd.DataFrame):
            raise InputError(f"the table {name!r} is a {type(table).__name__}, not a pandas DataFrame")
        self.tables[safe_name(name, "a table")] = table.reset_index(drop=True)

    def array(self, name: str, array: Any) -> None:
        """An array, written into `arrays.safetensors` when the run finishes."""
        value = array.detach().cpu().numpy() if is_tensor(array) else np.asarray(array)
        if value.dtype.kind not in "fiub":
            raise InputError(f"the array {name!r} has dtype {value.dtype}; give floats, integers or booleans")
        self.arrays[safe_name(name, "an array")] = np.array(value, order="C")

    def json(self, name: str, value: Any) -> None:
        """A JSON document, written as `<name>.json` when the run finishes; `name` may be in a folder."""
        if f"{name}.json" in (DOCUMENT, PARTIAL):
            raise InputError(f"{name}.json is the run's own; name the document otherwise")
        parts = [safe_name(part, "a document") for part in name.split("/")]
        self.documents["/".join(parts)] = plain(value)

    def finish(
        self,
        results: Mapping[str, Any],
        conventions: Mapping[str, Any],
        findings: Sequence[str],
        undefined: Mapping[str, Any] | Sequence[Any] | None = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Writes tables, arrays, the report and, last, run.json; returns what run.json holds.

        `undefined` names every result that has no value and why; further keywords become keys of run.json.
        With several processes only the main one writes.
        """
        self.document = plain(
            {
                "version": perpend.__version__,
                "command": self.command,
                "invocation": invocation(),
                "request": self.request,
                "conventions": conventions,
                "model": self.request.get("model"),
                "data": self.request.get("data"),
                "environment": environment(),
                "seeds": self.request.get("seeds", self.request.get("seed")),
                "results": results,
                "findings": list(findings),
                "undefined": undefined if undefined is not None else {},
                "seconds": round(time.time() - self._began, 3),
                "finished": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **more,
            }
        )
        distributed.main_first(self._write)
        return self.document

    def _write(self) -> None:
        for name, table in self.tables.items():
            write_atomically(self.folder / f"{name}.csv", table.to_csv(index=False))
        if self.arrays:
            from safetensors.numpy import save

            write_atomically(self.folder / ARRAYS, save(self.arrays))
        for name, document in self.documents.items():
            path = self.folder / f"{name}.json"
            with explained("create", path.parent):
                path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, to_json(document))
        names = [f"{name}.csv" for name in self.tables] + ([ARRAYS] if self.arrays else [])
        names += [f"{name}.json" for name in self.documents]
        self.document["files"] = {name: sha256_file(self.folder / name) for name in sorted(names)}
        report_error = self._report()
        write_atomically(self.folder / DOCUMENT, to_json(self.document))
        (self.folder / PARTIAL).unlink(missing_ok=True)
        shutil.rmtree(self.folder / STEPS, ignore_errors=True)
        if report_error is not None:
            raise PerpendError(
                f"the run in {self.folder} is complete, but its report could not be made "
                f"({type(report_error).__name__}: {report_error}); `perpend report {self.folder}` tries again"
            ) from report_error

    def _report(self) -> Exception | None:
        """Builds report.html; a figure that fails must not cost the results of a long run."""
        from perpend.report.page import build

        try:
            # From the files, not from memory: `perpend report` must find the same page later.
            page = build(FinishedRun(self.folder, self.document))
            write_atomically(self.folder / REPORT, page)
        except Exception as error:
            return error
        return None

    def __enter__(self) -> Run:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not (self.folder / DOCUMENT).exists():
            if distributed.is_main() and self._created and not any((self.folder / STEPS).iterdir()):
                # Nothing was computed: leave no half-run behind that a corrected command would stumble over.
                shutil.rmtree(self.folder, ignore_errors=True)
            else:
                error.resumable = self.folder  # type: ignore[attr-defined]
        if self._lock is not None:
            self._lock.release()


def _open_folder(
    out: str | Path | None, command: str, asked: dict[str, Any], resume: bool, lock: list[FolderLock]
) -> tuple[str, bool]:
    """The folder's path and whether it is new; appends the lock to `lock`, which stays in this process."""
    if out is None:
        folder, created = _latest(command, asked) if resume else _next(command, asked)
    else:
        if not str(out).strip():
            raise PerpendError("the folder has no name; give one, out=, or leave it out for runs/")
        folder = Path(out)
        created = not folder.exists()
        with explained("create", folder):
            folder.mkdir(parents=True, exist_ok=True)
    held = FolderLock(folder)
    try:
        _prepare(folder, asked, resume)
    except BaseException:
        held.release()
        if created:
            with suppress(OSError):
                folder.rmdir()
        raise
    lock.append(held)
    return str(folder), created


def _prepare(folder: Path, asked: dict[str, Any], resume: bool) -> None:
    """Refuses what must be refused, then leaves the folder with partial.json and an empty or kept steps/."""
    steps, partial = folder / STEPS, folder / PARTIAL
    if steps.is_symlink():
        raise PerpendError(
            f"{steps} is a link; a run writes inside its own folder only: choose another, out="
        )
    if (folder / DOCUMENT).exists():
        run = FinishedRun(folder)
        if not resume:
            raise PerpendError(f"{folder} holds a finished run; choose another folder, out=, or move it away")
        _same_request(folder, run.document.get("request"), asked)
        raise AlreadyFinished(run)
    if partial.exists():
        if not resume:
            raise PerpendError(
                f"{folder} holds an unfinished run; resume=True goes on, or choose another folder, out="
            )
        before = read_json(partial)
        _same_request(folder, before.get("request") if isinstance(before, dict) else None, asked)
        _warn_of_versions(before.get("environment"))
        kept = sum(not path.name.startswith(TEMPORARY) for path in steps.glob("*"))
        if kept:
            note(f"resuming {folder}; parts stored already, which are not computed again: {kept}")
    elif resume:
        raise PerpendError(f"{folder} holds no unfinished run to resume; leave resume=True out to start one")
    elif steps.exists():
        raise PerpendError(
            f"{folder} holds steps of a run without its partial.json; choose another folder, out="
        )
    for left in [*folder.glob(f"{TEMPORARY}*"), *steps.glob(f"{TEMPORARY}*")]:
        left.unlink(missing_ok=True)
    with explained("create", steps):
        steps.mkdir(exist_ok=True)
    if not partial.exists():
        write_atomically(partial, to_json({"request": asked, "environment": environment()}))


def _same_request(folder: Path, before: Any, asked: dict[str, Any]) -> None:
    if not isinstance(before, dict):
        raise PerpendError(f"{folder} does not say what its run was asked for; choose another folder, out=")
    differ = [f"{name}: it has {old}, you ask for {new}" for name, old, new in differences(before, asked)]
    if differ:
        raise PerpendError(
            f"{folder} was started with another request, so it cannot be resumed with this one. "
            + "; ".join(differ)
            + ". Repeat the first request, or choose another folder, out="
        )


def differences(before: Any, after: Any, name: str = "") -> list[tuple[str, str, str]]:
    """Where two requests differ: (dotted name, before, after), the values shortened for a message."""
    if isinstance(before, dict) and isinstance(after, dict):
        keys = [*before, *(key for key in after if key not in before)]
        return [
            found
            for key in keys
            for found in differences(
                before.get(key, "nothing"), after.get(key, "nothing"), f"{name}.{key}" if name else str(key)
            )
        ]
    if before == after and type(before) is type(after):
        return []
    return [(name, _shorten(before), _shorten(after))]


def _shorten(value: Any) -> str:
    text = value if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _warn_of_versions(before: Any) -> None:
    now = environment()
    changed = [
        f"{name} {old} -> {now[name]}"
        for name, old in (before or {}).items()
        if name in ("torch", "transformers", "numpy", "processor") and now.get(name) != old
    ]
    if changed:
        note(f"resuming on another setup ({', '.join(changed)}): last digits may differ from an unbroken run")


def _next(command: str, asked: dict[str, Any]) -> tuple[Path, bool]:
    """A new folder runs/<command>-<model>-<n>, n the first free number."""
    base = Path(BASE)
    with explained("create", base):
        base.mkdir(exist_ok=True)
    number = 1
    while True:
        folder = base / f"{_stem(command, asked)}-{number}"
        try:
            with explained("create", folder):
                folder.mkdir()
            return folder, True
        except PerpendError as error:
            if not isinstance(error.__cause__, FileExistsError):
                raise
            number += 1


def _latest(command: str, asked: dict[str, Any]) -> tuple[Path, bool]:
    """The newest unfinished run of this request under runs/."""
    stem = _stem(command, asked)
    found = [
        path.parent
        for path in Path(BASE).glob(f"*/{PARTIAL}")
        if path.parent.name.rpartition("-")[0] == stem and not (path.parent / DOCUMENT).exists()
    ]
    if not found:
        raise PerpendError(f"no unfinished run {BASE}/{stem}-* to resume; name its folder, out=")
    same = [folder for folder in found if not differences(_request_of(folder), asked)]
    return max(same or found, key=lambda folder: (folder / PARTIAL).stat().st_mtime), False


def _request_of(folder: Path) -> Any:
    with suppress(PerpendError):
        document = read_json(folder / PARTIAL)
        return document.get("request") if isinstance(document, dict) else None
    return None


def telling(name: str, with_step: bool = True) -> str:
    """The last part of a model's name or path that tells it from others.

    What every training calls its checkpoints (final, step-5000, checkpoint-100, snapshots, a hash of the
    hub's cache) tells nothing: runs/tr/models/residual-0/final is residual-0. A step stays behind the name,
    unless the run is of many steps.
    """
    parts = [part for part in Path(name).parts if part not in (".", "..", "/")] or [name]
    kept = [part for part in parts if not _GENERIC.fullmatch(part)]
    if _GENERIC.fullmatch(parts[-1]) is None or not kept:
        return parts[-1]
    numbered = len(parts[-1]) < 40 and any(sign.isdigit() for sign in parts[-1])
    return f"{kept[-1]}-{parts[-1]}" if numbered and with_step else kept[-1]


def _stem(command: str, asked: dict[str, Any]) -> str:
    model = asked.get("model")
    name = model.get("name") if isinstance(model, dict) else model
    short = (
        re.sub(r"[^A-Za-z0-9_.-]+", "-", telling(str(name), "checkpoints" not in asked)).strip("-.")
        if name
        else ""
    )
    return f"{command}-{short[:60]}" if short else command
