"""Progress with throughput, on stderr: a bar on a terminal, else (a log file) a line now and then; `--quiet`
silences both.

    with progress(total=tokens, unit="tokens", description="survey") as advance:
        advance(192)

Surveys take a function of this form and default to `silent`, so that a library call prints nothing.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from perpend import distributed

Advance = Callable[[float], None]
Progress = Callable[..., AbstractContextManager[Advance]]

EVERY = 30.0  # seconds between the lines of a log

_quiet = False
_told: dict[str, float] = {}  # description -> when its last line was written


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
    """A bar with done, total, units per second and time left; `total=None` counts without an end.

    Without a terminal a line at the start and then one every half minute at most, also where the same
    loop starts again and again.
    """
    if _quiet or not distributed.is_main():
        with silent() as advance:
            yield advance
        return
    if not sys.stderr.isatty():
        yield _lines(total, unit, description)
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


def _lines(total: float | None, unit: str, description: str) -> Advance:
    """The function that counts and writes a line when one is due; the first line is written here."""
    started, done = time.monotonic(), 0.0

    def tell(now: float) -> None:
        if now - _told.get(description, -EVERY) < EVERY:
            return
        _told[description] = now
        end = "" if total is None else f" of {short(total)}"
        rate, left = done / max(now - started, 1e-9), ""
        if done:
            left = f", {short(rate)} {unit}/s"
            left += f", about {duration((total - done) / rate)} left" if total and total > done else ""
        note(f"{description}: {short(done)}{end} {unit}{left}")

    def advance(amount: float = 1) -> None:
        nonlocal done
        done += amount
        tell(time.monotonic())

    tell(started)
    return advance


def duration(seconds: float) -> str:
    """0.4 s, 12 s, 3 min 20 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


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
