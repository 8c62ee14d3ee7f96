"""`perpend paper`: both papers, table by table and figure by figure, each with the command that makes it."""

from __future__ import annotations

from typing import Any

import click

from perpend.options import json_option, verb

STDERR = 2  # the descriptor: answers of the runs are progress here


@verb(
    "perpend paper",
    "perpend paper attention/table-1",
    "perpend paper attention/table-2 --models gpt2,pythia-70m",
    "perpend paper attention/table-2 --models gpt2=path/to/folder --plan",
)
@click.argument("item", required=False)
@click.option(
    "--models",
    help="Short names, comma-separated; NAME=FOLDER reads the model from a folder.  [default: the paper's]",
)
@click.option(
    "--out", metavar="DIR", help="Where the runs go, a folder a model.  [default: runs/paper-<item>]"
)
@click.option("--plan", is_flag=True, help="Print the commands and what they need, and stop.")
@click.option(
    "--all", "everything", is_flag=True, help="Make every item that needs nothing but this machine."
)
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
@json_option
def command(
    item: str | None,
    models: str | None,
    out: str | None,
    plan: bool,
    everything: bool,
    more: tuple[str, ...],
    json: bool,
) -> int:
    """List every table and figure of both papers, or make one and hold it against the printed values.

    Without ITEM: each item's question, what it needs, and whether the paper's text carries its values. With
    ITEM its command runs once a model, and printed and measured values are shown side by side. Words after
    `--` are added to the command, as `-- --sequences 100`.
    """
    from perpend.papers.protocol import catalog, find

    if item is None and not everything:
        return _list(catalog().values())
    chosen = [find(item)] if item else [one for one in catalog().values() if one.needs == "nothing"]
    if plan:
        return _plan(chosen, models, more)
    return _make(chosen, models, out, more)


def _list(items: Any) -> int:
    import pandas as pd

    from perpend import output

    records = [
        {
            "item": one.item,
            "question": one.question,
            "needs": one.needs,
            "values": "printed" if one.published else "protocol only",
            "command": " ".join(one.command) if one.command else f"none: {one.why}",
        }
        for one in items
    ]
    table = pd.DataFrame(records)[["item", "question", "needs", "values"]]
    hint = "perpend paper ITEM makes one; perpend paper ITEM --plan shows its commands."
    output.answer({"items": records}, ("Tables and figures of both papers", table), hint)
    return 0


def _renamed(models: str | None) -> list[tuple[str, str]] | None:
    """(name in the paper, what to load) of each model asked for."""
    if not models:
        return None
    pairs = (part.strip().partition("=") for part in models.split(",") if part.strip())
    return [(name, place or name) for name, _, place in pairs]


def _plan(items: Any, models: str | None, more: tuple[str, ...]) -> int:
    import shlex

    import pandas as pd

    from perpend import output

    renamed = _renamed(models)
    records = []
    for one in items:
        asked = None if renamed is None else [place for _, place in renamed]
        for model, words in one.commands(asked) or [(None, None)]:
            line = shlex.join(["perpend", *words, *more]) if words else f"none: {one.why}"
            records.append({"item": one.item, "model": model or "", "needs": one.needs, "command": line})
    note = "`perpend VERB … --plan` measures one batch and shows tokens, time and memory."
    output.answer({"plan": records}, ("Commands", pd.DataFrame(records)), note)
    return 0


def _make(items: Any, models: str | None, out: str | None, more: tuple[str, ...]) -> int:
    import subprocess
    import sys
    from pathlib import Path

    import pandas as pd

    from perpend import output
    from perpend.errors import InputError
    from perpend.papers.protocol import compare
    from perpend.runs import Run

    renamed = _renamed(models)
    rows, folders, done = [], [], set()
    for one in items:
        if one.command is None:
            raise InputError(f"{one.item} has no command: {one.why}")
        asked = None if renamed is None else [place for _, place in renamed]
        names = [name for name, _ in renamed] if renamed else list(one.models)
        for number, (model, words) in enumerate(one.commands(asked)):
            key = tuple(words)
            base = Path(out) if out else Path("runs") / f"paper-{one.item.replace('/', '-')}"
            folder = base / (names[number] if model else one.command[0])
            if key not in done:
                done.add(key)
                words_of_run = [*words, *more, "--out", str(folder)]
                # A process of its own: a fault in one model ends one run.
                code = subprocess.run(
                    [sys.executable, "-m", "perpend", *words_of_run], stdout=STDERR, check=False
                ).returncode
                if code:
                    raise InputError(f"{one.item}: `perpend {' '.join(words)}` failed; its message is above")
                folders.append(str(folder))
            if model:
                found = compare(one, names[number], Run.open(folder).document["results"])
                rows += [{"item": one.item, **vars(row), "within": row.within} for row in found]
    table = pd.DataFrame(rows)
    parts: list[Any] = []
    if rows:
        parts.append(("Printed and measured (margin: rounding and three printed sd)", table))
    parts.append("runs: " + ", ".join(folders))
    output.answer({"comparisons": rows, "runs": folders}, *parts)
    return 0
