"""`perpend evaluate` from options to run folder, and the options that other verbs share."""

from __future__ import annotations

import json

import click
import pandas as pd
import pytest
from click.testing import CliRunner

from perpend.errors import InputError
from perpend.evaluation.options import Lengths, add_tasks, all_edits, parse_edits, task_options
from perpend.runs import Run


@pytest.fixture(scope="module")
def saved(tmp_path_factory, model, tokenizer):
    folder = tmp_path_factory.mktemp("saved")
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    data = folder / "data"
    data.mkdir()
    records = [
        {"goal": f"make {i}", "sol1": f"cut {i} wood", "sol2": f"dig a {i}", "label": i % 2} for i in range(5)
    ]
    (data / "piqa_validation.jsonl").write_text("\n".join(map(json.dumps, records)))
    return folder


def invoke(saved, *arguments):
    from perpend.commands.evaluate import command

    given = [str(saved / "model"), "--tasks-data", str(saved / "data"), "--quiet", *arguments]
    result = CliRunner().invoke(command, given)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_a_length_that_does_not_fit_is_refused_before_other_tasks_run(saved, tmp_path, monkeypatch):
    from perpend.evaluation import suite

    monkeypatch.setattr(suite, "loglikelihoods", lambda *args, **kwargs: pytest.fail("piqa was scored"))
    out = ("--out", str(tmp_path / "run"))
    with pytest.raises(InputError, match="context of 2048; choose lengths up to that"):
        invoke(saved, "--tasks", "piqa,niah_single_1", "--tasks-lengths", "1k,4k", *out)
    assert not (tmp_path / "run").exists()


def test_a_run_holds_scores_comparisons_and_losses(saved, tmp_path):
    out = tmp_path / "run"
    result = invoke(
        saved, "--tasks", "piqa,fwe", "--tasks-lengths", "1k", "--tasks-limit", "2",
        "--edit", "residual.mlp:1:0",
        "--perplexity", "fixed", "--perplexity", "token", "--length", "32", "--sequences", "4",
        "--out", str(out),
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "residual.mlp:1:0" in result.output
    run = Run.open(out)
    assert set(run.tables) == {"scores", "items", "comparison", "perplexity", "perplexity_change"}
    scores = pd.DataFrame(run.tables["scores"])
    assert set(scores["condition"]) == {"unedited", "residual.mlp:1:0"}
    assert set(scores["task"]) == {"piqa", "fwe@1024"}
    results = run.document["results"]
    assert results["tasks"]["unedited"]["piqa"]["settings"]["version"] == "1.0"
    assert results["comparison"]["residual.mlp:1:0"]["margin"] == 0.005
    assert results["perplexity"]["unedited"]["token"]["stride"] == 32
    assert results["perplexity_change"]["residual.mlp:1:0"]["fixed"]["difference"] != 0
    assert any("not above guessing" in one for one in run.document["findings"])
    from perpend.commands.evaluate import figures

    assert len(figures(run)) == 3
    json.dumps(run.document, allow_nan=False)


def test_nothing_to_score_is_said(saved):
    with pytest.raises(InputError, match="nothing to score"):
        invoke(saved)


def test_a_plan_runs_nothing(saved, tmp_path):
    result = invoke(saved, "--tasks", "piqa", "--plan", "--out", str(tmp_path / "none"))
    assert result.exit_code == 0, result.output
    assert "forward passes" in result.output
    assert not (tmp_path / "none").exists()


def test_edits_from_the_command_line(tmp_path, model):
    (one,) = parse_edits("value.exclude_self:0.5")
    assert (one.site, one.parallel, one.perpendicular) == ("value.exclude_self", 0.5, 1.0)
    both = parse_edits("residual.attn:0+residual.mlp:1:0.25")
    assert [(e.site, e.parallel, e.perpendicular) for e in both] == [
        ("residual.attn", 0.0, 1.0),
        ("residual.mlp", 1.0, 0.25),
    ]
    path = tmp_path / "edit.json"
    one.save(path)
    assert parse_edits(str(path)) == (one,)
    for wrong in ("value.exclude_self", "value.exclude_self:a", "residual.mlp:1:2:3"):
        with pytest.raises(InputError, match="SITE:PARALLEL"):
            parse_edits(wrong)
    with pytest.raises(InputError, match=r"residual\.mlp"):
        parse_edits("residual.mlpp:0")
    import torch

    tokens = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        plain = model(tokens).logits
        with all_edits(model, both):
            assert not torch.allclose(model(tokens).logits, plain)
        assert torch.equal(model(tokens).logits, plain)


def test_shared_options():
    seen = {}

    @click.command()
    @add_tasks
    def verb(**options):
        seen.update(task_options({**options, "batch": 3, "seeds": (7,)}))

    result = CliRunner().invoke(
        verb,
        ["--tasks", "vt", "--tasks-lengths", "1k,300", "--tasks-files", "essays=a.txt", "--tasks-shots", "0"],
    )
    assert result.exit_code == 0, result.output
    assert seen["lengths"] == (1024, 300)
    assert seen["files"] == {"essays": "a.txt"}
    assert (seen["fewshot"], seen["batch"], seen["seed"], seen["limit"]) == (0, 3, 7, None)
    assert "1k,2k,4k" in CliRunner().invoke(verb, ["--tasks-lengths", "x"]).output
    assert "NAME=PATH" in str(CliRunner().invoke(verb, ["--tasks", "vt", "--tasks-files", "a"]).exception)
    with pytest.raises(click.BadParameter):
        Lengths().convert("0", None, None)
