"""Random input to run folders, stored steps and the command line: an error that says so, or a right answer.

Each test tries PERPEND_FUZZ cases (300 unless set); 100,000 take a quarter of an hour.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shlex
from pathlib import Path
from typing import Any

import click
import numpy as np
import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perpend import cli
from perpend.errors import PerpendError
from perpend.runs import Run, plain, to_json
from perpend.runs.values import pack, unpack

CASES = int(os.environ.get("PERPEND_FUZZ", "300"))
many = settings(
    max_examples=CASES, deadline=None, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz") / "r"
    with Run.start(folder, command="mine", request={"model": {"name": "m"}, "seeds": [0]}) as run:
        run.table(
            "layers",
            pd.DataFrame({"layer": range(4), "mass": [0.1, 0.2, np.nan, 1 / 3], "name": list("abcd")}),
        )
        run.array("signatures", np.arange(6.0).reshape(2, 3))
        run.finish({"sink": {"mass": 0.5}}, {"window": 64}, ["half"])
    return folder


@st.composite
def damage(draw: st.DrawFn) -> tuple[str, float, bytes]:
    """Cut, overwrite or insert at a place (a share of the length) with some bytes."""
    kind = draw(st.sampled_from(["cut", "overwrite", "insert"]))
    return kind, draw(st.floats(0, 1)), draw(st.binary(min_size=1, max_size=12))


def damaged(data: bytes, how: tuple[str, float, bytes]) -> bytes:
    kind, place, content = how
    at = int(place * len(data))
    if kind == "cut":
        return data[:at]
    return data[:at] + content + data[at + (len(content) if kind == "overwrite" else 0) :]


@many
@given(name=st.sampled_from(["run.json", "layers.csv", "arrays.safetensors"]), how=damage())
def test_a_damaged_folder_is_refused_or_read_right(
    folder: Path, name: str, how: tuple[str, float, bytes]
) -> None:
    path = folder / name
    whole = path.read_bytes()
    path.write_bytes(damaged(whole, how))
    try:
        run = Run.open(folder)
        table, array = run.tables["layers"], run.arrays["signatures"]
        assert isinstance(run.results, dict)
        assert len(table) == 4
        assert array.sum() == 15
    except PerpendError as error:
        told = str(error)
    else:
        told = name
    finally:
        path.write_bytes(whole)
    assert name in told or "table" in told


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
KEYS = st.sampled_from(["command", "results", "files", "request", "layers.csv", "../../etc/passwd.csv", "x"])


def nested(leaves: st.SearchStrategy[Any], keys: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Lists and dictionaries of leaves, some levels deep."""

    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        return st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=5)

    return st.recursive(leaves, deeper, max_leaves=12)


@many
@given(content=nested(LEAVES, KEYS))
def test_any_json_as_a_document_is_a_run_or_refused(folder: Path, content: Any) -> None:
    path = folder / "run.json"
    whole = path.read_bytes()
    path.write_text(json.dumps(content), encoding="utf-8")
    try:
        run = Run.open(folder)
        assert all("/" not in name for name in run.tables)
        for name in run.tables:
            _ = run.tables[name]
        _ = dict(run.arrays)
    except PerpendError:
        pass  # refused, with a message
    finally:
        path.write_bytes(whole)


VALUE = {"sums": np.arange(12.0).reshape(3, 4), "count": 32, "names": ["a", "b"], "nested": {"x": (1, None)}}


@many
@given(how=damage())
def test_a_damaged_step_is_noticed(
    tmp_path_factory: pytest.TempPathFactory, how: tuple[str, float, bytes]
) -> None:
    whole, _ = pack(VALUE, "block-0")
    path = tmp_path_factory.getbasetemp() / "step.safetensors"
    path.write_bytes(damaged(whole, how))
    try:
        value = unpack(path, "block-0")
    except ValueError:
        return
    np.testing.assert_array_equal(value.pop("sums"), VALUE["sums"])
    assert value == {key: item for key, item in VALUE.items() if key != "sums"}


@many
@given(
    value=nested(
        LEAVES | st.floats(width=32).map(np.float32) | st.integers(-(2**63), 2**63 - 1).map(np.int64),
        st.text(max_size=4) | st.integers(),
    )
)
def test_json_is_strict_and_keeps_what_it_can_hold(value: Any) -> None:
    text = to_json(value)
    back = json.loads(text, parse_constant=lambda constant: pytest.fail(f"{constant} in JSON"))
    assert back == plain(value)


@many
@given(value=nested(LEAVES | st.tuples(LEAVES, LEAVES), st.text(max_size=4)))
def test_any_plain_step_comes_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "plain.safetensors"
    content, at_once = pack(value, "n")
    path.write_bytes(content)
    for back in (at_once, unpack(path, "n")):
        assert repr(back) == repr(value)  # repr tells NaN, -0.0, 1 and True apart


VERBS = cli.verbs.list_commands(None)
WORDS = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.text(max_size=10),
    st.sampled_from(
        ["0,1,2", "0-3", "-1", "1e9", "nan", "first:4", "first:-1", "auto", "cls", "float16", "--", ""]
    ),
)


@pytest.mark.parametrize("word", ["nan", "NAN", "inf", "-inf", "1e999", "0.1,nan", "inf,2"])
@pytest.mark.parametrize("name", VERBS)
def test_every_number_of_a_command_line_is_finite(name: str, word: str) -> None:
    command = cli.verbs.get_command(None, name)
    for param in command.params:
        with contextlib.suppress(click.ClickException, click.exceptions.Exit):
            context = command.make_context(name, [param.opts[0], word])
            assert _not_finite(context) == {}, f"{param.opts[0]} {word}"


def _not_finite(context: click.Context) -> dict[str, Any]:
    """The options whose value is a number that is none, or holds one."""
    values = {key: value if isinstance(value, tuple) else (value,) for key, value in context.params.items()}
    wrong = {
        key: [n for n in v if isinstance(n, float) and not math.isfinite(n)] for key, v in values.items()
    }
    return {key: numbers for key, numbers in wrong.items() if numbers}


@many
@given(data=st.data())
def test_any_words_after_a_verb_are_parsed_or_refused(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(VERBS))
    command = cli.verbs.get_command(None, name)
    assert command is not None
    options = [option for param in command.params for option in param.opts if option.startswith("-")]
    words: list[str] = []
    for _ in range(data.draw(st.integers(0, 4))):
        option = data.draw(st.sampled_from(options))
        words += [option, data.draw(WORDS)] if data.draw(st.booleans()) else [option]
    words += data.draw(st.lists(WORDS, max_size=2))
    try:
        context = command.make_context(name, list(words))
    except (click.ClickException, click.exceptions.Exit):
        return
    assert _not_finite(context) == {}, shlex.join(words)
