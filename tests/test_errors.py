"""Errors that name the remedy: which names are near, and parameters as Python or a command line has them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import perpend
from perpend import cli
from perpend.errors import PerpendError, near_names, unknown_name
from perpend.options import as_flags
from perpend.runs import Run

# what speaks to a command line alone, beside the verbs
COMMAND_LINE = ("options.py", "cli.py", "refuse.py", "job.py", "evaluation/options.py", "papers/making.py")


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("js", ["cosine", "jensen_shannon"], ["jensen_shannon"]),
        ("jensen_shannon", ["content_l1", "js", "js_l1"], ["js"]),
        ("smollm2", ["olmo2-1b", "smollm2-135m", "smollm2-1.7b"], ["smollm2-135m", "smollm2-1.7b"]),
        ("cosin", ["cosine", "content"], ["cosine"]),
        ("xyz", ["cosine"], []),
    ],
)
def test_near_names_are_short_forms_then_beginnings_then_spelling(
    name: str, known: list[str], near: list[str]
) -> None:
    assert near_names(name, known)[: len(near)] == near
    assert bool(near_names(name, known)) == bool(near)


def test_names_that_hold_commas_can_be_told_apart() -> None:
    told = str(unknown_name("check", "bits", ["observing changes no bit", "rows, gathered"]))
    assert told.endswith("known: 'observing changes no bit', 'rows, gathered'")
    assert str(unknown_name("metric", "x", ["a", "b"])).endswith("known: a, b")


def test_the_library_names_parameters_and_never_options_of_the_command_line() -> None:
    source = Path(perpend.__file__).parent
    told = []
    for file in source.rglob("*.py"):
        own = file.relative_to(source).as_posix()
        if own.startswith("commands/") or own in COMMAND_LINE:
            continue
        for node in ast.walk(ast.parse(file.read_bytes())):
            for part in ast.walk(node) if isinstance(node, ast.Raise) else ():
                if isinstance(part, ast.Constant) and re.search(r"(?<![\w-])--[a-z]", str(part.value)):
                    told.append(f"{own}:{part.lineno} {part.value}")
    assert told == []


@pytest.mark.parametrize(
    ("message", "told"),
    [
        ("try dtype=float32, or another device=", "try --dtype float32, or another --device"),
        ("pass trust_remote_code=True, only if", "pass --trust-remote-code, only if"),
        ("another folder, out=; resume=True goes on", "another folder, --out; --resume goes on"),
        ("max_memory limits what device='auto' may use", "max_memory limits what --device auto may use"),
        ("sink=first, attn_implementation='sdpa'", "--sink first, attn_implementation='sdpa'"),
        ("no file runs/out=3/x, rtn:dtype=4,dtype=5", "no file runs/out=3/x, rtn:dtype=4,dtype=5"),
        ("it was trust_remote_code=False", "it was trust_remote_code=False"),
        ("call f(..., windows=(3, 6), queries=[1, 2])", "call f(..., windows=(3, 6), queries=[1, 2])"),
    ],
)  # fmt: skip
def test_the_command_line_tells_them_as_its_options(message: str, told: str) -> None:
    from perpend.commands.attention import command

    assert as_flags(message, command.params) == told


def test_a_verb_that_fails_names_its_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "partial.json").write_text('{"request": {}}')
    words = ["simulate", "--samples", "200", "--quiet", "--out", str(tmp_path)]
    assert cli.run(words) == 2
    assert "unfinished run; --resume goes on, or choose another folder, --out" in capsys.readouterr().err
    with pytest.raises(
        PerpendError, match="unfinished run; resume=True goes on, or choose another folder, out="
    ):
        Run.start(str(tmp_path), command="simulate", request={})
