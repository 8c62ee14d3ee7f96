"""`perpend VERB …`: verbs are found in perpend.commands, loaded when needed, and their errors made readable.

Exit codes: 0 done · 1 a check that was asked for failed · 2 bad input or usage · 70 a fault in perpend
itself · 130 interrupted, with the run kept for `--resume`.
"""

from __future__ import annotations

import difflib
import importlib
import os
import pkgutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import click

import perpend
from perpend import commands, distributed, output
from perpend.errors import PerpendError
from perpend.options import INVOCATION

FINE, FAILED, BAD_INPUT, FAULT, INTERRUPTED = 0, 1, 2, 70, 130


class Verbs(click.Group):
    """The group: one verb a module in perpend.commands, whose `command` it is."""

    def list_commands(self, ctx: click.Context | None) -> list[str]:
        found = (module.name for module in pkgutil.iter_modules(commands.__path__))
        return sorted(name.replace("_", "-") for name in found if not name.startswith("_"))

    def get_command(self, ctx: click.Context | None, name: str) -> click.Command | None:
        if name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"{commands.__name__}.{name.replace('-', '_')}")
        command = getattr(module, "command", None)
        if not isinstance(command, click.Command):
            raise RuntimeError(f"{module.__name__} has no click command named 'command'")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Every verb with its whole sentence, which click would cut to one line."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Verbs"):
            formatter.write_dl([(name, verb.get_short_help_str(200)) for name, verb in found if verb])

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name.startswith("-") or name in self.list_commands(ctx):
            return super().resolve_command(ctx, args)
        known = self.list_commands(ctx)
        near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(map(repr, near))}?" if near else ";"
        raise click.UsageError(f"unknown verb {name!r}{hint} known: {', '.join(known)}", ctx)


def _version(ctx: click.Context, param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from perpend.runs.environment import version

    parts = [f"{name} {version(name)}" for name in ("torch", "transformers")]
    click.echo(f"perpend {perpend.__version__} (python {sys.version.split()[0]}, {', '.join(parts)})")
    ctx.exit()


@click.group(
    cls=Verbs,
    subcommand_metavar="VERB [OPTIONS]",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Versions, and exit.",
)
def verbs() -> None:
    """Read what a transformer computes against a reference: the part along it and the part across it.

    \b
    perpend attention                       survey the default model on the built-in text
    perpend attention gpt2 --text book.txt  another model, another text
    perpend VERB --help                     examples and options of a verb

    Answers go to stdout, progress to stderr. Every run leaves a folder with run.json, tables, arrays and
    report.html. --plan tells what a run would cost. Exit status: 0 done, 1 a check failed, 2 bad input, 130
    interrupted, to go on with --resume.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """The entry point of the command line: runs a verb and exits with its code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if "_PERPEND_COMPLETE" in os.environ:  # the shell asks for completions; click answers and exits
        verbs.main(words, prog_name="perpend")
    code = run(words)
    with suppress(BrokenPipeError):
        sys.stdout.flush()
    sys.exit(code)


def run(words: list[str]) -> int:
    """Runs a verb and returns the exit code; every expected error becomes a message that says what to do."""
    wants_json = "--json" in words
    try:
        with (
            _termination(),
            output.as_json(wants_json),
            verbs.make_context("perpend", list(words)) as context,
        ):
            context.meta[INVOCATION] = ["perpend", *words]
            outcome = verbs.invoke(context)
        return outcome if isinstance(outcome, int) and not isinstance(outcome, bool) else FINE
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.UsageError as error:
        where = error.ctx.command_path if error.ctx is not None else "perpend"
        return _say(error.format_message(), BAD_INPUT, wants_json, hint=f"{where} --help lists what there is")
    except click.ClickException as error:
        return _say(error.format_message(), BAD_INPUT, wants_json)
    except (KeyboardInterrupt, click.Abort) as error:
        return _say("interrupted", INTERRUPTED, wants_json, hint=_resumable(error, words))
    except BrokenPipeError:
        # The reader has gone (`perpend models | head`): nothing is left to say, nor anyone to say it to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FINE
    except Exception as error:
        return _failed(error, words, wants_json)
    finally:
        distributed.shutdown()


def _failed(error: Exception, words: list[str], wants_json: bool) -> int:
    from perpend.runs import AlreadyFinished

    if isinstance(error, AlreadyFinished):
        if wants_json:
            output.print_json({**error.run.document, "folder": str(error.run.folder)})
        print(error, file=sys.stderr)
        return FINE
    hint = _resumable(error, words)
    if isinstance(error, PerpendError):
        return _say(str(error), BAD_INPUT, wants_json, hint=hint, told=getattr(error, "told", False))
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        remedy = "lower --batch or --length, or choose a smaller --dtype"
        return _say(f"out of memory ({error}); {remedy}", BAD_INPUT, wants_json, hint=hint)
    traceback.print_exception(error)
    message = f"a fault in perpend {perpend.__version__}: {type(error).__name__}: {error}"
    return _say(message, FAULT, wants_json, hint=hint)


def _say(message: str, code: int, wants_json: bool, hint: str = "", told: bool = False) -> int:
    if distributed.is_main() or not (code == INTERRUPTED or told):
        print(f"error: {message}" if code != INTERRUPTED else message, file=sys.stderr)
        if hint:
            print(hint, file=sys.stderr)
    if wants_json and distributed.is_main():
        output.print_error(message, code=code, **({"hint": hint} if hint else {}))
    return code


def _resumable(error: BaseException, words: list[str]) -> str:
    """How to go on, where the error passed through a run that has something to go on with."""
    import shlex

    folder = getattr(error, "resumable", None)
    if folder is None:
        return ""
    kept = [word for word in words if word != "--resume"]
    out = [] if any(word == "--out" or word.startswith("--out=") for word in kept) else ["--out", str(folder)]
    return (
        f"what was computed is kept in {folder}; to go on: {shlex.join(['perpend', *kept, *out, '--resume'])}"
    )


@contextmanager
def _termination() -> Iterator[None]:
    """A polite kill (SIGTERM, from torchrun or a batch system) ends like Ctrl-C: tidily and resumable."""

    def stop(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread: the embedding program decides about signals
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
