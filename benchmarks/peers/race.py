"""Contenders in processes and environments of their own, which take turns, round by round."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from peers.jobs import Job
from peers.tools import BESIDE, MODEL_PACKAGES, PACKAGES

REFERENCE = "perpend"  # whose answer the others' must be
ROOT = Path(__file__).resolve().parent.parent
SURROUNDINGS = {
    **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
}
# For time, an allocator (glibc's) that keeps what is freed. As it comes it gives pages back after each pass
# or not, by luck of what else lies on the heap: 6 % of a short plain pass.
KEEPING = {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(2**25)}
# For memory, one that maps every tensor by itself and gives it back when it is freed, so that what is
# resident is what is alive: with the other one the peak is an accident of the heap, 30 % between equal runs.
SHARP = {
    "MALLOC_TRIM_THRESHOLD_": str(2**16),
    "MALLOC_MMAP_THRESHOLD_": str(2**16),
    "MALLOC_MMAP_MAX_": str(2**20),
    "MALLOC_ARENA_MAX": "1",
}


def environment(package: str | None, base: Path) -> str:
    """The Python of a contender; its virtual environment is made on first use, in `base`."""
    if package is None:
        return sys.executable
    folder = base / package
    python = folder / "bin" / "python"
    if not (folder / "ready").exists():
        print(f"making an environment with {package} …", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        words = ["-m", "pip", "install", "-q", "-c", ROOT.parent / "constraints.txt", package]
        subprocess.run([python, *words, *BESIDE.get(package, MODEL_PACKAGES)], check=True)
        (folder / "ready").touch()
    return str(python)


class Worker:
    """A contender's process, with an `allocator`. RuntimeError, with its last words, if it ends."""

    def __init__(self, python: str, log: Path, allocator: Mapping[str, str] = KEEPING) -> None:
        self.log = log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [python, "-m", "peers.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                env={**os.environ, **SURROUNDINGS, **allocator, "PYTHONPATH": _path()},
            )
        self.versions = self._reply()["versions"]

    def _reply(self) -> dict[str, Any]:
        line = self.process.stdout.readline()
        if not line:
            told = self.log.read_text(errors="replace").strip().splitlines()
            raise RuntimeError(told[-1] if told else f"it ended with code {self.process.wait()}")
        return json.loads(line)

    def run(self, **request: Any) -> dict[str, Any]:
        try:
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # its last words are read below
        reply = self._reply()
        if "error" in reply:
            raise RuntimeError(reply["error"])
        return reply

    def stop(self) -> None:
        """Some tools take minutes to leave by themselves; nothing is left to write."""
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def _path() -> str:
    """Where the workers find `peers`, before whatever the caller's own path holds."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))


class Workers:
    """Two processes a contender, for time and for memory, started when first asked for, kept until `stop`."""

    def __init__(self, scratch: Path, environments: Path) -> None:
        self.scratch, self.environments = scratch, environments
        self.running: dict[tuple[str, bool], Worker] = {}
        self.versions: dict[str, str] = {}
        self.absent: dict[str, str] = {}  # packages that did not install, and why: tried once

    def run(self, contender: str, *, kind: str, **request: Any) -> dict[str, Any]:
        """One request to the contender's process. RuntimeError if it fails, or cannot be had."""
        key = (contender, kind == "memory")
        if key not in self.running:
            package = PACKAGES.get(contender)
            if package in self.absent:
                raise RuntimeError(self.absent[package])
            try:
                python = environment(package, self.environments)
            except subprocess.CalledProcessError as error:
                self.absent[package] = f"{package} did not install: pip ended with {error.returncode}"
                raise RuntimeError(self.absent[package]) from error
            log = self.scratch / f"{contender.replace(' ', '-')}-{'memory' if key[1] else 'time'}.log"
            worker = Worker(python, log, SHARP if key[1] else KEEPING)
            self.running[key] = worker
            own = worker.versions if package is None else {package: worker.versions.get(package, "?")}
            self.versions |= own
        try:
            return self.running[key].run(contender=contender, kind=kind, **request)
        except RuntimeError:
            if self.running[key].process.poll() is not None:
                del self.running[key]  # it died; another job may start it anew
            raise

    def stop(self) -> None:
        """End the processes; the next request starts new ones."""
        for worker in self.running.values():
            worker.stop()
        self.running.clear()


def gap(theirs: np.ndarray, ours: np.ndarray) -> float:
    """How far an answer is from the reference: the largest difference over the largest value of its column
    (last axis), the worst column; for masks the share of entries that differ. Infinite if shapes differ."""
    if theirs.shape != ours.shape or not np.isfinite(theirs).all():
        return float("inf")
    if ours.dtype == bool:
        return float((theirs != ours).mean())
    columns = (-1, ours.shape[-1] if ours.ndim > 1 else 1)
    theirs, ours = theirs.reshape(columns).astype(float), ours.reshape(columns).astype(float)
    return float((np.abs(theirs - ours).max(0) / np.abs(ours).max(0)).max())


def race(
    job: Job,
    cell: dict[str, Any],
    run: Callable[..., dict[str, Any]],
    scratch: Path,
    folder: str,
    rounds: int,
    only: Callable[[str], bool],
    save: Callable[[], None],
) -> None:
    """Fill a cell: a warm-up whose answers are compared, memory once, rounds until there are so many.

    `cell`: {job, sizes, rounds: [{contender: seconds}], added (bytes), gap, failed}, kept by `save` after
    each round. `run(contender, **request)`: one run. The order is reversed every other round. The arrays of a
    job without a model are small beside the packages: their memory is not looked at.
    """
    able = [job.baseline, job.again] + [name for name in job.contenders if name != job.baseline]
    able = [name for name in able if callable(job.maker(name)) and only(name)]
    request = {"job": job.name, "sizes": cell["sizes"], "folder": folder}
    cell["failed"], answers = {}, {}
    for name in able:
        file = scratch / "answer.npy"
        try:
            run(name, **request, kind="answer", file=str(file))
            if job.sizes is None and name not in cell["added"]:
                cell["added"][name] = run(name, **request, kind="memory")["added"]
        except RuntimeError as error:
            cell["failed"][name] = str(error)
            continue
        answers[name] = np.load(file)
    cell["gap"] |= gaps(answers)
    able = [name for name in able if name not in cell["failed"]]
    while len(cell["rounds"]) < rounds:
        order = able if len(cell["rounds"]) % 2 else able[::-1]
        seen = {}
        for name in order:
            try:
                seen[name] = round(run(name, **request, kind="time")["seconds"], 6)
            except RuntimeError as error:
                if name == job.baseline:
                    raise
                cell["failed"][name] = str(error)
        able = [name for name in able if name in seen]
        cell["rounds"].append(seen)
        save()


def gaps(answers: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Each answer's gap to the reference's; contenders without an answer (a plain pass) have none."""
    if REFERENCE not in answers:
        return {}
    return {
        name: gap(answer, answers[REFERENCE])
        for name, answer in answers.items()
        if name != REFERENCE and answer.size
    }
