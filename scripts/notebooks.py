"""Executes docs/notebooks/*.py cell by cell and writes the notebooks beside them.

    python scripts/notebooks.py              # all
    python scripts/notebooks.py attention    # one

A source is a script with cells (`# %%`, `# %% [markdown]`), as editors know them, and runs as it is. Jupyter
is not needed: the last expression of a cell is shown by its notebook form, as a kernel would show it.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import sys
import warnings
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "notebooks"
KINDS = ("image/png", "text/html", "text/plain")  # what every viewer shows; live charts need their own data


def cells(source: str) -> list[tuple[str, str]]:
    """(kind, text) of every cell, kind "code" or "markdown"."""
    found = []
    for part in re.split(r"^# %%", source, flags=re.MULTILINE)[1:]:
        head, _, body = part.partition("\n")
        if "markdown" in head:
            found.append(("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
        else:
            found.append(("code", body.strip()))
    return found


def execute(code: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs one cell in `names`; its outputs in the notebook format."""
    tree = ast.parse(code)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed, value = io.StringIO(), None
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)
        if last is not None:
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": _lines(printed.getvalue())})
    if value is not None:
        outputs.append({"output_type": "display_data", "metadata": {}, "data": shown(value)})
    return outputs


def shown(value: Any) -> dict[str, Any]:
    """The forms of a value that are stored."""
    forms: dict[str, Any] = {"text/plain": repr(value)}
    if hasattr(value, "_repr_html_"):
        forms["text/html"] = value._repr_html_()
    if hasattr(value, "_repr_mimebundle_"):
        bundle = value._repr_mimebundle_()
        forms |= bundle[0] if isinstance(bundle, tuple) else bundle
    kept = {kind: forms[kind] for kind in KINDS if forms.get(kind)}
    if "image/png" in kept:
        kept.pop("text/html", None)  # a live chart fetches its code; the picture needs nothing
    return {kind: text if kind == "image/png" else _lines(text) for kind, text in kept.items()}


def notebook(source: Path) -> dict[str, Any]:
    """The executed notebook of one source."""
    names: dict[str, Any] = {"__name__": "__main__"}
    out = []
    for number, (kind, text) in enumerate(cells(source.read_text(encoding="utf-8"))):
        cell: dict[str, Any] = {"cell_type": kind, "id": f"{source.stem}-{number}", "metadata": {}}
        cell["source"] = _lines(text)
        if kind == "code":
            cell |= {"execution_count": None, "outputs": execute(text, names)}
        out.append(cell)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    meta = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": out, "metadata": meta, "nbformat": 4, "nbformat_minor": 5}


def _lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def main(chosen: list[str]) -> int:
    warnings.simplefilter("ignore")
    for source in sorted(FOLDER.glob("*.py")):
        if not chosen or source.stem in chosen:
            text = json.dumps(notebook(source), indent=1, ensure_ascii=False) + "\n"
            source.with_suffix(".ipynb").write_text(text, encoding="utf-8")
            print(source.with_suffix(".ipynb"), file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
