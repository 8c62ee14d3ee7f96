"""The options that verbs share: one spelling, one default, one explanation each.

    @verb("perpend attention --text book.txt", "perpend attention gpt2 --window 32")
    @model_options
    @text_options(sequences=64)
    @row_options
    @seed_options((0, 1, 2))
    @run_options
    @click.option("--triples", type=int, default=50_000, show_default=True)
    def command(**options):
        '''How much of each attention row is sink, and what the rest says.'''
        job = Job("attention", options)

Importing this module imports click and nothing heavy.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from perpend.errors import near_names

F = TypeVar("F", bound=Callable[..., Any])

INVOCATION = "perpend.invocation"  # where a click context keeps the words that started it

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")


# Arguments cannot carry help in click; these are told by name wherever they occur.
ARGUMENTS = {
    "model": "A short name (`perpend models` lists them), a hub name, a folder or a .gguf file.  "
    "[default: SmolLM2-135M-Instruct, which needs no model hub]",
}


class Near(click.Choice):  # type: ignore[type-arg]
    """A choice that answers an unknown value with the nearest known ones."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            known = [str(choice) for choice in self.choices]
            near = near_names(str(value), known, cutoff=0.4)
            hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
            self.fail(f"unknown {value!r}{hint} known: {', '.join(known)}", param, ctx)


class Number(click.FloatRange):
    """A finite number within bounds, which NaN would pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value!r} is no finite number", param, ctx)
        return number


class Seeds(click.ParamType):
    """Seeds as a list: `0`, `0,1,2` or `0-4`."""

    name = "seeds"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        seeds: list[int] = []
        for part in value.split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                self.fail(f"{value!r} is no list of seeds; write 0 or 0,1,2 or 0-4", param, ctx)
            low, high = int(first), int(last if dash else first)
            if high < low:
                self.fail(f"{part.strip()!r} runs backwards; write {high}-{low}", param, ctx)
            if high >= 2**32:
                self.fail(f"{value!r} has a seed above {2**32 - 1}, the largest", param, ctx)
            if len(seeds) + high - low >= 1000:
                self.fail(f"{value!r} is more than 1000 seeds", param, ctx)
            seeds += range(low, high + 1)
        if not seeds or len(set(seeds)) != len(seeds):
            self.fail(f"{value!r} repeats a seed or names none", param, ctx)
        return tuple(seeds)


class Verb(click.Command):
    """A command whose help starts with examples that run as they are."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **more: Any) -> None:
        super().__init__(*args, **more)
        self.examples = tuple(examples)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Example" if len(self.examples) == 1 else "Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")
        formatter.write_paragraph()
        super().format_help(ctx, formatter)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        told = [
            (f"[{p.human_readable_name.upper()}]", ARGUMENTS[p.name]) for p in self.params if _explained(p)
        ]
        if told:
            with formatter.section("Arguments"):
                formatter.write_dl(told)
        super().format_options(ctx, formatter)

    def invoke(self, ctx: click.Context) -> Any:
        from perpend import progress, refuse
        from perpend.errors import PerpendError

        progress.set_quiet(bool(ctx.params.get("quiet")))
        try:
            refuse.request(str(self.name), ctx.params)  # before torch is imported, which takes seconds
            return super().invoke(ctx)
        except PerpendError as error:
            error.args = (as_flags(str(error), self.params), *error.args[1:])
            raise
        finally:
            progress.set_quiet(False)  # a program that runs verbs goes on hearing what concerns it


_NAMED = re.compile(r"(?<![\w./:,'\"-])([a-z_]+)=(?![(\[{])((['\"]).*?\3|[\w.:/+-]*\w)?")


def as_flags(message: str, params: Sequence[click.Parameter]) -> str:
    """A message of the library, `dtype=float32`, in the words of a command line, `--dtype float32`.

    The library names a parameter as Python writes it, with its `=`; options among `params` are told anew.
    """
    flags = {p.name: p for p in params if isinstance(p, click.Option)}

    def told(found: re.Match[str]) -> str:
        option, value = flags.get(found[1]), (found[2] or "").strip("'\"")
        if option is None or (option.is_flag and value not in ("", "True")):
            return found[0]
        name = next((one for one in option.opts if one.startswith("--")), option.opts[0])
        return f"{name} {value}" if value and not option.is_flag else name

    return _NAMED.sub(told, message)


def _explained(param: click.Parameter) -> bool:
    return isinstance(param, click.Argument) and param.name in ARGUMENTS and not param.required


def verb(*examples: str, **more: Any) -> Callable[[Callable[..., Any]], Verb]:
    """Makes a function a verb; the module's name is the verb's, its docstring the explanation."""
    if not examples:
        raise ValueError("a verb's help starts with an example: give one")
    more.setdefault("context_settings", {"help_option_names": ["-h", "--help"], "max_content_width": 100})

    def decorate(function: Callable[..., Any]) -> Verb:
        name = function.__module__.rpartition(".")[2].replace("_", "-")
        return click.command(more.pop("name", name), cls=Verb, examples=examples, **more)(function)

    return decorate


def model_options(function: F) -> F:
    """MODEL and how to load it."""
    return _all(
        function,
        click.argument("model", required=False, default=None),
        click.option("--revision", help="Branch, tag or commit of a hub model."),
        loading_options,
    )


def loading_options(function: F) -> F:
    """How models are loaded, of verbs that name them in their own way."""
    return _all(
        function,
        click.option(
            "--dtype",
            type=Near(DTYPES),
            help="Number type of the weights; auto is the checkpoint's own.  [default: float32 on a CPU, "
            "auto on an accelerator]",
        ),
        click.option(
            "--device",
            help="cpu, cuda, cuda:1, mps, or auto: spread over all devices, then memory, then the disk.  "
            "[default: the fastest there is]",
        ),
        click.option(
            "--max-memory",
            metavar="LIST",
            help="What --device auto may use, as 0=20GiB,cpu=64GiB; the rest of the weights is left on the "
            "disk.  [default: what is free]",
        ),
        click.option(
            "--trust-remote-code",
            is_flag=True,
            help="Run code that comes with the model. Off unless asked for.",
        ),
    )


def text_options(*, sequences: int = 64, length: int = 192, batch: int = 8) -> Callable[[F], F]:
    """What text the model reads, and how it is cut."""
    return lambda function: _all(
        function,
        click.option("--text", help="A file, folder, .jsonl or named data set.  [default: built-in English]"),
        click.option(
            "--sequences",
            type=click.IntRange(1),
            default=sequences,
            show_default=True,
            help="How many sequences.",
        ),
        click.option(
            "--length",
            type=click.IntRange(2),
            default=length,
            show_default=True,
            help="Tokens in a sequence.",
        ),
        click.option(
            "--bos",
            type=Near(("auto", "always", "never")),
            default="auto",
            show_default=True,
            help="Whether each sequence opens with the beginning-of-text token; auto: as the tokenizer does.",
        ),
        click.option(
            "--batch",
            type=click.IntRange(1),
            default=batch,
            show_default=True,
            help="Sequences per forward pass.",
        ),
    )


def image_options(function: F) -> F:
    """What an image model reads in place of text."""
    return click.option(
        "--images",
        metavar="DIR",
        help="A folder of images, for an image model, instead of --text; --sequences counts images.",
    )(function)


def row_options(function: F) -> F:
    """The support of the attention rows."""
    return _all(
        function,
        click.option(
            "--window",
            type=click.IntRange(2),
            help="Keys kept: rows are re-closed on the first WINDOW positions, from queries after them.  "
            "[default: 64; all keys in an encoder or an image model]",
        ),
        click.option(
            "--sink",
            default="first",
            show_default=True,
            help="Which keys are the sink: auto, first, first:N, cls, sep, virtual, or positions as 0,3.",
        ),
    )


def seed_options(default: Sequence[int] = (0,)) -> Callable[[F], F]:
    """Seeds, one or several."""
    return lambda function: _all(
        function,
        click.option(
            "--seed",
            "--seeds",
            "seeds",
            type=Seeds(),
            default=",".join(map(str, default)),
            show_default=True,
            help="Seeds, as 0 or 0,1,2 or 0-4. Seed 0 reads the text in order; others shuffle it.",
        ),
    )


def bootstrap_option(default: int, more: str = "") -> Callable[[F], F]:
    """How many resamples of the text the intervals take; `more` is said of the verb."""
    return click.option(
        "--bootstrap",
        type=click.IntRange(0),
        default=default,
        show_default=True,
        help=f"Resamples of the text for the intervals; 0 for none.{more and ' ' + more}",
    )


def run_options(function: F) -> F:
    """Where the run goes and how it is told."""
    return _all(
        function,
        click.option("--out", metavar="DIR", help="Run folder.  [default: runs/<verb>-<model>-<n>]"),
        click.option(
            "--resume", is_flag=True, help="Continue an interrupted run; it must be the same request."
        ),
        json_option,
        click.option("--quiet", is_flag=True, help="No progress and no remarks on stderr."),
        click.option("--plan", is_flag=True, help="Show the cost and stop: passes, tokens, time, memory."),
    )


def json_option(function: F) -> F:
    """`--json` alone, for verbs that make no run."""
    return click.option("--json", "json", is_flag=True, help="One JSON document on stdout.")(function)


def _all(function: F, *decorators: Callable[[Any], Any]) -> F:
    """Applies decorators so that help lists them in the order given."""
    for decorate in reversed(decorators):
        function = decorate(function)
    return function
