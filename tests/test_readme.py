"""The README: its example is a stored run's, its table has every verb once, its Python runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import perpend
import tiny
from perpend import cli

REPO = Path(__file__).resolve().parent.parent
README = (REPO / "README.md").read_text(encoding="utf-8")


def script(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], capture_output=True, text=True, check=False)


def test_the_example_and_its_figure_are_a_stored_runs() -> None:
    done = script(str(REPO / "scripts" / "readme.py"), "--check")
    assert done.returncode == 0, done.stderr
    run = json.loads((REPO / "docs" / "runs" / "attention-smollm2.json").read_text(encoding="utf-8"))
    words = " ".join(README.split())
    assert run["findings"]
    assert [one for one in run["findings"] if one not in words] == []


def test_a_changed_number_is_noticed(tmp_path: Path) -> None:
    for name in ("README.md", "scripts/readme.py", "scripts/profile_svg.py", "docs/entropy-smollm2.svg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((REPO / name).read_bytes())
    run = json.loads((REPO / "docs" / "runs" / "attention-smollm2.json").read_text(encoding="utf-8"))
    stored = tmp_path / "docs" / "runs" / "attention-smollm2.json"
    stored.parent.mkdir()
    stored.write_text(json.dumps(run), encoding="utf-8")
    check = [str(tmp_path / "scripts" / "readme.py"), "--check"]
    assert script(*check).returncode == 0
    run["results"]["entropy"]["per_layer"][12]["total"] += 0.5
    stored.write_text(json.dumps(run), encoding="utf-8")
    done = script(*check)
    assert done.returncode == 1
    assert "run python scripts/readme.py" in done.stderr


def test_the_example_is_of_the_defaults_but_for_the_text() -> None:
    request = json.loads((REPO / "docs" / "runs" / "attention-smollm2.json").read_text("utf-8"))["request"]
    command = cli.verbs.get_command(None, "attention")
    assert command is not None
    defaults = {param.name: param.default for param in command.params}
    asked = {**request, **request["data"]}
    for name in ("batch", "sink", "triples", "bootstrap", "sequences", "length"):
        assert asked[name] == defaults[name], name
    assert ",".join(map(str, request["seeds"])) == defaults["seeds"]
    assert request["model"]["name"] == "smollm2-135m-instruct"


def test_every_verb_is_listed_once() -> None:
    rows = re.findall(r"^\| \[`perpend ([a-z-]+)", README, re.MULTILINE)
    assert sorted(rows) == sorted(cli.verbs.list_commands(None))


def test_every_page_is_named() -> None:
    pages = {path.relative_to(REPO).as_posix() for path in (REPO / "docs").rglob("*.md")}
    named = {target.partition("#")[0] for target in re.findall(r"\]\((docs/[^)]+)\)", README)}
    assert pages - named == set()


def test_the_guide_to_python_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (REPO / "docs" / "python.md").read_text(encoding="utf-8")
    code = re.findall(r"<!-- runs -->\n```python\n(.*?)```", page, re.DOTALL)
    assert len(code) == page.count("```python") == 4
    folder = tiny.save_llama(tmp_path / "model", num_hidden_layers=3, intermediate_size=64)
    load = perpend.load
    monkeypatch.setattr(perpend, "load", lambda: load(str(folder)), raising=False)
    names: dict[str, Any] = {}
    exec(compile("\n".join(code), "python.md", "exec"), names)
    assert names["own"].name == "mine"
    assert "low" in names["study"].results["reversal"]["cosine"], "the example has intervals"
    assert names["made"].facts
    for name in re.findall(r"^\| `perpend\.(\w+)", page, re.MULTILINE):
        assert hasattr(perpend, name), name


def test_the_python_runs_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(r"## From Python\n\n```python\n(.*?)```", README, re.DOTALL)
    assert code is not None
    folder = tiny.save_llama(
        tmp_path / "model", num_hidden_layers=4, hidden_size=48, num_attention_heads=6, num_key_value_heads=3
    )
    load = perpend.load
    monkeypatch.setattr(perpend, "load", lambda: load(str(folder)), raising=False)
    shorter = code.group(1).replace("length=192).take(64,", "length=96).take(4,")
    assert shorter != code.group(1)
    names: dict[str, Any] = {}
    exec(compile(shorter, "README.md", "exec"), names)
    assert names["survey"].signatures.shape[:2] == (4, 6)
    assert torch.as_tensor(names["heads"]).shape[0] == 24
