"""Answers on stdout: tables for people, or exactly one JSON document with `--json`.

With `--json` everything else that prints (a library's greeting, say) is sent to stderr, so that stdout can be
piped into another program as it is.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from typing import TYPE_CHECKING, Any

from perpend import distributed, rounding

if TYPE_CHECKING:
    import pandas as pd
    from rich.console import Console

_json = False
_document: Any = None


@contextmanager
def as_json(wanted: bool) -> Iterator[None]:
    """Inside, `answer` keeps its document; it is printed, alone, on leaving without an error."""
    global _json, _document
    _json, _document = wanted, None
    try:
        with redirect_stdout(sys.stderr if wanted else sys.stdout):
            yield
        document = _document
    finally:
        _json, _document = False, None
    if wanted and document is not None:
        print_json(document)


def answer(document: Mapping[str, Any], *parts: Any) -> None:
    """The command's one answer: `document` with `--json`, else `parts` (tables and lines) for people.

    A pandas DataFrame among the parts is shown as a table; a pair (title, DataFrame) as a table with a title.
    """
    global _document
    if not distributed.is_main():
        return
    if _json:
        if _document is not None:
            raise RuntimeError("a command answers once")
        _document = document
        return
    console = terminal()
    for part in parts:
        if hasattr(part, "columns") and hasattr(part, "itertuples"):
            console.print(table(part))
        elif isinstance(part, tuple):
            console.print(table(part[1], part[0]))
        elif isinstance(part, str):
            console.print(part, markup=False, highlight=False)
        else:
            console.print(part)


def print_json(document: Any) -> None:
    """One document, one line end, no NaN."""
    from perpend.runs.files import to_json

    sys.stdout.write(to_json(document))
    sys.stdout.flush()


def print_error(message: str, **more: Any) -> None:
    """The error as the one JSON document; needs nothing but the standard library."""
    print(json.dumps({"error": message, **more}, ensure_ascii=False), flush=True)


def terminal() -> Console:
    """A console on stdout; piped, it is wide enough that no table is cut."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() else 200)


def table(frame: pd.DataFrame, title: str | None = None, digits: int = rounding.LEAST) -> Any:
    """A rich table: numbers to the right at `digits` significant digits, gaps as a dash."""
    from rich.table import Table
    from rich.text import Text

    out = Table(title=Text(title) if title else None, title_justify="left", header_style="bold", box=_box())
    for name, kind in frame.dtypes.items():
        out.add_column(Text(str(name).replace("_", " ")), justify="right" if kind.kind in "fiu" else "left")
    enough = [rounding.digits(frame.iloc[:, i], digits) for i in range(frame.shape[1])]
    for row in frame.itertuples(index=False):
        out.add_row(*(Text(rounding.cell(value, each)) for value, each in zip(row, enough)))
    return out


def lines(title: str, items: Sequence[str]) -> str:
    """A titled list of sentences."""
    return "\n".join([title, *(f"  · {item}" for item in items)])


def _box() -> Any:
    from rich import box

    return box.SIMPLE_HEAD
