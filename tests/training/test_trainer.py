"""Training runs: they learn, survive kills bit for bit, and are the same on several processes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from perpend.errors import InputError, PerpendError
from perpend.training.data import prepare
from perpend.training.model import shape
from perpend.training.recipe import Recipe, recipe
from perpend.training.trainer import Rhythm, read_log, train

WORKER = Path(__file__).with_name("worker.py")
RECIPE = {"steps": 24, "batch": 4, "context": 32, "warmup": 4, "lr": 3e-3}
RHYTHM = {"log": 1, "evaluate": 8, "sequences": 8, "save": 5}


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    words = [
        "the",
        "river",
        "ran",
        "under",
        "a",
        "bridge",
        "and",
        "then",
        "came",
        "to",
        "sea",
        "where",
        "it",
        "met",
    ]
    generator = torch.Generator().manual_seed(0)
    for number in range(12):
        picks = torch.randint(len(words), (900,), generator=generator).tolist()
        (folder / f"{number}.txt").write_text(" ".join(words[i] for i in picks) + ".\n")
    return prepare(folder, folder / "prepared", vocab=280, valid=0.25)


def curve(folder) -> list[tuple]:
    log = read_log(folder)
    return [(row.step, row.loss, row.valid_loss, row.grad_norm, row.lr) for row in log.itertuples()]


def same(a: list[tuple], b: list[tuple]) -> bool:
    """Bit for bit, gaps included."""
    return json.dumps(a) == json.dumps(b)


def start(data, jobs: dict, processes: int = 1) -> subprocess.Popen:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    jobs = {str(out): {"recipe": RECIPE, "rhythm": RHYTHM, **asked} for out, asked in jobs.items()}
    command = [*launcher, str(WORKER), str(data.folder), json.dumps(jobs)]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def here(data, out, variant: str, **changes):
    size = shape("tiny", vocab=data.vocab)
    return train(size, variant, data, Recipe(**RECIPE | changes), out, rhythm=Rhythm(**RHYTHM))


def test_a_run_learns_and_its_folder_says_what_was_done(data, tmp_path):
    asked = Recipe(**{**RECIPE, "steps": 40}, micro=2)
    size = shape("tiny", vocab=data.vocab)
    done = train(size, "value-exclude-self", data, asked, tmp_path / "run")
    assert done.valid_loss < 4.5 < torch.log(torch.tensor(float(data.vocab)))
    assert done.log["tokens"].iloc[-1] == 40 * 4 * 32
    assert json.loads((tmp_path / "run/settings.json").read_text())["variant"] == "value-exclude-self"
    names = {p.name for p in done.model_folder.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json"}
    again = train(size, "value-exclude-self", data, asked, tmp_path / "run")
    assert same(curve(again.folder), curve(done.folder))
    with pytest.raises(InputError, match=r"recipe\.lr: it has 0\.003, you ask for 0\.1"):
        train(size, "value-exclude-self", data, replace(asked, lr=0.1), tmp_path / "run")


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_curve_bit_for_bit(data, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    here(data, whole, "value-gate-head")

    process = start(data, {killed: {"variant": "value-gate-head"}})
    deadline = time.monotonic() + 240
    while not (killed / "state.pt").exists():
        assert time.monotonic() < deadline
        assert process.poll() is None, process.stdout.read()
        time.sleep(0.002)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (killed / "final").exists(), "the run was over before it was killed: nothing is tested"
    with (killed / "log.jsonl").open("a") as log:  # a line that the kill cut in two
        log.write('{"step": 9, "tok')

    here(data, killed, "value-gate-head")
    assert same(curve(killed), curve(whole))
    weights = "final/model.safetensors"
    assert (killed / weights).read_bytes() == (whole / weights).read_bytes()


def test_micro_batches_give_the_same_curve_within_rounding(data, tmp_path):
    curves = [here(data, tmp_path / str(m), "residual", micro=m, steps=12).log for m in (4, 2)]
    close(*curves)


def close(one, two) -> None:
    for name in ("loss", "valid_loss", "grad_norm"):
        a, b = (torch.tensor(c[name].dropna().to_numpy()) for c in (one, two))
        torch.testing.assert_close(a, b, rtol=5e-5, atol=5e-5)


@pytest.mark.slow
def test_two_processes_give_the_curve_of_one_within_rounding_and_resume(data, tmp_path):
    asked = {"variant": "value-exclude-self", "recipe": {**RECIPE, "micro": 1}}
    # interrupted at the evaluation of step 8, they go on from what they saved at step 5
    jobs = {tmp_path / name: {**asked, "strategy": name, "stop": 8} for name in ("ddp", "fsdp")}
    process = start(data, jobs, processes=2)
    told, _ = process.communicate(timeout=400)
    assert process.returncode == 0, told
    one = here(data, tmp_path / "one", "value-exclude-self")
    losses = one.log["loss"].dropna()
    assert losses.iloc[-1] < losses.iloc[0] - 0.5, "nothing was learned"
    state = torch.load(tmp_path / "one/state.pt", weights_only=True)
    for name in ("ddp", "fsdp"):
        close(one.log, read_log(tmp_path / name))
        # what two processes saved is whole: one process could take it up
        saved = torch.load(tmp_path / name / "state.pt", weights_only=True)
        assert saved["step"] == 24
        for key in state["model"]:
            torch.testing.assert_close(saved["model"][key], state["model"][key], rtol=1e-3, atol=1e-4)


def test_refusals_name_the_remedy(data, tmp_path):
    with pytest.raises(InputError, match="multiple of 3"):
        Recipe(batch=4, micro=3).accumulation(1)
    with pytest.raises(InputError, match="did you mean 'warmup'"):
        recipe(warm_up=3)
    with pytest.raises(InputError, match="shorter than the run"):
        Recipe(steps=10, warmup=10)
    with pytest.raises(InputError, match="the data needs"):
        train(shape("tiny", vocab=30), "baseline", data, Recipe(**RECIPE), tmp_path / "a")
    wild = Recipe(**{**RECIPE, "lr": 1e18, "warmup": 0})
    with pytest.raises(PerpendError, match="lower lr="):
        train(shape("tiny", vocab=data.vocab), "baseline", data, wild, tmp_path / "b", rhythm=Rhythm(log=1))


def test_the_schedule_warms_up_and_ends_where_it_says():
    r = Recipe(steps=110, warmup=10, lr=2.0, final_lr=0.1)
    rates = [r.lr_at(s) for s in range(110)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[-1] == pytest.approx(0.2)
    assert all(a >= b for a, b in pairwise(rates[10:]))


def test_watchers_see_the_model_after_each_evaluation(data, tmp_path):
    seen = []
    look = [lambda step, model: seen.append((step, model.training))]
    size = shape("tiny", vocab=data.vocab)
    train(size, "baseline", data, Recipe(**RECIPE), tmp_path / "w", rhythm=Rhythm(evaluate=8), watch=look)
    assert seen == [(8, True), (16, True), (24, True)]


def test_tensorboard_gets_the_curve_or_says_what_is_missing(data, tmp_path, monkeypatch):
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def close(self):
            written.append("closed")

    size, short = shape("tiny", vocab=data.vocab), Recipe(**RECIPE | {"steps": 4, "warmup": 1})
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", SimpleNamespace(SummaryWriter=Writer))
    train(size, "baseline", data, short, tmp_path / "a", rhythm=Rhythm(log=2), tensorboard=True)
    assert written[0] == tmp_path / "a/tensorboard"
    assert {("loss", 2), ("loss", 4), ("valid_loss", 4), ("lr", 4), ("grad_norm", 2)} <= set(written)
    assert written[-1] == "closed"
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(PerpendError, match=r"perpend\[train\]"):
        train(size, "baseline", data, short, tmp_path / "b", tensorboard=True)


def test_tensorboard_reads_the_curve_that_the_log_holds(data, tmp_path):
    accumulators = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="pip install 'perpend[train]'"
    )
    size = shape("tiny", vocab=data.vocab)
    train(size, "baseline", data, Recipe(**RECIPE), tmp_path / "w", rhythm=Rhythm(**RHYTHM), tensorboard=True)
    events = accumulators.EventAccumulator(str(tmp_path / "w" / "tensorboard"))
    events.Reload()
    seen = {event.step: event.value for event in events.Scalars("loss")}
    log = read_log(tmp_path / "w").dropna(subset=["loss"])
    assert list(seen) == list(log["step"])
    assert list(seen.values()) == pytest.approx(list(log["loss"]), rel=1e-6)
    assert [event.step for event in events.Scalars("valid_loss")] == [8, 16, 24]


def test_bfloat16_learns_as_float32_does_with_its_master_weights_in_float32(data, tmp_path):
    size, losses = shape("tiny", vocab=data.vocab), {}
    for dtype in ("float32", "bfloat16"):
        done = train(size, "baseline", data, Recipe(**RECIPE, dtype=dtype), tmp_path / dtype)
        losses[dtype] = done.log["valid_loss"].dropna().iloc[-1]
        state = torch.load(tmp_path / dtype / "state.pt", weights_only=True)
        assert {p.dtype for p in state["model"].values() if p.is_floating_point()} == {torch.float32}
    first = read_log(tmp_path / "float32")["loss"].dropna().iloc[0]
    assert losses["float32"] < first - 0.5
    assert losses["bfloat16"] == pytest.approx(losses["float32"], abs=0.02)
    assert losses["bfloat16"] != losses["float32"], "autocast was on"


def test_streams_without_a_sequence_are_refused_before_the_first_step(data, tmp_path):
    for length, told in ((len(data.train), "training"), (len(data.valid), "validation")):
        small = shape("tiny", vocab=data.vocab, context=length)
        with pytest.raises(InputError, match=rf"{told} tokens hold no sequence .* context="):
            train(small, "baseline", data, Recipe(**{**RECIPE, "context": length}), tmp_path / told)


def test_a_damaged_state_is_named_with_the_remedy(data, tmp_path):
    folder = tmp_path / "run"
    small = shape("tiny", vocab=data.vocab)
    first = train(small, "baseline", data, Recipe(**RECIPE), folder)
    shutil.rmtree(folder / "final")
    state = (folder / "state.pt").read_bytes()
    (folder / "state.pt").write_bytes(state[: len(state) // 2])
    with pytest.raises(PerpendError, match=r"state.pt is damaged .*delete it"):
        train(small, "baseline", data, Recipe(**RECIPE), folder)
    (folder / "state.pt").unlink()
    again = train(small, "baseline", data, Recipe(**RECIPE), folder)
    assert again.valid_loss == first.valid_loss


@pytest.mark.parametrize("lr", [0.0, -1.0, float("nan"), float("inf")])
def test_rates_that_are_none(lr):
    with pytest.raises(InputError, match="positive and finite"):
        Recipe(lr=lr)
