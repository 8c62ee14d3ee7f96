"""`perpend scale` from two tiny models of one family to the run folder, interrupted and resumed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import perpend
import tiny
from perpend.cli import run
from perpend.commands import scale
from perpend.runs import Run


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("two")
    for name, layers in (("small", 2), ("large", 3)):
        tiny.save_llama(folder / name, seed=layers, num_hidden_layers=layers, initializer_range=0.4)
    (folder / "text.txt").write_text(" ".join(["sink", "content", "row", "head", "layer"] * 200))
    return folder


def words(two: Path, *more: str) -> list[str]:
    given = ["--text", str(two / "text.txt"), "--length", "24", "--window", "8", "--sequences", "8"]
    given += ["--batch", "2", "--bootstrap", "4", "--quiet"]
    return ["scale", str(two / "small"), str(two / "large"), *given, *more]


def test_two_models_on_one_map(two: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run([*words(two), "--out", str(out)]) == 0
    found = Run.open(out)
    json.dumps(found.document, allow_nan=False)
    rows = found.results["models"]
    assert [row["model"] for row in rows] == ["small", "large"]
    assert scale.short_names(["a/final", "b/final"]) == ["a/final", "b/final"]
    assert [row["layers"] for row in rows] == [2, 3]
    model, tokenizer = perpend.load(str(two / "large"))
    assert rows[1]["parameters"] == model.num_parameters()
    tokens = perpend.texts.sequences(str(two / "text.txt"), tokenizer, length=24).take(8, 0)
    survey = perpend.survey_attention(model, tokens, window=8)
    assert rows[1]["row_mass"] == pytest.approx(survey.per_layer()["row_mass"].mean(), rel=1e-6)
    assert rows[1]["row_mass_low"] <= rows[1]["row_mass"] <= rows[1]["row_mass_high"]
    assert found.results["families"] == {"llama": [rows[0]["model"], rows[1]["model"]]}
    outcomes = {one["name"]: one["outcome"] for one in found.results["predictions"]["scored"]}
    assert outcomes["ari-falls-with-sink"] == "undefined"
    assert outcomes["sink-rises-with-size"] in ("undecided", "refuted"), "one pair confirms nothing"
    assert "ari-falls-with-sink" in found.document["undefined"]
    titles = [figure.title for figure in scale.figures(found)]
    assert titles == [
        "Sink mass and size",
        "Reversals and sink mass",
        "Taxonomies and sink mass",
        "Predictions",
    ]
    for figure in scale.figures(found):
        for chart in figure.charts.values():
            chart.to_dict()


def test_resumed_after_the_first_model_is_the_same(two: Path, tmp_path: Path, monkeypatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run([*words(two), "--families", "a,b", "--out", str(whole)]) == 0
    assert Run.open(whole).results["families"].keys() == {"a", "b"}
    measure, seen = scale._measure, []

    def fails(job, options, run_, index):
        if index == 1:
            raise perpend.PerpendError("the power went")
        return measure(job, options, run_, index)

    def counts(job, options, run_, index):
        seen.append(index)
        return measure(job, options, run_, index)

    monkeypatch.setattr(scale, "_measure", fails)
    assert run([*words(two), "--families", "a,b", "--out", str(broken)]) != 0
    kept = list((broken / "steps").glob("predictions*"))
    assert kept, "the predictions were not written before the first model"
    monkeypatch.setattr(scale, "_measure", counts)
    assert run([*words(two), "--families", "a,b", "--out", str(broken), "--resume"]) == 0
    assert seen == [1]
    one, other = Run.open(whole).results, Run.open(broken).results
    for results in (one, other):
        results["predictions"].pop("written")
    assert one == other


def test_one_block_leaves_predictions_undecided_and_says_why(two: Path, tmp_path: Path) -> None:
    given = words(two)
    given[given.index("--batch") + 1] = "8"
    assert run([*given, "--out", str(tmp_path / "run")]) == 0
    found = Run.open(tmp_path / "run")
    assert "one block" in found.document["undefined"]["intervals"]
    sink = next(o for o in found.results["predictions"]["scored"] if o["name"] == "sink-rises-with-size")
    assert (sink["outcome"], "no interval" in sink["why"]) == ("undecided", True)


def test_words_that_make_no_study(two: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run(["scale", str(two / "small")]) == 2
    assert "at least two" in capsys.readouterr().err
    assert run([*words(two), "--families", "a"]) == 2
    assert "give one each" in capsys.readouterr().err
    bare = tmp_path / "bare"
    bare.mkdir()
    (bare / "config.json").write_text("{}")
    assert run(["scale", str(two / "small"), str(bare)]) == 2
    assert "no tokenizer" in capsys.readouterr().err


def test_the_plan_names_every_model(two: Path, capsys: pytest.CaptureFixture) -> None:
    assert run([*words(two), "--plan", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)["plan"]
    assert len(plan["models"]) == 2
    assert plan["seconds"] == pytest.approx(sum(model["seconds"] for model in plan["models"]))


def test_no_model_is_measured_before_all_are_there(two: Path, tmp_path: Path, capsys, monkeypatch) -> None:
    """A folder that is missing or cut short is told at once, the same weights as soon as they are seen."""
    measured = []
    whole = scale._measure

    def counted(job, *more):
        measured.append(job.model_name)
        return whole(job, *more)

    monkeypatch.setattr(scale, "_measure", counted)
    short = tmp_path / "short"
    shutil.copytree(two / "large", short)
    weights = (short / "model.safetensors").read_bytes()
    (short / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    for last, told in ((short, "truncated"), (tmp_path / "nowhere", "there is no folder")):
        given = words(two)
        assert run([*given[:2], str(last), *given[3:], "--out", str(tmp_path / "run")]) == 2
        assert told in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
    assert measured == []
    shutil.copytree(two / "small", tmp_path / "again")
    given = words(two)
    three = [*given[:2], str(tmp_path / "again"), *given[2:]]
    assert run([*three, "--out", str(tmp_path / "run")]) == 2
    assert "the same weights" in capsys.readouterr().err
    assert measured == [str(two / "small"), str(tmp_path / "again")], "the third was not measured any more"
