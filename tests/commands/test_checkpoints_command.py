"""`perpend checkpoints` from folders on the disk to the run folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

import perpend
import tiny
from perpend import texts
from perpend.cli import run
from perpend.commands import checkpoints
from perpend.geometry import split_entropy
from perpend.models.catalog import PYTHIA_REVISIONS
from perpend.runs import Run
from perpend.surveys.supports import WINDOW


@pytest.fixture(scope="module")
def training(tmp_path_factory) -> Path:
    """Three checkpoints of a tiny model in a folder, sharper from one to the next; a copy; a text."""
    folder = tmp_path_factory.mktemp("training")
    tiny.save_llama(folder / "start")
    model, tokenizer = perpend.load(folder / "start")
    for step in (20, 100, 400):
        model.save_pretrained(folder / "all" / f"checkpoint-{step}")
        tokenizer.save_pretrained(folder / "all" / f"checkpoint-{step}")
        with torch.no_grad():
            for layer in model.model.layers:
                layer.self_attn.q_proj.weight *= 1.6
    shutil.copytree(folder / "all" / "checkpoint-20", folder / "checkpoint-800")
    (folder / "text.txt").write_text(" ".join(["sink", "content", "row", "head", "layer"] * 400))
    return folder


def words(training: Path, *more: str) -> list[str]:
    return [
        "checkpoints", *more, "--text", str(training / "text.txt"), "--length", "24", "--window", "8",
        "--sequences", "48", "--batch", "8", "--quiet",
    ]  # fmt: skip


def test_a_folder_of_checkpoints(training: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run(words(training, str(training / "all"), "--out", str(out))) == 0
    found = Run.open(out)
    json.dumps(found.document, allow_nan=False)
    table = found.tables["checkpoints"]
    assert list(table["step"]) == [20, 100, 400]
    assert table["total"].is_monotonic_decreasing
    assert found.results["flags"] == []
    # the means are those of eager rows
    model, tokenizer = perpend.load(str(training / "all" / "checkpoint-100"))
    tokens = texts.sequences(texts.read_text(str(training / "text.txt")), tokenizer, length=24).take(48, 0)
    model = model.double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = torch.stack(model(tokens, output_attentions=True).attentions)[..., 8:, :8].double()
    parts = split_entropy(rows / rows.sum(-1, keepdim=True), 0)
    assert table["total"][1] == pytest.approx(float(parts.total.mean()), rel=1e-5)
    assert table["weighted_content"][1] == pytest.approx(float(parts.weighted_content.mean()), rel=1e-5)
    scored = found.results["predictions"]["scored"][0]
    assert scored["name"] == "entropy-falls-content-flat"
    change, low, high = scored["numbers"]["relative change of C_A⊥"]
    assert low <= change <= high
    assert change == pytest.approx(found.results["collapse"]["dispersion_change"])
    rose = scored["numbers"]["change of sink mass"][0] > 0
    assert abs(change) > 0.2  # sharper queries: the content narrows
    assert scored["outcome"] == ("refuted" if rose else "undefined")
    assert any("Predicted before measuring" in line for line in found.document["findings"])
    collapse = found.results["collapse"]
    assert (collapse["from"], collapse["to"]) == ("checkpoint-20", "checkpoint-400")
    assert abs(collapse["residual"]) < 1e-9
    assert abs(collapse["residual_split"]) < 1e-12
    low, high = collapse["intervals"]["total"]
    assert low <= collapse["total"] <= high
    assert high - low < 0.5 * abs(collapse["total"])
    titles = [figure.title for figure in checkpoints.figures(found)]
    assert titles[0] == "Entropy and dispersion in training"
    assert "Split of the entropy's fall" in titles
    for figure in checkpoints.figures(found):
        for chart in figure.charts.values():
            chart.to_dict()


def test_a_copy_under_another_name_is_flagged(training: Path, tmp_path: Path, capsys) -> None:
    places = [str(training / "all" / "checkpoint-400"), str(training / "all" / "checkpoint-20")]
    out = tmp_path / "run"
    assert run(words(training, *places, str(training / "checkpoint-800"), "--out", str(out))) == 0
    results = Run.open(out).results
    assert any("out of order" in said for said in results["flags"])
    assert any("checkpoint-800 has the very weights of checkpoint-20" in said for said in results["flags"])
    assert results["predictions"]["scored"][0]["outcome"] in ("refuted", "undefined")
    assert "never fell" in Run.open(out).document["undefined"]["collapse"]


def test_resumed_after_the_first_checkpoint_is_the_same(training: Path, tmp_path: Path, monkeypatch) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    arguments = words(training, str(training / "all"))
    assert run([*arguments, "--out", str(whole)]) == 0
    measure, seen = checkpoints._measure, []

    def fails(job, tokens, name, *more):
        if name == "checkpoint-100":
            raise perpend.PerpendError("the power went")
        return measure(job, tokens, name, *more)

    def counts(job, tokens, name, *more):
        seen.append(name)
        return measure(job, tokens, name, *more)

    monkeypatch.setattr(checkpoints, "_measure", fails)
    assert run([*arguments, "--out", str(broken)]) != 0
    monkeypatch.setattr(checkpoints, "_measure", counts)
    assert run([*arguments, "--out", str(broken), "--resume"]) == 0
    assert seen == ["checkpoint-100", "checkpoint-400"]
    one, other = Run.open(broken).results, Run.open(whole).results
    for results in (one, other):
        assert results["predictions"].pop("written")
    assert one == other


def test_words_that_name_no_training(training: Path, tmp_path: Path, capsys) -> None:
    assert run(words(training, str(training / "all" / "checkpoint-20"))) == 2
    assert "give several folders" in capsys.readouterr().err
    assert run(words(training, "smollm2-135m-instruct")) == 2
    assert "--revisions" in capsys.readouterr().err
    for queries in ("8", "8:8", "12:8", "-1:8", "a:b"):
        assert run([*words(training, str(training / "all")), "--queries", queries]) == 2
        assert "64:128" in capsys.readouterr().err
    there, out = str(training / "all" / "checkpoint-20"), training / "none"
    assert run([*words(training, there, str(training / "nowhere" / "x")), "--out", str(out)]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert not out.exists(), "the first was measured although the second is not there"


def test_the_papers_protocol_is_the_default() -> None:
    assert checkpoints.choose([], None) == [("pythia-160m", step, step) for step in PYTHIA_REVISIONS]
    assert PYTHIA_REVISIONS[0] == "step512"
    assert PYTHIA_REVISIONS[-1] == "step143000"
    assert checkpoints.choose(["x/y"], "a,b") == [("x/y", "a", "a"), ("x/y", "b", "b")]
    second = checkpoints.choose(["olmo-1b"], None)  # the second family, whose revisions name tokens too
    steps = [checkpoints.step_in(*place) for place in second]
    assert len(second) == 10
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (1000, 738000)
    defaults = {p.name: p.default for p in checkpoints.command.params}
    assert (defaults["sequences"], defaults["length"], WINDOW) == (256, 128, 64)


def test_a_trainers_own_step_wins_over_a_renamed_folder(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text('{"global_step": 70}')
    assert checkpoints.step_in(str(tmp_path), None, "checkpoint-50") == 70
    (tmp_path / "trainer_state.json").write_text("[")
    assert checkpoints.step_in(str(tmp_path), None, "checkpoint-50") == 50


def test_another_vocabulary_is_no_checkpoint_of_the_same_training(training: Path, tmp_path: Path) -> None:
    other = tmp_path / "checkpoint-900"
    shutil.copytree(training / "all" / "checkpoint-400", other)
    path = other / "tokenizer.json"
    held = json.loads(path.read_text())
    vocabulary = held["model"]["vocab"]
    vocabulary["A"], vocabulary["B"] = vocabulary["B"], vocabulary["A"]
    path.write_text(json.dumps(held))
    arguments = words(training, str(training / "all" / "checkpoint-20"), str(other))
    assert run([*arguments, "--out", str(tmp_path / "run")]) == 2


# The hub's address is read when its library is imported, so the run has a process of its own.
SCRIPT = """
import sys
from perpend.cli import run
from perpend.commands import checkpoints
from perpend.models.hub_cache import cached
from perpend.models.load import load

load("owner/name", revision="checkpoint-100", device="cpu")  # the user's own copy
measure = checkpoints._measure

def counted(*arguments):
    print("held", len(cached("owner/name")), flush=True)
    return measure(*arguments)

checkpoints._measure = counted
code = run(sys.argv[1:])
print("left", len(cached("owner/name")), flush=True)
sys.exit(code)
"""


@pytest.mark.slow
def test_one_hub_checkpoint_on_disk_at_a_time(training: Path, tmp_path: Path) -> None:
    import os
    import subprocess
    import sys

    sys.path.insert(0, str(Path(__file__).parent.parent / "models"))
    try:
        from hub import serve
    finally:
        sys.path.pop(0)
    names = ["checkpoint-20", "checkpoint-100", "checkpoint-400"]
    repositories = {"owner/name": {name: training / "all" / name for name in names}}
    out, cache = tmp_path / "run", tmp_path / "cache"
    arguments = words(training, "owner/name", "--revisions", ",".join(names), "--out", str(out))
    with serve(repositories) as endpoint:
        hidden = {"HF_HUB_OFFLINE", "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"}
        env = {k: v for k, v in os.environ.items() if k not in hidden}
        env |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(cache), "DISABLE_SAFETENSORS_CONVERSION": "1"}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT, *arguments, "--one-on-disk"],
            capture_output=True,
            text=True,
            env=env,
            timeout=300,
        )
    assert done.returncode == 0, done.stderr
    # the user's own copy stays; beside it never more than the one being read
    held = [line for line in done.stdout.splitlines() if line.startswith("held")]
    assert held == ["held 2", "held 1", "held 2"]
    assert "left 1" in done.stdout
    assert list(Run.open(out).tables["checkpoints"]["step"]) == [20, 100, 400]
    weights = [path for path in cache.rglob("*.safetensors") if path.exists()]
    assert len(weights) == 1


def test_folders_are_never_deleted(training: Path, capsys: pytest.CaptureFixture) -> None:
    assert run([*words(training, str(training / "all")), "--one-on-disk"]) == 2
    assert "folders are left as they are" in capsys.readouterr().err
    assert (training / "all" / "checkpoint-20" / "model.safetensors").is_file()
