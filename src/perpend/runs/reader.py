"""A finished run folder, read: its document at once, its tables and arrays when asked for."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perpend.errors import PerpendError, unknown_name
from perpend.runs.files import explained, read_json, sha256_file

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd

_AGAIN = "run it again into another folder, out="
SHOWN = 20  # runs that a folder of runs is said to hold
DOCUMENT, ARRAYS, REPORT = "run.json", "arrays.safetensors", "report.html"


class FinishedRun:
    """What `perpend <command>` left: `.document` (run.json), `.results`, `.tables[name]`, `.arrays[name]`."""

    def __init__(self, folder: str | Path, document: Any = None) -> None:
        self.folder = Path(folder)
        path = self.folder / DOCUMENT
        if document is None:
            if not path.is_file():
                raise PerpendError(_why_not(self.folder))
            document = read_json(path)
        if not isinstance(document, dict) or not isinstance(document.get("command"), str):
            raise PerpendError(f"{path} is not a perpend run: it has no 'command'")
        if not isinstance(document.get("results"), dict):
            raise PerpendError(f"{path} is not a perpend run: it has no 'results'")
        self.document: dict[str, Any] = document
        self.command: str = document["command"]
        self.request: dict[str, Any] = document.get("request") or {}

    @property
    def results(self) -> dict[str, Any]:
        return self.document["results"]

    @functools.cached_property
    def tables(self) -> Mapping[str, pd.DataFrame]:
        return _Lazy("table", self._names(".csv"), self._table)

    @functools.cached_property
    def arrays(self) -> Mapping[str, np.ndarray]:
        """Every array; the whole file is checked on first use."""
        path = self.folder / ARRAYS
        if not path.exists() and ARRAYS not in self._files():
            return {}
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        self._check(ARRAYS)
        try:
            with explained("read", path):
                return load_file(path)
        except (SafetensorError, KeyError, ValueError) as error:
            raise PerpendError(
                f"{path} is damaged ({error}); run it again into another folder, out="
            ) from error

    def _files(self) -> dict[str, str]:
        files = self.document.get("files")
        return files if isinstance(files, dict) else {}

    def _names(self, ending: str) -> list[str]:
        """The run's own tables, from run.json, never by listing what else lies in the folder."""
        names = [name for name in self._files() if name.endswith(ending) and Path(name).name == name]
        return [name.removesuffix(ending) for name in names]

    def _table(self, name: str) -> pd.DataFrame:
        import pandas as pd

        path = self.folder / f"{name}.csv"
        self._check(path.name)
        try:
            with explained("read", path):
                return pd.read_csv(path, **_exactly(pd))
        except pd.errors.EmptyDataError:
            return pd.DataFrame()
        except ValueError as error:
            raise PerpendError(
                f"{path} is damaged ({error}); run it again into another folder, out="
            ) from error

    def _check(self, name: str) -> None:
        path, expected = self.folder / name, self._files().get(name)
        if not path.is_file():
            raise PerpendError(f"{path} is missing, though run.json lists it")
        if expected is not None:
            with explained("read", path):
                found = sha256_file(path)
            if found != expected:
                raise PerpendError(
                    f"{path} is damaged or was changed (its checksum is not the one in run.json); "
                    f"the other files are untouched: {_AGAIN}"
                )


class _Lazy(Mapping[str, Any]):
    """A mapping that reads an entry on first use, and names the known ones for an unknown key."""

    def __init__(self, kind: str, names: list[str], read: Any) -> None:
        self._kind, self._names, self._read = kind, names, functools.lru_cache(None)(read)

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise _Missing(str(unknown_name(self._kind, name, self._names)))
        return self._read(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class _Missing(PerpendError, KeyError):
    """A KeyError, so that `.get` and `in` work, whose message reads as a sentence."""

    __str__ = Exception.__str__


def _exactly(pd: Any) -> dict[str, Any]:
    """Floats as they were written; pandas 3.1 does so by itself and deprecates being asked."""
    release = tuple(int(part) for part in pd.__version__.split(".")[:2])
    return {} if release >= (3, 1) else {"float_precision": "round_trip"}


def _why_not(folder: Path) -> str:
    if not folder.is_dir():
        return f"no run folder at {folder}"
    if (folder / "partial.json").exists():
        return f"{folder} holds a run that is not finished: repeat it with resume=True"
    inside = sorted(path.parent for path in folder.glob(f"*/{DOCUMENT}"))
    if inside:
        some = ", ".join(map(str, inside[:SHOWN])) + (", ..." if len(inside) > SHOWN else "")
        plural = "s" if len(inside) > 1 else ""
        return f"{folder} is no run folder but holds {len(inside)} run{plural}: {some}; name one, or several"
    return f"{folder} is no run folder: it has no {DOCUMENT}"
