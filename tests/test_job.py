"""What verbs share: loading, cutting, the request, the plan."""

from __future__ import annotations

import json
from pathlib import Path

import click
import pandas as pd
import pytest
import torch

from perpend import output
from perpend.errors import InputError
from perpend.job import Job, duration, probe
from perpend.options import Seeds

OPTIONS = {
    **dict.fromkeys(["revision", "dtype", "text", "out"]),
    **dict.fromkeys(["trust_remote_code", "resume", "json", "plan"], False),
    **{
        "device": "cpu",
        "sequences": 6,
        "length": 64,
        "bos": "auto",
        "batch": 4,
        "seeds": (0, 1),
        "window": 16,
    },
    "quiet": True,
}


@pytest.fixture
def job(shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.chdir(tmp_path)
    text = shared / "data" / "text" / "tinystories.txt"
    return Job("attention", {**OPTIONS, "model": str(shared / "data/models/stories260K"), "text": str(text)})


def test_the_request_holds_what_decides_the_results_and_nothing_else(job: Job) -> None:
    request = job.request(extra=1)
    assert set(request) == {"model", "data", "seeds", "batch", "window", "extra"}
    assert len(request["model"]["weights_sha256"]) == 64
    assert request["model"]["layers"] == 5
    assert len(request["data"]["sha256"]) == 64
    assert request["data"]["length"] == 64
    assert request["seeds"] == [0, 1]
    json.dumps(request)


def test_tokens_follow_the_seed(job: Job) -> None:
    assert job.tokens().shape == (6, 64)
    assert torch.equal(job.tokens(0), job.tokens(0))
    assert not torch.equal(job.tokens(0), job.tokens(1))
    with pytest.raises(InputError, match=r"\d"):
        job.tokens(0, count=10**7)


def test_a_plan_measures_one_batch_and_runs_nothing(job: Job, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = job.tokens()
    assert not job.planned(tokens)
    job.options["plan"] = True
    calls = []
    assert job.planned(tokens, passes=3, forward=calls.append, remarks=["and the loss"])
    assert [len(batch) for batch in calls] == [4, 4]  # one to warm up, one to measure
    told = capsys.readouterr().out
    for part in (
        "forward passes",
        "6 of 4 × 64 tokens",
        "1,152",
        "expected time",
        "peak memory",
        "and the loss",
    ):
        assert part in told
    assert not Path("runs").exists()
    with output.as_json(True):
        job.planned(tokens, passes=3)
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert plan["tokens"] == 3 * 6 * 64
    assert plan["forward_passes"] == 6
    assert plan["seconds"] > 0
    assert plan["peak_bytes"] > 10_000_000


def test_the_probe_scales_with_the_work(job: Job) -> None:
    tokens = job.tokens()
    one, ten = (probe(job.model, tokens, 2, passes) for passes in (1, 10))
    assert ten["tokens"] == 10 * one["tokens"]
    assert ten["forward_passes"] == 10 * one["forward_passes"]


def test_a_run_is_answered_with_findings_and_where_to_look(
    job: Job, capsys: pytest.CaptureFixture[str]
) -> None:
    job.command = "mine"  # no verb's figures are wanted here
    with job.run() as run:
        run.finish({"x": 1}, {}, ["x is one"])
    job.answer(run, ("Table", pd.DataFrame({"layer": [0], "x": [0.123456]})))
    told = capsys.readouterr().out
    assert "0.1235" in told
    assert "x is one" in told
    assert f"report: {run.folder / 'report.html'}" in told
    assert run.folder.name == "mine-stories260K-1"


def test_a_model_without_a_tokenizer_says_so(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    job.__dict__["_loaded"] = (object(), None)
    with pytest.raises(InputError, match="no tokenizer"):
        _ = job.sequences


@pytest.mark.parametrize(
    ("seconds", "told"),
    [(0.44, "0.4 s"), (9.99, "10.0 s"), (12.2, "12 s"), (200, "3 min 20 s"), (7500, "2 h 5 min")],
)
def test_durations_are_read_by_people(seconds: float, told: str) -> None:
    assert duration(seconds) == told


@pytest.mark.parametrize(
    ("text", "seeds"), [("0", (0,)), ("0,1,2", (0, 1, 2)), ("0-3", (0, 1, 2, 3)), ("7, 9-10", (7, 9, 10))]
)
def test_lists_of_seeds(text: str, seeds: tuple[int, ...]) -> None:
    assert Seeds().convert(text, None, None) == seeds


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("0-99999999999", "largest"),  # refused before it is made
        ("0-1000", "more than 1000"),
        ("0-600,700-1200", "more than 1000"),
        (str(2**64), "largest"),  # no generator takes it
        ("5-3", "write 3-5"),
        ("1,5-3", "write 3-5"),
        ("-1", "list of seeds"),
        ("²", "list of seeds"),
    ],
)
def test_lists_of_seeds_that_cannot_be(text: str, told: str) -> None:
    with pytest.raises(click.BadParameter, match=told):
        Seeds().convert(text, None, None)


def test_gaps_and_titles_in_tables() -> None:
    frame = pd.DataFrame({"metric_name": ["a", None], "value": [0.5, float("nan")], "count": [1, 2]})
    shown = output.table(frame, "[bold]A title[/bold]")
    assert str(shown.title) == "[bold]A title[/bold]"  # no markup from data
    assert [str(column.header) for column in shown.columns] == ["metric name", "value", "count"]
    assert [str(cell) for cell in shown.columns[1].cells] == ["0.5", "–"]
