"""The process of one contender: a request on each line of stdin, an answer on each line of stdout.

A request is {job, contender, sizes, folder, kind, file}; the reply {seconds}, {added} or {error}. Kinds of
run: `answer` warms up and writes its answer to `file`; `time`, after it, counts the process's own processor
time; `memory` says how many bytes the peak of resident memory lies above what the process held before, the
median of runs after those that fill what libraries keep. It asks for a process whose allocator gives back
what is freed, see SHARP in peers/race.py; null where the system does not tell.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from contextlib import nullcontext, suppress
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

from peers.jobs import Run, Setting, jobs

WARM, RUNS = 2, 5  # runs for memory: first those that are not looked at
# seconds that are timed: what takes less is repeated, else the clock and cold caches are its time
LEAST = 0.05

VERSIONS = (
    "perpend",
    "torch",
    "transformers",
    "transformer-lens",
    "nnsight",
    "pyvene",
    "numpy",
    "scipy",
    "scikit-bio",
)


def versions() -> dict[str, str]:
    """What of the packages that matter this environment has."""
    found = {}
    for name in VERSIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


def reset_peak() -> None:
    """Give back what is free and begin to count the peak anew, where the system can (Linux)."""
    gc.collect()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def resident() -> tuple[int, int] | None:
    """Resident bytes now, and at their highest since `reset_peak`; None where the system does not tell."""
    try:
        lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
        found = {words[0]: int(words[1]) * 1024 for words in lines if words[0] in ("VmRSS:", "VmHWM:")}
        return found["VmRSS:"], found["VmHWM:"]
    except (OSError, KeyError):
        return None


def added(run: Run) -> int | None:
    """Bytes that `run` adds at its peak to what the process holds."""
    seen = []
    for _ in range(WARM + RUNS):
        reset_peak()
        before = resident()
        run()
        after = resident()
        if before is None or after is None:
            return None
        seen.append(after[1] - before[0])
    return int(median(seen[WARM:]))


def seconds(run: Run) -> float:
    """Processor time of a run, threads included; of several in a row where one is short."""
    began, count = time.process_time(), 0
    while True:
        run()
        count += 1
        spent = time.process_time() - began
        if spent >= LEAST:
            return spent / count


def still() -> Any:
    """No gradients where torch is at work."""
    torch = sys.modules.get("torch")
    return torch.no_grad() if torch else nullcontext()


def save(answer: Any, file: str) -> None:
    import numpy as np

    np.save(file, np.array([]) if answer is None else np.asarray(answer))


def main() -> None:
    reply, sys.stdout = sys.stdout, sys.stderr
    known = jobs()
    print(json.dumps({"versions": versions()}), file=reply, flush=True)
    made_for, run, setting = None, None, None
    for line in sys.stdin:
        asked = json.loads(line)
        what = (asked["job"], asked["contender"], asked["sizes"])
        try:
            if made_for != what:
                made_for, run = None, None
                setting = Setting(asked["sizes"], asked["folder"])
                run = known[asked["job"]].maker(asked["contender"])(setting)
                made_for = what
            with still():
                if asked["kind"] == "memory":
                    told = {"added": added(run)}
                elif asked["kind"] == "answer":
                    save(run(), asked["file"])
                    told = {}
                else:
                    told = {"seconds": seconds(run) / setting.passes}
        except Exception as error:  # told to the parent, which goes on without this contender and says why
            told = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(told), file=reply, flush=True)


if __name__ == "__main__":
    main()
