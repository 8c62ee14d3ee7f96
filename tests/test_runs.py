"""Run folders: nothing is lost by kills, full disks, cuts and damage; nothing is written elsewhere."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from perpend.errors import InputError, PerpendError
from perpend.runs import AlreadyFinished, Run, differences, plain
from perpend.runs.files import safe_name, step_file, write_atomically
from perpend.runs.run import telling
from perpend.runs.values import pack, unpack

REQUEST = {
    "model": {"name": "tiny", "weights_sha256": "ab"},
    "data": {"sha256": "cd"},
    "length": 192,
    "seeds": [0],
}


def begin(folder: Path | None, **changes: object) -> Run:
    resume = bool(changes.pop("resume", False))
    return Run.start(folder, command="mine", request={**REQUEST, **changes}, resume=resume)


def finish(run: Run) -> None:
    run.table("layers", pd.DataFrame({"layer": [0, 1], "mass": [0.1, 1 / 3]}))
    run.array("signatures", np.arange(6, dtype=np.float64).reshape(2, 3))
    run.finish(
        {"sink": {"mass": 0.5}}, {"window": 64}, ["half of it is sink"], {"layer 3": "no sink in view"}
    )


def interrupt(folder: Path | None, steps: dict[str, object]) -> KeyboardInterrupt:
    """A run that stores these steps and is then interrupted; returns the interruption."""
    try:
        with begin(folder) as run:
            for name, value in steps.items():
                run.step(name, lambda value=value: value)
            raise KeyboardInterrupt
    except KeyboardInterrupt as error:
        return error


# --- the plain life of a run ---


def test_a_finished_run_reads_back_as_written(tmp_path: Path) -> None:
    with begin(tmp_path / "r") as run:
        finish(run)
    assert sorted(p.name for p in (tmp_path / "r").iterdir()) == [
        "arrays.safetensors",
        "layers.csv",
        "report.html",
        "run.json",
    ]
    back = Run.open(tmp_path / "r")
    assert back.results == {"sink": {"mass": 0.5}}
    assert back.document["findings"] == ["half of it is sink"]
    assert back.document["environment"]["torch"] == torch.__version__.partition("+")[0] or torch.__version__
    assert set(back.document) >= {
        "version", "command", "request", "conventions", "model", "data", "environment", "seeds", "results",
        "findings", "undefined",
    }  # fmt: skip
    assert back.tables["layers"]["mass"].tolist() == [0.1, 1 / 3]
    np.testing.assert_array_equal(back.arrays["signatures"], np.arange(6.0).reshape(2, 3))
    with pytest.raises(PerpendError, match="did you mean 'layers'"):
        back.tables["layer"]


def test_the_default_folder_is_numbered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        with Run.start(None, command="mine", request={"model": {"name": "hub/../Smol LM"}}) as run:
            assert run.folder == Path(f"runs/mine-Smol-LM-{number}")
            finish(run)


@pytest.mark.parametrize(
    ("name", "alone", "of_many"),
    [
        ("runs/tr/models/residual-0/final", "residual-0", "residual-0"),
        ("runs/tr/snapshots/residual-0/step-0000000", "residual-0-step-0000000", "residual-0"),
        ("mine/checkpoint-100", "mine-checkpoint-100", "mine"),
        ("hub/models--a--b/snapshots/" + 40 * "a", "models--a--b", "models--a--b"),
        ("EleutherAI/pythia-70m", "pythia-70m", "pythia-70m"),
        ("model-Q4_K_M.gguf", "model-Q4_K_M.gguf", "model-Q4_K_M.gguf"),
        ("final", "final", "final"),
    ],
)
def test_a_run_is_named_by_what_tells_its_model(name: str, alone: str, of_many: str) -> None:
    assert telling(name) == alone
    assert telling(name, with_step=False) == of_many


def test_a_folder_of_runs_names_the_runs_inside(tmp_path: Path) -> None:
    for name in ("b", "a"):
        with Run.start(tmp_path / "runs" / name, command="mine", request=REQUEST) as run:
            finish(run)
    with pytest.raises(PerpendError, match=r"holds 2 runs: .*a, .*b; name one") as caught:
        Run.open(tmp_path / "runs")
    assert str(tmp_path / "runs" / "a") in str(caught.value)


def test_resume_without_a_folder_takes_the_newest_unfinished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PerpendError, match="no unfinished run"):
        Run.start(None, command="mine", request=REQUEST, resume=True)
    interrupt(None, {"a": 1})
    capsys.readouterr()
    with Run.start(None, command="mine", request=REQUEST, resume=True) as again:
        assert again.folder == Path("runs/mine-tiny-1")
        told = capsys.readouterr().err
        assert told == "resuming runs/mine-tiny-1; parts stored already, which are not computed again: 1\n"
        assert again.step("a", lambda: 2) == 1


@pytest.mark.parametrize("out", ["", " "])
def test_a_folder_without_a_name_is_refused(
    out: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PerpendError, match="has no name"):
        Run.start(out, command="mine", request=REQUEST)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["run", "partial"])
def test_a_document_never_takes_the_place_of_the_run_s_own(tmp_path: Path, name: str) -> None:
    with begin(tmp_path / "r") as run:
        with pytest.raises(PerpendError, match=rf"{name}.json is the run's own"):
            run.json(name, {"a": 1})
        finish(run)
    assert Run.open(tmp_path / "r").results == {"sink": {"mass": 0.5}}


def test_a_run_that_computed_nothing_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="bad option"), begin(tmp_path / "r"):
        raise ValueError("bad option")
    assert not (tmp_path / "r").exists()


def test_an_interrupt_names_the_resumable_folder(tmp_path: Path) -> None:
    assert interrupt(tmp_path / "r", {"one": 1}).resumable == tmp_path / "r"
    with pytest.raises(PerpendError, match=r"not finished.*resume=True"):
        Run.open(tmp_path / "r")
    with pytest.raises(PerpendError, match="unfinished run; resume=True goes on"):
        begin(tmp_path / "r")


# --- step values ---

VALUES = {
    "tensors": {"bf16": torch.randn(3, 2).bfloat16(), "f64": torch.tensor(float("nan"), dtype=torch.float64)},
    "arrays": {
        "empty": np.empty((0, 4)),
        "bool": np.array([True, False]),
        "fortran": np.arange(6).reshape(2, 3).T,
    },
    "plain": {"a": [1, 2.5, None, True, "ü"], "t": (1, (2, 3)), "inf": float("-inf"), 7: "integer key"},
    "table": pd.DataFrame({"head": [0, 1], "mass": [0.1, np.nan], "name": ["a", "b"]}),
    "objects": np.array([["x", "y"], ["z", None]], dtype=object),
    "nothing": {},
}


def same(a: object, b: object) -> bool:
    if isinstance(a, torch.Tensor):
        return type(b) is type(a) and a.dtype == b.dtype and torch.equal(a.nan_to_num(7), b.nan_to_num(7))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and np.array_equal(a, b)
    if isinstance(a, pd.DataFrame):
        return a.equals(b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return type(a) is type(b) and a == b


@pytest.mark.parametrize("kind", VALUES)
def test_a_step_returns_the_same_value_computed_and_resumed(tmp_path: Path, kind: str) -> None:
    with begin(tmp_path / "first") as run:
        assert same(run.step(kind, lambda: VALUES[kind]), VALUES[kind])
    interrupt(tmp_path / "r", {kind: VALUES[kind]})
    with begin(tmp_path / "r", resume=True) as again:
        assert same(again.step(kind, lambda: pytest.fail("computed again")), VALUES[kind])


def test_an_unstorable_value_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot store a set"), begin(tmp_path / "r") as run:
        run.step("s", lambda: {1, 2})


@pytest.mark.parametrize("cut", [0, 4, 30, -1])
def test_a_truncated_step_is_computed_again_and_said(
    tmp_path: Path, cut: int, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt(tmp_path / "r", {"good": {"x": np.ones(100)}, "bad": {"x": np.ones(100)}})
    path = tmp_path / "r" / "steps" / step_file("bad")
    data = path.read_bytes()
    path.write_bytes(data[:cut])
    with begin(tmp_path / "r", resume=True) as again:
        again.step("good", lambda: pytest.fail("the whole step was computed again"))
        assert again.step("bad", lambda: {"x": np.zeros(100)})["x"].sum() == 0
    assert "'bad'" in capsys.readouterr().err


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    data = bytearray(pack({"x": np.ones(8)}, "x")[0])
    path.write_bytes(data)
    assert unpack(path, "x")["x"].sum() == 8
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        unpack(path, "x")


def test_a_step_file_of_another_name_is_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(pack(1, "x")[0])
    with pytest.raises(ValueError, match="holds the step 'x'"):
        unpack(path, "y")


# --- names stay inside the folder ---


@pytest.mark.parametrize(
    "name", ["../x", "/etc/x", "a/b", "", ".hidden", "a..b", "x\0", "ü", "a" * 200, 3, None]
)
def test_a_name_cannot_leave_the_folder(tmp_path: Path, name: object) -> None:
    with pytest.raises(InputError, match="no name for"):
        safe_name(name, "a table")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "..", ".", "x\0", "ü" * 300, "con"])
def test_any_step_name_becomes_one_file_in_steps(tmp_path: Path, name: str) -> None:
    with begin(tmp_path / "r") as run:
        run.step(name, lambda: 1)
        run.step(name + "2", lambda: 2)
        assert len(list((tmp_path / "r" / "steps").iterdir())) == 2
        assert run.step(name, lambda: 3) == 1
    assert {p.name for p in tmp_path.iterdir()} == {"r"}


def test_a_linked_steps_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    interrupt(tmp_path / "r", {"a": 1})
    for left in (tmp_path / "r" / "steps").iterdir():
        left.unlink()
    (tmp_path / "r" / "steps").rmdir()
    (tmp_path / "r" / "steps").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PerpendError, match="is a link"):
        begin(tmp_path / "r", resume=True)
    assert not list((tmp_path / "elsewhere").iterdir())


# --- refusals ---


def test_resuming_another_request_names_the_differences(tmp_path: Path) -> None:
    interrupt(tmp_path / "r", {"a": 1})
    other = {"name": "tiny", "weights_sha256": "ff"}
    with pytest.raises(
        PerpendError, match=r"model\.weights_sha256: it has ab, you ask for ff; length: .* 192.* 256"
    ):
        begin(tmp_path / "r", resume=True, model=other, length=256)
    with begin(tmp_path / "r", resume=True) as again:
        assert again.step("a", lambda: 2) == 1


def test_differences_tell_one_from_true_and_see_missing_keys() -> None:
    assert differences({"a": 1, "b": 2}, {"a": True, "c": {"d": 1}}) == [
        ("a", "1", "True"),
        ("b", "2", "nothing"),
        ("c", "nothing", "{'d': 1}"),
    ]
    assert differences({"a": [1]}, {"a": [1]}) == []


def test_two_runs_in_one_folder_are_refused(tmp_path: Path) -> None:
    with begin(tmp_path / "r") as run:
        run.step("a", lambda: 1)
        with pytest.raises(PerpendError, match=f"in use by another run \\(process {os.getpid()}\\)"):
            begin(tmp_path / "r", resume=True)
        finish(run)


def test_a_finished_folder_is_not_written_over(tmp_path: Path) -> None:
    with begin(tmp_path / "r") as run:
        finish(run)
    before = (tmp_path / "r" / "run.json").read_bytes()
    with pytest.raises(PerpendError, match="finished run"):
        begin(tmp_path / "r")
    with pytest.raises(AlreadyFinished) as caught:
        begin(tmp_path / "r", resume=True)
    assert caught.value.run.results == {"sink": {"mass": 0.5}}
    assert (tmp_path / "r" / "run.json").read_bytes() == before


def test_nothing_to_resume_is_said(tmp_path: Path) -> None:
    with pytest.raises(PerpendError, match="no unfinished run"):
        begin(tmp_path / "new", resume=True)
    assert not (tmp_path / "new").exists()


# --- damage ---


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]", b"{}", b'{"command": 3}', b"[" * 100_000])
def test_a_corrupt_document_is_an_error_that_changes_nothing(tmp_path: Path, content: bytes) -> None:
    with begin(tmp_path / "r") as run:
        finish(run)
    (tmp_path / "r" / "run.json").write_bytes(content)
    before = {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir()}
    for attempt in (lambda: Run.open(tmp_path / "r"), lambda: begin(tmp_path / "r", resume=True)):
        with pytest.raises(PerpendError, match=r"run\.json"):
            attempt()
    with pytest.raises(PerpendError):
        begin(tmp_path / "r")
    assert {p.name: p.read_bytes() for p in (tmp_path / "r").iterdir() if p.name != ".lock"} == before


def test_a_corrupt_partial_is_an_error_that_keeps_the_steps(tmp_path: Path) -> None:
    interrupt(tmp_path / "r", {"a": 1})
    (tmp_path / "r" / "partial.json").write_text("{")
    with pytest.raises(PerpendError, match=r"partial\.json is damaged"):
        begin(tmp_path / "r", resume=True)
    assert len(list((tmp_path / "r" / "steps").iterdir())) == 1


@pytest.mark.parametrize("name", ["arrays.safetensors", "layers.csv"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damaged_results_are_named_and_the_rest_is_readable(tmp_path: Path, name: str, damage: str) -> None:
    with begin(tmp_path / "r") as run:
        finish(run)
    path = tmp_path / "r" / name
    if damage == "cut":
        path.write_bytes(path.read_bytes()[:-5])
    else:
        path.unlink()
    back = Run.open(tmp_path / "r")
    assert back.results["sink"]["mass"] == 0.5
    reads = {
        "arrays.safetensors": lambda: back.arrays["signatures"],
        "layers.csv": lambda: back.tables["layers"],
    }
    with pytest.raises(PerpendError, match=f"{name} is (damaged|missing)"):
        reads.pop(name)()
    next(iter(reads.values()))()


# --- JSON ---


def test_json_holds_no_nan_and_takes_scalars_of_all_kinds(tmp_path: Path) -> None:
    value = {
        "nan": float("nan"), "inf": np.inf, "np": np.float32(0.5), "torch": torch.tensor(2),
        "array": np.eye(2),
        3: (np.int64(1), None), "dtype": torch.bfloat16, "bool": np.True_, "path": Path("a"),
        "device": torch.device("cpu"),
    }  # fmt: skip
    assert plain(value) == {
        "nan": None, "inf": None, "np": 0.5, "torch": 2, "array": [[1.0, 0.0], [0.0, 1.0]], "3": [1, None],
        "dtype": "bfloat16", "bool": True, "path": "a", "device": "cpu",
    }  # fmt: skip
    with pytest.raises(InputError, match="JSON cannot hold a object"):
        plain({"x": object()})
    with begin(tmp_path / "r") as run:
        run.finish({"x": np.nan}, {}, [])
    text = (tmp_path / "r" / "run.json").read_text()
    assert json.loads(text, parse_constant=lambda c: pytest.fail(c))["results"] == {"x": None}


# --- kill, disk full, unwritable: the real things ---

WORKER = """
import sys, time
import numpy as np, pandas as pd
from perpend.runs import Run
folder, resume = sys.argv[1], sys.argv[2] == "resume"
with Run.start(folder, command="mine", request={"model": "tiny"}, resume=resume) as run:
    total = np.zeros(1000)
    for block in range(60):
        def compute():
            print(block, flush=True)
            time.sleep(0.005)
            return {"sum": np.random.default_rng(block).normal(size=1000)}
        total += run.step(f"block-{block}", compute)["sum"]
    run.array("total", total)
    run.table("t", pd.DataFrame({"x": total}))
    run.finish({"total": total.sum()}, {}, [])
"""


def worker(folder: Path, how: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, str(folder), how],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_kill_nine_at_any_moment_resumes_to_identical_results(tmp_path: Path) -> None:
    whole = worker(tmp_path / "whole", "start")
    assert whole.communicate()[0].split() == [str(b) for b in range(60)]
    computed: list[str] = []
    rng = np.random.default_rng(0)
    for attempt in range(6):
        process = worker(tmp_path / "killed", "resume" if attempt else "start")
        if attempt < 5:
            assert process.stdout is not None
            first = process.stdout.readline().strip()
            time.sleep(float(rng.uniform(0.0, 0.08)))
            process.send_signal(signal.SIGKILL)
            computed += [first, *process.communicate()[0].split()]
            assert process.returncode == -signal.SIGKILL
            assert not (tmp_path / "killed" / "run.json").exists()
        else:
            out, err = process.communicate()
            assert process.returncode == 0, err
            computed += out.split()
    assert set(computed) == {str(b) for b in range(60)}
    assert len(computed) <= 60 + 5  # a kill costs at most the step under way
    for name in ("arrays.safetensors", "t.csv"):
        assert (tmp_path / "killed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert Run.open(tmp_path / "killed").results == Run.open(tmp_path / "whole").results
    assert not list((tmp_path / "killed").glob(".*"))


@pytest.fixture
def small_disk(tmp_path: Path):
    """A tmpfs of one megabyte."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("mounting a small tmpfs needs root")
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True
    )
    if mount.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mount.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def test_a_full_disk_is_said_and_loses_nothing(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with begin(small_disk / "r") as run:
        run.step("small", lambda: {"x": np.ones(10)})
        filler.write_bytes(b"\0" * 900_000)
        with pytest.raises(PerpendError, match="no space left"):
            run.step("large", lambda: {"x": np.ones(100_000)})
    assert [p.name for p in (small_disk / "r" / "steps").iterdir()] == [step_file("small")]
    filler.unlink()
    with begin(small_disk / "r", resume=True) as again:
        again.step("small", lambda: pytest.fail("lost"))
        again.step("large", lambda: {"x": np.ones(1000)})
        finish(again)
    assert Run.open(small_disk / "r").results


def test_a_disk_that_fills_at_the_end_keeps_the_run_resumable(small_disk: Path) -> None:
    filler = small_disk / "filler"
    with begin(small_disk / "r") as run:
        run.step("small", lambda: {"x": np.ones(10)})
        run.array("big", np.ones(100_000))
        filler.write_bytes(b"\0" * 900_000)
        with pytest.raises(PerpendError, match="no space left"):
            finish(run)
    filler.unlink()
    with begin(small_disk / "r", resume=True) as again:
        again.step("small", lambda: pytest.fail("lost"))
        finish(again)


def test_an_unwritable_place_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(PerpendError, match="choose another folder, out="):
        begin(tmp_path / "file")
    with pytest.raises(PerpendError, match="choose another folder, out="):
        begin(tmp_path / "file" / "below")
    assert (tmp_path / "file").read_text() == "x"


def test_a_folder_without_write_permission_is_refused() -> None:
    if os.name != "posix" or os.geteuid() != 0:
        pytest.skip("becoming a user without rights needs root")
    code = (
        "import os, sys\n"
        "from perpend.runs import Run\n"
        "os.setuid(65534)\n"
        "Run.start(sys.argv[1], command='x', request={})"
    )
    with tempfile.TemporaryDirectory() as closed:
        os.chmod(closed, 0o755)  # listed by everyone, written by root only
        for out in (closed, f"{closed}/new"):
            done = subprocess.run([sys.executable, "-c", code, out], capture_output=True, text=True)
            assert "PerpendError: cannot" in done.stderr
            assert "choose a folder you may write to" in done.stderr
        assert not os.listdir(closed)


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x"
    write_atomically(path, "old")

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(PerpendError, match="Input/output error"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x"]


def test_a_report_that_fails_does_not_cost_the_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(run: object) -> str:
        raise ZeroDivisionError("in a figure")

    monkeypatch.setattr("perpend.report.page.build", broken)
    with (
        pytest.raises(PerpendError, match=r"is complete, but its report.*in a figure"),
        begin(tmp_path / "r") as run,
    ):
        finish(run)
    assert Run.open(tmp_path / "r").results
