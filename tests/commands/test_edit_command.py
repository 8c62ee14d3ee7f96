"""`perpend edit` from the words typed to the run folder and the exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from perpend.cli import run
from perpend.models.edit import Edit
from perpend.runs import Run


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of single bytes, a text, an edit and a task, as a folder."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.save_llama(folder / "model")
    (folder / "text.txt").write_text("The stream carries what every layer adds to it. " * 40)
    Edit("value.full", 0.5, layers=(1,)).save(folder / "edit.json")
    lines = [{"goal": "Carry water", "sol1": "use a pail", "sol2": "use a net", "label": 0}] * 3
    (folder / "tasks").mkdir()
    (folder / "tasks" / "piqa.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def words(saved: Path, *more: str) -> list[str]:
    text = ["--text", str(saved / "text.txt"), "--length", "24", "--sequences", "6"]
    return ["edit", str(saved / "model"), *text, "--quiet", *more]


def test_a_sweep_with_controls_grid_and_basins(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    arguments = words(
        saved, "--site", "value.exclude_self", "--site", "residual.mlp", "--parallel", "0,2",
        "--perpendicular", "0,0.5", "--grid", "--basin", "--controls-at", "0", "--edit",
        str(saved / "edit.json"), "--reference", "token", "--out", str(out),
    )  # fmt: skip
    assert run(arguments) == 0
    done = Run.open(out)
    cells = done.tables["cells"]
    assert len(cells) == 1 + 1 + 2 * (4 + 20 + 3)
    assert set(done.tables["basins"]["scale"]) == {"parallel", "perpendicular"}
    assert list(cells["site"][:2]) == ["unedited", "value.full"]
    assert cells["layers"][1] == 1
    assert "value.full" not in set(done.tables["basins"]["site"])  # one point is no curve
    assert (out / "report.html").stat().st_size > 10_000
    table = cells[(cells["parallel"] == 1.0) & (cells["perpendicular"] == 0.0)]
    assert len(table) == 2
    before = (out / "run.json").read_text()
    assert run([*arguments, "--resume"]) == 0
    assert json.loads((out / "run.json").read_text())["results"] == json.loads(before)["results"]


def test_controls_beside_an_edit(saved: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(words(saved, "--site", "residual.attn", "--parallel", "0,0.5", "--controls", "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert [row.get("control") for row in document["results"]["cells"]] == [
        None, *(None, "random", "shuffled", "opposite") * 2
    ]  # fmt: skip


def test_audit_gradient_and_head_sensitivity_in_one_run(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ("--audit", "--gradient", "--head-sensitivity", "--parallel", "0", "--out", str(out))
    assert run(words(saved, *more)) == 0
    done = Run.open(out)
    assert set(done.results) == {"diagonal", "gradient", "heads"}
    assert {"diagonal", "unrealised", "audit", "slopes", "linear", "heads", "layers"} <= set(done.tables)
    assert len(done.tables["heads"]) == 3 * 4
    assert any("Layer 0 apart" in line for line in done.document["findings"])
    assert done.results["heads"]["cost"]["bound_seconds"] > 0


def test_tasks_are_scored_under_every_edit(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = ("--site", "value.full", "--parallel", "0", "--tasks", "piqa", "--out", str(out))
    assert run(words(saved, *more, "--tasks-data", str(saved / "tasks"))) == 0
    scores = Run.open(out).tables["scores"]
    assert set(scores["condition"]) == {"unedited", "value.full head s∥=0 s⊥=1"}
    assert set(Run.open(out).tables["comparison"]["task"]) == {"piqa"}


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--site", "value.ful"), "value.full"),
        (("--parallel", "a"), "no list of finite numbers"),
        (("--parallel", "0,NaN"), "no list of finite numbers"),
        (("--perpendicular", "1e999"), "no list of finite numbers"),
        (("--layers", "x"), "no list of indices"),
        (("--site", "value.full", "--layers", "7"), "layer 7 is out of range"),
        (("--edit", "nowhere.json"), "cannot read the edit"),
        (("--layers", "3-1"), "runs backwards; write 1-3"),
        (("--site", "residual.attn", "--heads", "1"), "residual.attn has no heads"),
        (("--grid", "--parallel", "0,1"), "give --perpendicular beside --parallel"),
        (("--parallel", "1"), "nothing to edit"),
        (("--head-sensitivity", "--site", "residual.mlp"), "residual.mlp has no heads"),
    ],
)
def test_bad_input_is_exit_status_two(
    saved: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    assert run([*words(saved, *more), "--out", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err


def test_the_plan_runs_nothing(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    out = tmp_path / "run"
    assert run(words(saved, "--plan", "--gradient", "--head-sensitivity", "--audit", "--out", str(out))) == 0
    assert "forward passes" in capsys.readouterr().out
    assert not out.exists()
