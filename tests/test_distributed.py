"""Two real gloo processes: the bits of one, the main one writes, a dead one ends the run resumably."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from perpend import distributed
from perpend.errors import PerpendError
from perpend.runs import Run
from verbs import SHORT, VERBS, laid_out, numbers

WORKER = """
import os, sys, time
import numpy as np, torch
from perpend import distributed, cli
from perpend.runs import Run
from perpend.errors import PerpendError

folder, how = sys.argv[1:3]

def block(index):
    if how == "die" and distributed.rank() == 1 and index >= 5:
        os._exit(9)
    generator = torch.Generator().manual_seed(index)
    rows = torch.randn(32, 64, generator=generator).bfloat16()
    return {"sum": rows.double().exp().sum(0), "half": rows[0], "count": 32, "where": (index, None)}

def work():
    with Run.start(folder, command="survey", request={"model": "m"}, resume=how == "resume") as run:
        blocks = distributed.map_blocks(11, block, store=run.step)
        assert [b["where"][0] for b in blocks] == list(range(11))
        assert blocks[3]["half"].dtype == torch.bfloat16
        total = torch.zeros(64, dtype=torch.float64)
        for part in blocks:
            total += part["sum"]
        if how == "refuse":
            distributed.main_first(lambda: (_ for _ in ()).throw(PerpendError("main says no")))
        run.array("total", total)
        run.finish({"total": total.sum(), "from_main": distributed.broadcast(distributed.rank())}, {}, [])

try:
    work()
    code = 0
except PerpendError as error:
    code = cli._failed(error, ["survey"], False)
distributed.shutdown()
os._exit(code)  # the code itself is under test, not the interpreter's farewell
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(folder: Path, how: str, world: int) -> list[tuple[int, str]]:
    """Exit code and stderr of each process."""
    port = str(free_port())
    processes = []
    for rank in range(world):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if world > 1:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        words = [sys.executable, "-c", WORKER, str(folder), how]
        processes.append(subprocess.Popen(words, env=env, stderr=subprocess.PIPE, text=True))
    return [(process.wait(timeout=300), process.communicate()[1]) for process in processes]


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("single") / "r"
    assert start(folder, "start", 1) == [(0, "")]
    return folder


def test_two_processes_give_the_bits_of_one(tmp_path: Path, single: Path) -> None:
    outcomes = start(tmp_path / "r", "start", 2)
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    one, two = Run.open(single), Run.open(tmp_path / "r")
    np.testing.assert_array_equal(two.arrays["total"], one.arrays["total"])
    assert two.results == one.results
    assert two.document["environment"]["processes"] == 2
    assert sorted(p.name for p in two.folder.iterdir()) == sorted(p.name for p in one.folder.iterdir())


def test_a_dead_process_ends_the_run_and_any_number_resumes_it(tmp_path: Path, single: Path) -> None:
    began = time.time()
    (main, told), (dead, _) = start(tmp_path / "r", "die", 2)
    assert dead == 9
    assert main == 2
    assert "another process of this run has died" in told
    assert "--resume" in told
    assert time.time() - began < 200  # noticed at once, not by a timeout, which is of hours
    steps = sorted(p.name for p in (tmp_path / "r" / "steps").iterdir())
    assert [int(name.split("-")[1].split(".")[0]) for name in steps] == sorted(
        [0, 1, 2, 3, 4, 6, 8, 10], key=str
    )
    ((code, told),) = start(tmp_path / "r", "resume", 1)
    assert code == 0
    assert told == f"resuming {tmp_path / 'r'}; parts stored already, which are not computed again: 8\n"
    assert Run.open(tmp_path / "r").results == Run.open(single).results


def test_an_error_of_the_main_process_ends_all_and_is_told_once(tmp_path: Path) -> None:
    (main, told), (other, silent) = start(tmp_path / "r", "refuse", 2)
    assert (main, other) == (2, 2)
    assert "main says no" in told
    assert silent == ""


def test_a_refused_folder_ends_every_process(tmp_path: Path, single: Path) -> None:
    outcomes = start(single, "start", 2)
    assert [code for code, _ in outcomes] == [2, 2]
    assert "finished run" in outcomes[0][1]


def test_torchrun_starts_it(tmp_path: Path, single: Path) -> None:
    (tmp_path / "worker.py").write_text(WORKER)
    words = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        "2",
        "--master-port",
        str(free_port()),
    ]
    done = subprocess.run(
        [*words, tmp_path / "worker.py", tmp_path / "r", "start"], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert Run.open(tmp_path / "r").results == Run.open(single).results


# --- one process ---


def test_one_process_needs_no_torch_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (distributed.rank(), distributed.world(), distributed.is_main()) == (0, 1, True)
    assert distributed.map_blocks(3, lambda i: i * i) == [0, 1, 4]
    assert distributed.gather(5) == [5]
    assert distributed.broadcast("x") == "x"
    assert distributed.local_device() is None
    distributed.barrier()
    assert not torch.distributed.is_initialized()


def test_shards_cover_all_and_overlap_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = []
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        monkeypatch.setenv("WORLD_SIZE", "3")
        parts.append(distributed.shard(range(10)))
    assert sorted(item for part in parts for item in part) == list(range(10))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_block_computed_twice_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(distributed, "gather", lambda value: [value, value])
    with pytest.raises(PerpendError, match="block 4 was computed by two processes"):
        distributed.gather_blocks({4: 1})


# --- verbs ---


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return laid_out(tmp_path_factory.mktemp("saved"))


# the verb, in a process that is killed as soon as it has stored its first step where it is the second one
KILLED = """
import os, signal, sys
from perpend import cli, distributed
from perpend.runs import Run

step = Run.step

def last(self, name, compute):
    made = step(self, name, compute)
    if distributed.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return made

Run.step = last
code = cli.run(sys.argv[1:])
sys.stderr.flush()
os._exit(code)
"""


def perpend_in(
    world: int, words: list[str], program: tuple[str, ...] = ("-m", "perpend")
) -> list[tuple[int, str]]:
    """`perpend …` in so many processes: exit code and stderr of each."""
    port, processes = str(free_port()), []
    for number in range(world):
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if world > 1:
            env |= {"RANK": str(number), "WORLD_SIZE": str(world), "LOCAL_RANK": str(number)}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        command = [sys.executable, *program, *words]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen(command, env=env, **pipes))
    told = [process.communicate(timeout=900)[1] for process in processes]
    return [(process.returncode, text) for process, text in zip(processes, told)]


@pytest.fixture(scope="module")
def alone(saved: Path) -> Callable[[str], tuple[list[str], dict[str, object]]]:
    """verb -> its words, and the numbers of one process; each is run once."""
    done: dict[str, dict[str, object]] = {}

    def run(verb: str) -> tuple[list[str], dict[str, object]]:
        words = [verb, str(saved / "model"), "--text", str(saved / "text.txt"), "--quiet", *VERBS[verb]]
        if verb not in done:
            outcomes = perpend_in(1, [*words, "--out", str(saved / f"alone-{verb}")])
            assert outcomes[0][0] == 0, outcomes
            done[verb] = dict(numbers(Run.open(saved / f"alone-{verb}").results))
        return words, done[verb]

    return run


@pytest.mark.slow
@pytest.mark.parametrize("verb", VERBS)
def test_a_verb_gives_in_two_processes_what_it_gives_in_one(
    verb: str, alone: Callable[[str], tuple[list[str], dict[str, object]]], tmp_path: Path
) -> None:
    words, one = alone(verb)
    outcomes = perpend_in(2, [*words, "--out", str(tmp_path / "2")])
    assert [code for code, _ in outcomes] == [0, 0], outcomes
    two = dict(numbers(Run.open(tmp_path / "2").results))
    assert one.keys() == two.keys()
    for where, value in one.items():
        if isinstance(value, float):
            assert two[where] == pytest.approx(value, rel=1e-12, abs=1e-12), where
        else:
            assert two[where] == value, where


@pytest.mark.slow
@pytest.mark.parametrize("verb", SHORT)
def test_a_killed_process_ends_the_verb_and_another_number_of_them_resumes_it(
    verb: str, saved: Path, tmp_path: Path
) -> None:
    words = [verb, str(saved / "model"), "--text", str(saved / "text.txt"), "--quiet", *SHORT[verb]]
    assert perpend_in(1, [*words, "--out", str(tmp_path / "alone")])[0][0] == 0
    expected = dict(numbers(Run.open(tmp_path / "alone").results))
    words += ["--out", str(tmp_path / "r")]
    (main, told), (killed, _) = perpend_in(2, words, ("-c", KILLED))
    assert killed == -signal.SIGKILL
    assert main == 2
    assert "another process of this run has died" in told
    assert "--resume" in told
    assert "Traceback" not in told
    assert not (tmp_path / "r" / "run.json").exists()
    kept = sorted((tmp_path / "r" / "steps").iterdir())
    assert kept, "the step that was complete is lost"
    before = {path.name: path.stat().st_mtime_ns for path in kept}
    with pytest.raises(PerpendError, match="resume=True"):
        Run.open(tmp_path / "r")
    outcomes = perpend_in(1, [*words, "--resume"])
    assert outcomes[0][0] == 0, outcomes
    assert dict(numbers(Run.open(tmp_path / "r").results)) == expected
    left = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "r").glob("steps/*")}
    assert all(left[name] == written for name, written in before.items() if name in left), "computed again"


def test_comparing_two_checkpoints_refuses_several_processes(
    saved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from perpend import cli

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.run(["compare", str(saved / "model"), str(saved / "model")]) == 2
    assert "without torchrun" in capsys.readouterr().err
