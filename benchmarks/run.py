"""perpend beside the tools people use today, job by job: one command, one file of results, one page.

    python benchmarks/run.py                                    # everything; goes on where it was stopped
    python benchmarks/run.py --quick --out quick.json           # the shortest length, 3 rounds
    python benchmarks/run.py --jobs attention updates --lengths 256 --layers 2 4
    python benchmarks/run.py --stored --write                   # rewrite docs/benchmarks.md, measure nothing

Jobs are the files of peers/jobs. Models are random Llama blocks of SmolLM2-135M's dimensions: a cell asks
for a ratio of the same work, not for a text. Lengths are run at the first of --layers (at 2,048 tokens
and more with half as many, since rows T × T grow with T²); the other layers, and the numbers of
sequences, at the shortest length. A run reads 1,024 tokens of each sequence or, of longer ones, one
batch: four passes at 256 tokens, whose time is given by the pass. Each contender is a process of its own,
in its own virtual environment where it is a package that perpend does not need, made on first use in
--environments. One thread, processor time, alternating rounds, medians of ratios to the plain pass of the
same round; the plain pass against itself is the A/A row. After every three rounds all processes start
anew: where a process happens to lie in memory is 1 or 2 % of its time, and one draw of it would stay in
every round. Memory, in processes of its own, is the weights and what a run adds at its peak to what the
process held: packages are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from peers.jobs import Job, jobs
from peers.page import page, rewritten
from peers.race import Workers, race
from peers.tools import make_model

DOCS = Path(__file__).resolve().parent.parent / "docs"
LONG = 2048  # tokens from which on a model of half the layers is enough
FRESH = 3  # rounds after which the processes start anew


def machine() -> dict[str, Any]:
    """Processor, cores, whether it has units for bfloat16 (None where the system does not say), allocator."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    fields = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "bf16": any("bf16" in flag for flag in flags) if flags else None,
        "python": platform.python_version(),
        "keeps_freed": platform.libc_ver()[0] == "glibc",  # see KEEPING in peers/race.py
    }


def cells(job: Job, lengths: list[int], layers: list[int], sequences: list[int]) -> list[dict[str, int]]:
    """The sizes a job is run at, cheapest first."""
    if job.sizes is not None:
        return [dict(sizes) for sizes in job.sizes]
    short = min(lengths)
    grid = [(layers[0] if t < LONG else max(1, layers[0] // 2), sequences[0], t) for t in lengths]
    grid += [(count, sequences[0], short) for count in layers[1:]]
    grid += [(layers[0], count, short) for count in sequences[1:]]
    names = ("layers", "sequences", "length")
    return [dict(zip(names, sizes)) for sizes in sorted(grid, key=lambda c: c[0] * c[1] * c[2])]


def stored(book: dict[str, Any], job: Job, sizes: dict[str, int]) -> dict[str, Any] | None:
    """The cell of the file, if it is there."""
    found = (cell for cell in book["cells"] if cell["job"] == job.name and cell["sizes"] == sizes)
    return next(found, None)


def blank(book: dict[str, Any], job: Job, sizes: dict[str, int]) -> dict[str, Any]:
    """A new cell, kept in the book."""
    cell = {"job": job.name, "sizes": sizes, "rounds": [], "added": {}, "gap": {}, "failed": {}}
    book["cells"].append(cell)
    return cell


def complete(book: dict[str, Any], job: Job, sizes: dict[str, int], rounds: int) -> bool:
    cell = stored(book, job, sizes)
    return cell is not None and len(cell["rounds"]) >= rounds


def save(book: dict[str, Any], file: Path) -> None:
    """Whole or not at all."""
    part = file.with_name(file.name + ".part")
    part.write_text(json.dumps(book, indent=None).replace('{"job"', '\n{"job"') + "\n", encoding="utf-8")
    part.replace(file)


def measure(book: dict[str, Any], options: argparse.Namespace, todo: list[tuple[Job, dict]]) -> None:
    """Race through the cells that are not complete, FRESH rounds at a time."""
    turns = [
        (job, sizes, rounds)
        for rounds in [*range(FRESH, options.rounds, FRESH), options.rounds]
        for job, sizes in todo
        if not complete(book, job, sizes, rounds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        workers = Workers(scratch, options.environments)
        models: dict[int, Path] = {}
        before = FRESH
        try:
            for number, (job, sizes, rounds) in enumerate(turns, 1):
                if rounds != before:
                    workers.stop()
                before = rounds
                cell = stored(book, job, sizes) or blank(book, job, sizes)
                layers = sizes["layers"] if job.sizes is None else 0
                if layers and layers not in models:
                    models[layers] = make_model(scratch / f"layers-{layers}", layers)
                    book["weights"][str(layers)] = (models[layers] / "model.safetensors").stat().st_size

                def keep() -> None:
                    book["versions"] |= workers.versions
                    save(book, options.out)

                began = time.monotonic()
                race(
                    job, cell, workers.run, scratch, str(models.get(layers, "")), rounds,
                    lambda name, base=job.baseline: name.startswith((*(options.only or [""]), base)), keep,
                )  # fmt: skip
                keep()
                spent = time.monotonic() - began
                print(f"{number}/{len(turns)} {job.name} {sizes} {spent:.0f} s", file=sys.stderr, flush=True)
        finally:
            workers.stop()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--jobs", nargs="+", choices=[*jobs()], metavar="JOB", help=f"of {', '.join(jobs())}")
    add("--lengths", type=int, nargs="+", default=[256, 1024, 4096], help="tokens a sequence")
    add("--layers", type=int, nargs="+", default=[2, 4, 8], help="the first for lengths, all for growth")
    add("--sequences", type=int, nargs="+", default=[1, 2, 4])
    add("--rounds", type=int, default=15)
    add("--only", nargs="+", metavar="CONTENDER", help="those whose names begin so, and what ratios are to")
    add("--quick", action="store_true", help="the shortest length at the first sizes, 3 rounds")
    add(
        "--out",
        type=Path,
        default=DOCS / "benchmarks.json",
        help="results; a run goes on from them",
    )
    add("--stored", action="store_true", help="measure nothing: what --out holds")
    add("--write", action="store_true", help="rewrite the tables of docs/benchmarks.md from --out")
    add("--environments", type=Path, default=Path.home() / ".cache" / "perpend" / "peers")
    options = parser.parse_args()
    if options.quick:
        options.rounds = min(options.rounds, 3)
        options.lengths, options.layers, options.sequences = (
            [min(options.lengths)], options.layers[:1], options.sequences[:1]
        )  # fmt: skip
    book = {"machine": machine(), "versions": {}, "weights": {}, "cells": []}
    if options.out.exists():
        book = json.loads(options.out.read_text(encoding="utf-8"))
    chosen = [job for name, job in jobs().items() if not options.jobs or name in options.jobs]
    todo = [
        (job, sizes)
        for job in chosen
        for sizes in cells(job, options.lengths, options.layers, options.sequences)
        if not complete(book, job, sizes, options.rounds)
    ]
    todo.sort(key=lambda one: one[1].get("layers", 0) * one[1].get("sequences", 0) * one[1].get("length", 0))
    if options.stored:
        todo = []
    if todo and book["machine"] != machine():
        raise SystemExit(f"{options.out} was measured on another machine; go on there, or give another --out")
    if todo:
        measure(book, options, todo)
    text = page(book)
    print(text)
    if options.write:
        file = DOCS / "benchmarks.md"
        file.write_text(rewritten(file.read_text(encoding="utf-8"), text), encoding="utf-8")


if __name__ == "__main__":
    main()
