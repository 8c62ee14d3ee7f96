"""Verbs on a model of which most is left on the disk: the numbers, and what is saved, are those in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiny
from perpend import cli
from perpend.runs import Run
from verbs import laid_out, numbers

AUTO = ["--device", "auto", "--max-memory", "cpu=90KB"]  # the model has 159 KB
CUT = ["--length", "20", "--sequences", "4"]
SMALL = {
    "attention": ["--window", "8", "--triples", "50", "--seed", "0"],
    "edit": ["--site", "value.full", "--site", "residual.mlp", "--parallel", "0"],
    "evaluate": ["--perplexity", "fixed", "--perplexity", "token"],
    "prune": ["--window", "8", "--seed", "0", "--context", "20", "--tokens", "80", "--sparsity", "0.2",
              "--no-weights", "--save", "pruned"],
    "updates": ["--seed", "0", "--generate", "0", "--evaluate", "--drop", "1", "--eval-sequences", "2",
                "--save", "dropped"],
    "compress": ["--method", "awq:group=16,grid=2", "--calibration-sequences", "2",
                 "--calibration-length", "20", "--save", "awq"],
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return laid_out(tmp_path_factory.mktemp("spread"))


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    assert cli.run([*words, "--out", "run"]) == 0, capsys.readouterr().err
    told = capsys.readouterr().err
    assert ("on cpu, disk" in told) == ("auto" in words), told
    return dict(numbers(Run.open("run").results))


@pytest.mark.slow
@pytest.mark.parametrize("verb", [*SMALL, "compare"])
def test_numbers_and_saved_models_are_those_in_memory(
    verb: str,
    folder: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = str(folder / "model")
    if verb == "compare":
        tiny.save_llama(folder / "other", seed=1)
    words = [verb, model, *([str(folder / "other")] if verb == "compare" else SMALL[verb])]
    words += ["--text", str(folder / "text.txt"), *CUT]
    found, saved = [], []
    for place in (["--device", "cpu"], AUTO):
        (tmp_path / place[1]).mkdir()
        monkeypatch.chdir(tmp_path / place[1])
        found.append(run([*words, *place], capsys))
        saved.append([(path, path.read_bytes()) for path in sorted(Path().glob("*/model.safetensors"))])
    assert len(found[0]) > 5
    assert [key for key in found[0] | found[1] if found[0].get(key) != found[1].get(key)] == []
    assert saved[0] == saved[1]
    assert len(saved[0]) == (verb in ("prune", "updates", "compress"))


def test_a_limit_without_spreading_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["verify", str(folder / "model"), "--device", "cpu", "--max-memory", "cpu=1GiB"]
    assert cli.run(words) == 2
    assert "--device auto" in capsys.readouterr().err
