"""The notebooks in the docs: they run, and what is shown is what the sources say."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).resolve().parent.parent
SOURCES = sorted((REPO / "docs" / "notebooks").glob("*.py"))

_spec = importlib.util.spec_from_file_location("notebooks", REPO / "scripts" / "notebooks.py")
assert _spec is not None
assert _spec.loader is not None
notebooks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(notebooks)


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_is_of_its_source_and_shows_something(source: Path) -> None:
    stored = json.loads(source.with_suffix(".ipynb").read_text(encoding="utf-8"))
    cells = [(cell["cell_type"], "".join(cell["source"])) for cell in stored["cells"]]
    assert cells == notebooks.cells(source.read_text(encoding="utf-8")), "run python scripts/notebooks.py"
    kinds = {
        kind for cell in stored["cells"] for out in cell.get("outputs", []) for kind in out.get("data", {})
    }
    assert "image/png" in kinds
    assert source.with_suffix(".ipynb").stat().st_size < 1_000_000


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.stem)
def test_the_notebook_runs(source: Path, tmp_path: Path) -> None:
    """In a process of its own, as a reader runs it, with warnings of perpend as errors."""
    words = [sys.executable, "-W", "error::RuntimeWarning:perpend", source]
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    assert not list(tmp_path.iterdir())  # nothing left in the reader's folder


def test_a_cell_shows_its_last_expression_and_what_it_prints() -> None:
    names: dict[str, object] = {}
    assert notebooks.execute("x = 2", names) == []
    printed, shown = notebooks.execute("print('a')\nx + 1", names)
    assert printed["text"] == ["a\n"]
    assert shown["data"] == {"text/plain": ["3"]}
    with pytest.raises(ZeroDivisionError):
        notebooks.execute("1 / 0", names)


def test_cells_are_read_as_editors_read_them() -> None:
    source = "# %% [markdown]\n# # Title\n# text\n\n# %%\nx = 1\n\n# %%\nx\n"
    assert notebooks.cells(source) == [("markdown", "# Title\ntext"), ("code", "x = 1"), ("code", "x")]
