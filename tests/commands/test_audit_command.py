"""`perpend audit` on the folder of a finished survey."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from perpend.cli import run
from perpend.commands import audit
from perpend.runs import Run


@pytest.fixture(scope="module")
def surveyed(tmp_path_factory) -> Path:
    """What `perpend attention` leaves, as far as an audit reads it: 3 layers, 5 heads, 16 keys."""
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(3, 5, 16)) * generator.uniform(0.3, 2.0, (3, 5, 1))
    logits[..., 0] += 2 + generator.normal(size=(3, 5))
    signatures = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    signatures[2, 4] = np.nan  # a layer with fewer heads
    folder = tmp_path_factory.mktemp("runs") / "survey"
    with Run.start(folder, command="attention", request={"model": {"name": "made"}, "seeds": [0]}) as made:
        made.array("signatures", signatures)
        made.array("arithmetic", np.exp(signatures) * 0.8 + 0.2 / 16)
        with pytest.MonkeyPatch.context() as patch:  # a real survey's report needs its tables too
            patch.setattr("perpend.runs.run.Run._report", lambda self: None)
            made.finish({"sink": {"columns": [0]}}, {"sink": "first", "support": "keys 0 to 15"}, [])
    return folder


@pytest.fixture(scope="module")
def audited(surveyed: Path, tmp_path_factory):
    out = tmp_path_factory.mktemp("audit") / "out"
    assert run(["audit", str(surveyed), "--quiet", "--out", str(out)]) == 0
    return Run.open(out)


def test_the_run_folder_of_an_audit(audited, surveyed: Path) -> None:
    json.dumps(audited.document, allow_nan=False)
    assert audited.results["heads"] == 14
    assert audited.document["model"] == {"name": "made"}
    assert audited.document["conventions"]["sink"] == "first"
    files = Run.open(surveyed).document["files"]
    assert audited.request["signatures_sha256"] == files["arrays.safetensors"]
    assert audited.arrays["content_distance"].shape == (14, 14)
    assert len(audited.tables["temperature"]) == 8
    assert (audited.folder / "report.html").is_file()


def test_every_figure_draws(audited) -> None:
    found = audit.figures(audited)
    assert [figure.title for figure in found] == [
        "Temperature", "Rival distances of the content", "Reversals by kind of mean", "Sink set",
        "Taxonomies between conventions", "Trees of heads", "Map of heads", "Theorem 1 in this model",
    ]  # fmt: skip
    for figure in found:
        for chart in figure.charts.values():
            chart.to_dict()


def test_json_is_the_document(surveyed: Path, tmp_path: Path, capsys) -> None:
    assert run(["audit", str(surveyed), "--json", "--quiet", "--out", str(tmp_path / "a")]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["results"]["rivals"]["verdicts_identical"] is True


def test_a_plan_runs_nothing(surveyed: Path, tmp_path: Path, capsys) -> None:
    assert run(["audit", str(surveyed), "--plan", "--out", str(tmp_path / "a")]) == 0
    assert "no forward pass" in capsys.readouterr().out
    assert not (tmp_path / "a").exists()


def test_folders_that_are_no_survey(audited, tmp_path: Path, capsys) -> None:
    assert run(["audit", str(audited.folder)]) == 2
    assert "perpend attention" in capsys.readouterr().err
    assert run(["audit", str(tmp_path / "nothing")]) == 2
    assert "no run folder" in capsys.readouterr().err


def test_a_run_without_sums_per_block_is_audited_and_says_so(audited) -> None:
    """What an older survey left: every rate, no interval, and why."""
    assert audited.results["intervals"] == {}
    assert "no sums per block" in audited.document["undefined"]["intervals"]
    assert "intervals" not in audited.tables


def test_a_run_with_sums_per_block_gives_intervals(surveyed: Path, tmp_path: Path) -> None:
    old = Run.open(surveyed)
    generator = np.random.default_rng(1)
    logits = old.arrays["signatures"] + generator.normal(size=(6, 3, 5, 16)) * 0.3
    folder = tmp_path / "survey"
    with Run.start(folder, command="attention", request={"model": {"name": "made"}, "seeds": [0]}) as made:
        made.array("signatures", old.arrays["signatures"])
        made.array("block_logits", logits)
        made.array("block_rows", np.ones((6, 3)))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("perpend.runs.run.Run._report", lambda self: None)
            made.finish({"sink": {"columns": [0]}}, {"sink": "first", "support": "keys 0 to 15"}, [])
    out = tmp_path / "out"
    assert run(["audit", str(folder), "--quiet", "--bootstrap", "20", "--out", str(out)]) == 0
    found = Run.open(out)
    number = found.results["intervals"]["rivals/hellinger"]
    assert number["value"] == found.results["rivals"]["hellinger"]
    assert number["low"] < number["high"]
    assert len(found.tables["intervals"]) == len(found.results["intervals"])
    for figure in audit.figures(found):
        for chart in figure.charts.values():
            chart.to_dict()
