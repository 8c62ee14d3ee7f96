"""`perpend report RUN [RUN …]`: builds a run's report again, or lays several runs side by side."""

from __future__ import annotations

from typing import Any

import click

from perpend.options import json_option, verb


@verb(
    "perpend report runs/attention-smollm2-135m-instruct-1",
    "perpend report runs/attention-gpt2-1 runs/attention-pythia-160m-1 --out compared.html",
)
@click.argument("runs", nargs=-1, required=True, metavar="RUN [RUN ...]")
@click.option(
    "--out", metavar="FILE", help="The page to write.  [default: report.html in RUN, comparison.html here]"
)
@json_option
def command(runs: tuple[str, ...], out: str | None, json: bool) -> None:
    """One page for a run, or several runs side by side.

    One RUN: its report.html is made again from its numbers, with the figures of this version of perpend.
    Several: the settings that differ, the findings side by side, each figure overlaid or beside the others. A
    folder without a finished run is refused.
    """
    from pathlib import Path

    from perpend import output
    from perpend.errors import InputError
    from perpend.report.page import build, compare
    from perpend.runs import Run
    from perpend.runs.files import write_atomically

    if len({Path(run).resolve() for run in runs}) != len(runs):
        raise InputError("a run is named twice; name each once")
    opened = [Run.open(run) for run in runs]
    if len(opened) == 1:
        target, page = Path(out) if out else opened[0].folder / "report.html", build(opened[0])
    else:
        target, page = Path(out or "comparison.html"), compare(opened)
    write_atomically(target, page)
    told: dict[str, Any] = {"report": str(target), "bytes": len(page.encode()), "runs": list(map(str, runs))}
    output.answer(told, f"report: {target} ({len(page.encode()) / 1e6:.1f} MB)")
