"""A slip in the words of a command is told before torch and transformers are imported."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from perpend import cli
from perpend.compression import methods
from perpend.errors import InputError
from perpend.models.checks import CHECKS
from perpend.refuse import declared

SLIPS = {
    "attention smolm2": "smollm2",
    "attention no/such/folder": "no folder",
    "attention model.gguf": "no GGUF file",
    "attention --text nosuch.txt": "nosuch.txt",
    "attention --text wikitext3": "did you mean 'wikitext",
    "attention --sink frist": "unknown sink rule 'frist'",
    "attention --window 300": "sequences of 192 tokens; use longer sequences, --length",
    "attention --windows 32,256": "a window of 256 keys",
    "prune --length 96 --window 97": "a window of 97 keys",
    "attention --images nowhere": "no folder of images",
    "updates --revision main": "is not read from a hub",
    "compress --method awk": "did you mean 'awq'",
    "compress --calibration nosuch.txt": "nosuch.txt",
    "compress --device mps": "float64, which mps has not; use --device cpu",
    "prune --criterion nonsense": "content_l1",
    "prune --held-out nosuch.txt": "nosuch.txt",
    "prune --heads none.json": "none.json",
    "edit --edit none.json": "none.json",
    "scale gpt2": "at least two",
    "scale smolm2 smolm3": "smollm2",
    "checkpoints pythia-16m": "pythia-160m",
    "compare no/base/it no/other/it": "no folder no/base",
    "taxonomy no/such/it": "no folder no/such",
    "evaluate": "nothing to score",
    "evaluate --tasks piqa --tasks-data nowhere": "nowhere is not a folder",
    "verify --only bits": "unknown check 'bits'",
    "audit runs/nothing": "no run folder",
    "train --text nosuch.txt": "nosuch.txt",
}
ASK = """
import contextlib, io, json, sys
from perpend import cli
told = {}
for words in json.load(sys.stdin):
    with contextlib.redirect_stderr(io.StringIO()) as err:
        code = cli.run(words.split())
    heavy = [name for name in ("torch", "transformers", "pandas") if name in sys.modules]
    told[words] = [code, " ".join(err.getvalue().split()), heavy]
json.dump(told, sys.stdout)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    done = subprocess.run(
        [sys.executable, "-c", ASK],
        input=json.dumps(list(SLIPS)), capture_output=True, text=True, check=True, timeout=120,
        cwd=tmp_path_factory.mktemp("slips"), env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )  # fmt: skip
    return json.loads(done.stdout)


@pytest.mark.parametrize("words", SLIPS)
def test_a_slip_is_told_before_anything_heavy_is_imported(words: str, told: dict[str, list]) -> None:
    code, said, heavy = told[words]
    assert code == 2, said
    assert SLIPS[words] in said
    assert heavy == []


def test_what_is_read_from_the_files_is_what_there_is() -> None:
    assert declared("perpend.compression", "Method") == set(methods())
    assert declared("perpend.models.checks", "check") == {check.title for check in CHECKS}


def test_a_name_that_is_computed_makes_the_list_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "methods_of_mine.py").write_text("A = Method('a')\nB = Method('b' + 'c')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert declared("methods_of_mine", "Method") is None


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("evaluate --tasks boolq", "the data of boolq are on the model hub"),
        ("edit --tasks lambada,boolq --tasks-data {}", "the data of boolq are on the model hub"),
        ("train --size tiny --tasks boolq", "pass --tasks-data DIR with local files"),
        ("compress --tasks bolq", "did you mean 'boolq'"),
        ("evaluate --tasks piqa --tasks-data {} --tasks-shots 2", "or pass --tasks-shots 0"),
    ],
)
def test_tasks_without_data_are_refused_before_a_model_is_loaded(
    words: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("lm_eval", reason="without the harness the names themselves are refused")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("perpend.models.load.load", lambda *a, **b: pytest.fail("a model was loaded"))
    for name in ("lambada_openai_test", "piqa_validation"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one two three"}\n')
    assert cli.run(words.format(tmp_path).split()) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_tasks_whose_data_are_in_a_cache_are_the_harness_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lm_eval")
    from perpend.evaluation.suite import check

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    with pytest.raises(InputError, match=r"the data of boolq are on the model hub.*pass data=FOLDER"):
        check("boolq")
    from perpend.evaluation.harness import index

    [folder] = index()["boolq"]
    named = re.search(r"dataset_path: (\S+)", (folder / "default.yaml").read_text()).group(1)
    (tmp_path / named.replace("/", "___")).mkdir()
    check("boolq")
