"""`--tasks` and its companions: one spelling for every verb that can score what it has made.

    @add_tasks
    def command(**options): ...
        evaluation = perpend.evaluate(model, tokenizer, **task_options(options))

Importing this module imports click and nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from perpend.errors import InputError

if TYPE_CHECKING:
    from perpend.models.edit import Edit

F = TypeVar("F", bound=Callable[..., Any])

FILES = ("essays", "squad", "hotpotqa")


class Lengths(click.ParamType):
    """Token counts as a list: 4096 or 1024,2048,4096; 4k is 4096."""

    name = "lengths"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        lengths = []
        for part in value.split(","):
            number, unit = part.strip().lower(), 1
            if number.endswith("k"):
                number, unit = number[:-1], 1024
            if not number.isdecimal() or int(number) < 1:
                self.fail(f"{value!r} is no list of lengths; write 4096 or 1k,2k,4k", param, ctx)
            lengths.append(int(number) * unit)
        return tuple(dict.fromkeys(lengths))


def add_tasks(function: F | None = None, *, default: str | None = None) -> Any:
    """Gives a verb --tasks, --tasks-data, --tasks-limit, --tasks-shots, --tasks-lengths and --tasks-files."""

    def decorate(function: F) -> F:
        for option in reversed(
            (
                click.option(
                    "--tasks",
                    default=default,
                    show_default=default is not None,
                    help="Tasks, comma-separated: lambada, piqa, ..., commonsense, ruler, gsm8k, mmlu.",
                ),
                click.option("--tasks-data", metavar="DIR", help="Folder of the tasks' JSON-lines files."),
                click.option(
                    "--tasks-limit",
                    type=click.IntRange(1),
                    metavar="N",
                    help="The first N items of each task.  [default: all; 500 of generated ones]",
                ),
                click.option(
                    "--tasks-shots",
                    type=click.IntRange(0),
                    metavar="N",
                    help="Worked examples in the prompt.  [default: the task's own]",
                ),
                click.option(
                    "--tasks-lengths",
                    type=Lengths(),
                    default="4k",
                    show_default=True,
                    help="Tokens of the long-context tasks, as 1k,2k,4k.",
                ),
                click.option(
                    "--tasks-files",
                    multiple=True,
                    metavar="NAME=PATH",
                    help=f"Texts for long-context tasks ({', '.join(FILES)}). Repeatable.",
                ),
            )
        ):
            function = option(function)
        return function

    return decorate(function) if function is not None else decorate


def task_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """What `perpend.evaluate` takes, from the options of a verb with `add_tasks`."""
    files = {}
    for one in options.get("tasks_files") or ():
        name, equals, path = one.partition("=")
        if not equals:
            raise InputError(f"--tasks-files takes NAME=PATH, got {one!r}; names: {', '.join(FILES)}")
        files[name] = path
    seeds = options.get("seeds") or (0,)
    return {
        "tasks": options["tasks"],
        "data": options.get("tasks_data"),
        "limit": options.get("tasks_limit"),
        "fewshot": options.get("tasks_shots"),
        "lengths": options.get("tasks_lengths") or (4096,),
        "files": files,
        "batch": options.get("batch") or 8,
        "bos": options.get("bos") or "auto",
        "seed": seeds[0],
    }


def parse_edits(text: str) -> tuple[Edit, ...]:
    """Edits that act together, from one argument.

    A JSON file, or SITE:PARALLEL[:PERPENDICULAR], several joined by "+":
    `value.exclude_self:0`, `value.exclude_self:1:0`, `residual.attn:0+residual.mlp:0`.
    """
    from perpend.models.edit import Edit

    if text.endswith(".json") or Path(text).is_file():
        return (Edit.load(text),)
    edits = []
    for part in text.split("+"):
        site, *scales = part.strip().split(":")
        try:
            numbers = [float(scale) for scale in scales]
        except ValueError:
            numbers = []
        if not 1 <= len(numbers) <= 2:
            raise InputError(
                f"{text!r} is no edit; write SITE:PARALLEL or SITE:PARALLEL:PERPENDICULAR, such as "
                "value.exclude_self:0 or residual.mlp:1:0.5, or name a JSON file"
            )
        edits.append(Edit(site, *numbers))
    return tuple(edits)


@contextmanager
def all_edits(model: Any, edits: Sequence[Edit]) -> Iterator[None]:
    """Several edits at once."""
    from perpend.models.edit import edit

    with ExitStack() as stack:
        for one in edits:
            stack.enter_context(edit(model, one))
        yield
