"""Writes docs/command-line.md from the commands themselves; `--check` only says whether it is current.

python scripts/command_line.py
python scripts/command_line.py --check
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import click

from perpend import cli
from perpend.options import ARGUMENTS, Verb

PAGE = Path(__file__).resolve().parent.parent / "docs" / "command-line.md"

INTRODUCTION = """\
# Command line

<!-- Written by scripts/command_line.py from the commands themselves; edit those. -->

```
perpend VERB [OPTIONS]
```

Answers go to stdout, progress and remarks to stderr (progress only where stderr is a terminal; `--quiet`
silences both). `--json` prints exactly one JSON document on stdout, for errors too:
`{"error": …, "code": …}`.

Every run leaves a folder, `runs/<verb>-<model>-<n>` unless `--out` names another, with `run.json`, tables
as `*.csv`, `arrays.safetensors` and `report.html` ([what is in it](run-folder.md)). An interrupted run goes
on with `--resume` and the same options; `--plan` shows what a run would cost and stops.

| exit code | meaning |
|---|---|
| 0 | done |
| 1 | a check that was asked for failed |
| 2 | bad input or usage; the message says what to do |
| 70 | a fault in perpend itself; please report the traceback |
| 130 | interrupted (Ctrl-C or SIGTERM); what was computed is kept for `--resume` |

## Shell completion

Verbs and options complete after one line in the shell's start-up file:

```
eval "$(_PERPEND_COMPLETE=bash_source perpend)"       # ~/.bashrc
eval "$(_PERPEND_COMPLETE=zsh_source perpend)"        # ~/.zshrc
_PERPEND_COMPLETE=fish_source perpend | source        # ~/.config/fish/completions/perpend.fish
```

## More than one process

`torchrun --nproc-per-node N -m perpend VERB …` divides the text over N processes, on one machine or several
that share the run folder. Sums are kept per block of sequences, each computed wholly by one process and added
in block order, so the results are those of one process with as many threads. (torchrun gives each process one
thread unless OMP_NUM_THREADS says more; another number is another order of sums, 1e-7 here and there.) A
process that dies ends the run with a message, and any number of processes can resume it.
"""


def page() -> str:
    """The whole page."""
    names = cli.verbs.list_commands(None)
    rows = [
        f"| [`{name}`](#perpend-{name}) | {_escaped(_command(name).get_short_help_str(200))} |"
        for name in names
    ]
    listed = "## Verbs\n\n| verb | |\n|---|---|\n" + "\n".join(rows) + "\n"
    return "\n".join([INTRODUCTION, listed, *(_section(name) for name in names)])


def _section(name: str) -> str:
    command = _command(name)
    context = click.Context(command, info_name=f"perpend {name}", **command.context_settings)
    examples = "\n".join(command.examples) if isinstance(command, Verb) else ""
    usage = " ".join([f"perpend {name}", *command.collect_usage_pieces(context)])
    parts = [f"## perpend {name}", f"```\n{examples}\n```", _prose(command.help or ""), f"Usage: `{usage}`"]
    rows = [row for param in command.get_params(context) if (row := _record(param, context))]
    if rows:
        table = "\n".join(f"| `{_bars(left)}` | {_bars(_escaped(right))} |" for left, right in rows)
        parts.append(f"| option | |\n|---|---|\n{table}")
    return "\n\n".join(parts) + "\n"


def _record(param: click.Parameter, context: click.Context) -> tuple[str, str] | None:
    if isinstance(param, click.Argument):  # what ARGUMENTS lacks, the verb's own prose explains
        told = ARGUMENTS.get(param.name or "")
        name = param.human_readable_name.upper()
        return (name if param.required else f"[{name}]", told) if told else None
    return param.get_help_record(context)


def _command(name: str) -> click.Command:
    command = cli.verbs.get_command(None, name)
    assert command is not None
    return command


def _prose(help_text: str) -> str:
    """Help as Markdown: a paragraph that click must not rewrap becomes a block of code."""
    paragraphs = inspect.cleandoc(help_text).split("\n\n")
    return "\n\n".join(
        "```\n" + part.removeprefix("\b").strip("\n") + "\n```" if part.startswith("\b") else _escaped(part)
        for part in paragraphs
    )


def _escaped(text: str) -> str:
    """Text in which nothing is Markdown but what stands in backticks."""
    parts = text.split("`")
    for i in range(0, len(parts), 2):
        parts[i] = re.sub(r"([*\[\]_\\])", r"\\\1", parts[i]).replace("<", "&lt;")
    return "`".join(parts)


def _bars(text: str) -> str:
    """One line, whose bars do not end a table's cell."""
    return " ".join(text.split()).replace("|", "\\|")


def main(arguments: list[str]) -> int:
    text = page()
    if "--check" in arguments:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == text:
            return 0
        print(f"{PAGE} is not current: run python scripts/command_line.py", file=sys.stderr)
        return 1
    PAGE.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
