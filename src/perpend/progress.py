"""Progress with throughput, on stderr, for people only: silent without a terminal there or with `--quiet`.

    with progress(total=tokens, unit="tokens", description="survey") as advance:
        advance(192)

Surveys take a function of this form and default to `silent`, so that a library call prints nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from perpend import distributed

Advance = Callable[[float], None]
Progress = Callable[..., AbstractContextManager[Advance]]

_quiet = False


def set_quiet(quiet: bool) -> None:
    """What `--quiet` sets, for the whole process."""
    global _quiet
    _quiet = quiet


@contextmanager
def silent(total: float | None = None, unit: str = "steps", description: str = "") -> Iterator[Advance]:
    """Progress that shows nothing."""
    yield lambda amount=1: None


@contextmanager
def progress(total: float | None = None, unit: str = "steps", description: str = "") -> Iterator[Advance]:
    """A bar with done, total, units per second and time left; `total=None` counts without an end."""
    if _quiet or not sys.stderr.isatty() or not distributed.is_main():
        with silent() as advance:
            yield advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.text import Text

    class Rate(ProgressColumn):
        """Units per second."""

        def render(self, task: object) -> Text:
            speed = getattr(task, "finished_speed", None) or getattr(task, "speed", None)
            return Text("" if speed is None else f"{short(speed)} {unit}/s", style="progress.data.speed")

    class Done(ProgressColumn):
        """Done of total, in units."""

        def render(self, task: object) -> Text:
            completed, all_of_it = getattr(task, "completed", 0), getattr(task, "total", None)
            end = "" if all_of_it is None else f"/{short(all_of_it)}"
            return Text(f"{short(completed)}{end} {unit}", style="progress.download")

    columns = (TextColumn("{task.description}"), BarColumn(), Done(), Rate(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda amount=1: bar.advance(task, amount)


def note(message: str) -> None:
    """A line for the reader on stderr, from the main process, unless `--quiet`."""
    if not _quiet and distributed.is_main():
        print(message, file=sys.stderr, flush=True)


def short(number: float) -> str:
    """A count at three digits: 950, 12.3k, 4.56M."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= size:
            return f"{number / size:.3g}{letter}"
    return f"{number:.3g}"
