"""`perpend train` from the command line: a comparison, its report, a plan, interruption and refusals."""

from __future__ import annotations

import json

import pytest
import torch

from perpend.cli import run
from perpend.runs import Run


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    folder = tmp_path_factory.mktemp("corpus")
    generator = torch.Generator().manual_seed(0)
    words = ["one", "ring", "to", "rule", "them", "all", "and", "in", "the", "darkness", "bind"]
    for number in range(8):
        picks = torch.randint(len(words), (600,), generator=generator).tolist()
        (folder / f"{number}.txt").write_text(" ".join(words[i] for i in picks))
    return folder


def arguments(corpus, out, *more: str) -> list[str]:
    small = ["--size", "tiny", "--vocab", "270", "--valid", "0.25", "--steps", "6", "--batch", "4"]
    often = ["--context", "32", "--eval-every", "2", "--eval-sequences", "4", "--save-every", "2"]
    return ["train", "--text", str(corpus), *small, *often, "--out", str(out), *more]


def test_a_comparison_leaves_models_tables_and_a_report(corpus, tmp_path, capsys):
    out = tmp_path / "run"
    more = ("--compare", "baseline,value-full", "--seeds", "2", "--snapshot-every", "2", "--json")
    assert run(arguments(corpus, out, *more)) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["results"]["variants"] == ["baseline", "value-full"]
    assert document["results"]["seeds"] == [0, 1]
    assert [row["budget"] for row in document["results"]["paired"]] == ["tokens", "wall clock", "processor"]
    finished = Run.open(out)
    assert len(finished.tables["curves"]) == 2 * 2 * 3
    assert finished.tables["runs"]["tokens"].unique().tolist() == [6 * 4 * 32]
    for name in ("baseline-0", "value-full-1"):
        assert (out / "models" / name / "final/config.json").is_file()
        steps = sorted(p.name for p in (out / "models" / name / "snapshots").iterdir())
        assert steps == [f"step-000000{n}" for n in (0, 2, 4, 6)]
    page = (out / "report.html").read_text()
    for title in ("Loss at equal tokens", "Loss at equal time", "Paired differences"):
        assert title in page


def test_finished_models_are_scored_if_asked(corpus, tmp_path, capsys):
    items = [{"question": f"is {n} it", "passage": "one ring", "answer": n % 2 == 0} for n in range(4)]
    (tmp_path / "tasks").mkdir()
    (tmp_path / "tasks/boolq_validation.jsonl").write_text("".join(json.dumps(i) + "\n" for i in items))
    asked = ["--tasks", "boolq", "--tasks-data", str(tmp_path / "tasks"), "--json"]
    assert run(arguments(corpus, tmp_path / "run", "--compare", "baseline,value-full", *asked)) == 0
    scores = json.loads(capsys.readouterr().out)["results"]["scores"]
    assert [(row["variant"], row["task"], row["n"]) for row in scores] == [
        ("baseline", "boolq", 4),
        ("value-full", "boolq", 4),
    ]
    assert all(0 <= row["value"] <= 1 for row in scores)


def test_an_interrupted_comparison_goes_on(corpus, tmp_path, capsys, monkeypatch):
    from perpend.training import trainer

    out, evaluate = tmp_path / "run", trainer._Training._evaluate

    def stopped(self):
        if self.variant == "residual":
            raise KeyboardInterrupt
        evaluate(self)

    monkeypatch.setattr(trainer._Training, "_evaluate", stopped)
    assert run(arguments(corpus, out, "--compare", "baseline,residual")) == 130
    assert "--resume" in capsys.readouterr().err
    finished = (out / "models/baseline-0/final/model.safetensors").stat().st_mtime_ns
    monkeypatch.setattr(trainer._Training, "_evaluate", evaluate)
    assert run(arguments(corpus, out, "--compare", "baseline,residual", "--resume")) == 0
    assert (out / "models/baseline-0/final/model.safetensors").stat().st_mtime_ns == finished
    assert "one seed" in capsys.readouterr().out


def test_the_plan_of_the_papers_run_needs_no_gpu(capsys):
    more = ["--compare", "baseline,value-exclude-self", "--gpus", "8xH100"]
    assert run(["train", "--size", "2.7B", "--plan", "--json", *more]) == 0
    document = json.loads(capsys.readouterr().out)
    for row in document["plan"]:
        assert row["parameters"] == 2_669_447_680
        assert row["tokens"] == 200_000 * 256 * 2048
        assert 20 < row["memory_GB"] < 75
        assert 100 < row["hours_a_run"] < 200
    assert document["hours"] == pytest.approx(sum(row["hours_a_run"] for row in document["plan"]))


def test_a_plan_for_this_machine_is_measured(capsys):
    assert run(["train", "--size", "tiny", "--steps", "100", "--plan", "--json"]) == 0
    assert 0 < json.loads(capsys.readouterr().out)["hours"] < 1


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (["--compare", "baseline,value-ful"], "value-full"),
        (["--size", "1.4b"], "1.4B"),
        (["--compare", "baseline,baseline"], "once"),
        (["--warmup", "6"], "shorter than the run"),
        (["--plan", "--gpus", "8xVoodoo"], "H100"),
        (["--plan", "--gpus", "0xH100"], "NxNAME"),
        (["--plan", "--gpus", "8xH100", "--mfu", "0"], "0.0 is not in the range 0<x<=1"),
        (["--plan", "--gpus", "8xH100", "--mfu", "nan"], "'nan' is no finite number"),
        (["--gpus", "8xH100"], "--plan"),
        (["--micro", "3"], "multiple of 3"),
        (["--tasks", "bolq"], "unknown task 'bolq'"),
        (["--lr", "inf"], "'inf' is no finite number"),
        (["--seed", str(2**64)], "4294967295"),
        (["--seeds", "1000000000"], "1000"),
        (["--valid", "0.9"], "0.9 is not in the range 0<x<=0.5"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(corpus, tmp_path, capsys, wrong, told):
    assert run(arguments(corpus, tmp_path / "run", *wrong)) == 2
    assert told in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_text_is_asked_for(tmp_path, capsys):
    assert run(["train", "--out", str(tmp_path / "run")]) == 2
    assert "--text" in capsys.readouterr().err


def test_a_mistake_found_while_preparing_leaves_no_run_behind_and_an_interruption_does(
    corpus, tmp_path, capsys, monkeypatch
):
    out = tmp_path / "run"
    assert run(arguments(corpus, out, "--vocab", "60000")) == 2
    assert "ask for a smaller one" in capsys.readouterr().err
    assert not out.exists()

    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("perpend.training.data._batched", interrupted)
    assert run(arguments(corpus, out)) == 130
    assert (out / "data/tokenizer").is_dir()
    monkeypatch.undo()
    assert run(arguments(corpus, out, "--resume")) == 0


def test_tokens_of_a_failed_preparation_are_not_deleted(corpus, tmp_path, capsys, monkeypatch):
    """A disk that is full after hours of tokenizing ends the run, not what is tokenized."""
    from perpend.errors import PerpendError
    from perpend.training import data

    whole = data._batched

    def full(texts, size):
        batches = whole(texts, 1000)
        yield next(batches)
        raise PerpendError("no space left")

    out = tmp_path / "run"
    monkeypatch.setattr(data, "_batched", full)
    assert run(arguments(corpus, out)) == 2
    assert "--resume" in capsys.readouterr().err
    assert (out / "data/train.bin").stat().st_size > 0
    monkeypatch.undo()
    assert run(arguments(corpus, out, "--resume")) == 0
