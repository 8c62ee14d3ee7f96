"""`perpend paper`: both papers, table by table and figure by figure, each with the commands that make it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perpend.options import json_option, verb

if TYPE_CHECKING:
    from perpend.report.figure import Figure

BASE = "runs/paper"
RUNS = "runs"  # the models' runs, below it, beside the items' reports


@verb(
    "perpend paper",
    "perpend paper attention/table-1",
    "perpend paper attention/table-2 --models gpt2,pythia-70m",
    "perpend paper attention/table-10 --models gpt2=path/to/folder --plan",
    "perpend paper --claims",
)
@click.argument("item", required=False)
@click.option(
    "--models",
    help="Short names or folders, comma-separated; NAME=FOLDER reads the paper's NAME from a folder.  "
    "[default: the item's models that this machine has]",
)
@click.option("--out", metavar="DIR", help=f"Where the runs go, a folder a model.  [default: {BASE}]")
@click.option("--plan", is_flag=True, help="Show the commands and what they cost, and stop.")
@click.option("--all", "everything", is_flag=True, help="Make every item that this machine can.")
@click.option("--claims", is_flag=True, help="Every claim of both papers, and what was found of it here.")
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
@json_option
def command(
    item: str | None,
    models: str | None,
    out: str | None,
    plan: bool,
    everything: bool,
    claims: bool,
    more: tuple[str, ...],
    json: bool,
) -> int:
    """List every table and figure of both papers, or make one and hold it against the printed values.

    Without ITEM: each item's question, what it needs, whether the paper's text carries its values, and
    whether this machine has what it needs. With ITEM its commands run once a model, and printed and measured
    values are shown side by side with the measured one's interval; a report beside the runs draws it. A model
    that fails is told, and the others go on. Words after `--` join the command and replace its options, as
    `-- --sequences 100`. With --claims, ITEM may be attention or directional.
    """
    from perpend.errors import InputError
    from perpend.papers.protocol import Named, catalog, find

    if claims:
        return _claims(item)
    if item and item.startswith("-"):  # `paper --all -- --text …`: no item, the words after -- came first
        item, more = None, (item, *more)
    if item is None and not everything:
        if models or more:
            raise InputError("name a table or figure (`perpend paper` lists them), or give --all")
        return _list(list(catalog().values()))
    chosen = [find(item)] if item else [one for one in catalog().values() if _possible(one)]
    asked = [Named.parse(word.strip()) for word in (models or "").split(",") if word.strip()]
    if plan:
        return _plan(chosen, asked, Path(out or BASE), more)
    return _make(chosen, asked, Path(out or BASE), more, named=item)


def _possible(item: Any) -> bool:
    """Whether --all makes it: it has commands, and what it lacks other models can stand in for."""
    from perpend.papers.making import machine

    own = machine()
    if item.steps is None or not item.per_model:
        return item.steps is not None and not own.lacks(item)
    return bool(item.default_models(own.models))


def _list(items: Sequence[Any]) -> int:
    import shlex

    import pandas as pd

    from perpend import output
    from perpend.papers.making import machine

    own = machine()
    records = [
        {
            "item": one.item,
            "question": one.question,
            "needs": list(one.needs) or ["nothing"],
            "lacking": own.lacks(one),
            "here": own.here(one),
            "values": "printed" if one.published else "protocol only",
            "models": list(one.models),
            "commands": [shlex.join(["perpend", *words]) for words in one.steps or ()],
            "note": one.note,
            **({"why": one.why} if one.why else {}),
        }
        for one in items
    ]
    table = pd.DataFrame(records)[["item", "question", "needs", "values", "here"]]
    table["needs"] = [", ".join(needs) for needs in table["needs"]]
    hint = (
        "perpend paper ITEM makes one, with its report; --plan shows its commands and their cost first.\n"
        "protocol only: the paper's text does not carry the table; numbers its prose names are compared."
    )
    output.answer({"items": records}, ("Tables and figures of both papers", table), hint)
    return 0


def _plan(items: Sequence[Any], asked: Sequence[Any], base: Path, more: tuple[str, ...]) -> int:
    """The commands of each item and model, with their cost where the model is here to be measured."""
    import shlex

    import pandas as pd

    from perpend import output
    from perpend.errors import InputError, PerpendError
    from perpend.job import duration
    from perpend.papers.making import chained, check, cost, machine, steps

    own = machine()
    records: list[dict[str, Any]] = []
    known: dict[tuple[str, ...], dict[str, Any]] = {}  # items share commands
    for one in items:
        try:
            models = asked or (_wanted(one, own) if one.per_model else [])
            sequences = steps(one, models, more, own)
        except InputError as error:
            if len(items) == 1:
                raise
            records.append({"item": one.item, "model": "", "command": "", "cost": str(error)})
            continue
        for sequence in sequences:
            for step, words, folder in chained(sequence, base / RUNS):
                record = {"item": one.item, "model": step.model.name if step.model else ""}
                record["command"] = shlex.join(["perpend", *words])
                try:
                    if step.model:
                        check(one, step.model, more)
                    key = tuple(words)
                    if key not in known:
                        known[key] = _cost(step, words, folder, own, cost)
                    found = known[key]
                except PerpendError as error:
                    found = {"error": str(error)}
                record["cost"] = _told(found, duration)
                records.append({**record, "needs": list(one.needs), "details": found})
    shown = pd.DataFrame(records)[["item", "model", "command", "cost"]]
    notes = list(dict.fromkeys(one.note for one in items if one.note))
    text = "the hub cannot be reached: models that are here read the built-in text in place of its data sets"
    notes += [text] if not own.hub and not own.wikitext and any(one.per_model for one in items) else []
    output.answer({"plan": records, "notes": notes}, ("Commands and their cost here", shown), *notes)
    return 0


def _wanted(item: Any, own: Any) -> list[Any]:
    """The paper's models and those that need no hub: a plan shows them all."""
    from perpend.papers.protocol import Named

    here = [name for name in item.also if name in own.models]
    return [Named(name, name) for name in (*item.models, *here)]


def _cost(step: Any, words: list[str], folder: Path, own: Any, measure: Any) -> dict[str, Any]:
    """Measured for a model that lies here, computed from sizes for one that would have to be fetched."""
    from perpend.commands.models import state
    from perpend.models.catalog import find

    if (folder / "run.json").exists():
        return {"kept": str(folder)}
    if step.verb in ("audit",):
        return {"forward_passes": 0, "seconds": None}
    entry = find(step.model.place) if step.model else None
    if entry is not None and not entry.wheel and state(entry, own.hub) != "yes":
        size = entry.parameters * (4 if entry.dtype == "float32" else 2) / 1e9
        return {"download_gb": size, "hub": own.hub}
    if step.verb == "train":
        return {"forward_passes": None, "by": "perpend train … --plan --gpus 8xH100"}
    if step.verb == "checkpoints":
        return {"forward_passes": None, "by": "perpend checkpoints … --plan"}
    from perpend.progress import note

    note(f"measuring what `perpend {' '.join(words)}` costs")
    return measure(words)


def _told(found: dict[str, Any], duration: Any) -> str:
    if "error" in found:
        return f"cannot run: {found['error']}"
    if "kept" in found:
        return f"made before, kept in {found['kept']}"
    if "download_gb" in found:
        fetched = "to fetch" if found["hub"] else "of weights; the hub cannot be reached"
        return f"{found['download_gb']:.2g} GB {fetched}"
    if "by" in found:
        return f"see `{found['by']}`"
    if found.get("seconds") is None:
        return "seconds"
    words = [duration(found["seconds"])]
    words += [f"{found['tokens']:,} tokens"] if found.get("tokens") else []
    words += [f"{found['peak_bytes'] / 2**30:.1f} GiB"] if found.get("peak_bytes") else []
    return ", ".join(words)


def _make(
    items: Sequence[Any], asked: Sequence[Any], base: Path, more: tuple[str, ...], named: str | None
) -> int:
    import pandas as pd

    from perpend import output
    from perpend.errors import InputError
    from perpend.papers.making import make

    made = make(items, asked, base=base / RUNS, more=more)
    records = [record for one in made for record in _records(one)]
    if named and not any(one.runs for one in made):
        raise InputError("; ".join(made[0].failures.values()))
    folders = [str(_report(one, base)) for one in made if one.runs]
    failures = {
        f"{one.item.item} {model}".strip(): why for one in made for model, why in one.failures.items()
    }
    parts: list[Any] = []
    for one in made:
        rows = _records(one)
        if rows:
            parts.append((f"{one.item.item}: {one.item.question}", _shown(pd.DataFrame(rows))))
        commands = [line for model, own in one.commands.items() if model in one.runs for line in own]
        parts += [output.lines("Made by", commands)] if commands else []
        parts += [one.item.note] if one.item.note and set(one.runs) & set(one.item.models) else []
    if failures:
        parts.append(output.lines("Not made", [f"{what}: {why}" for what, why in failures.items()]))
    parts += [f"report: {folder}/report.html" for folder in folders]
    runs = {
        one.item.item: {model: [str(folder) for folder in own] for model, own in one.runs.items()}
        for one in made
    }
    document = {
        "comparisons": records,
        "runs": runs,
        "commands": {one.item.item: one.commands for one in made},
        "failures": failures,
    }
    output.answer({**document, "reports": folders}, *parts)
    # --all tells what this machine could not do; an item asked for by name must be there.
    return 2 if failures and (named or not records) else 0


def _records(made: Any) -> list[dict[str, Any]]:
    return [
        {"item": made.item.item, "model": model, **vars(row), "within": row.within, "agrees": row.agrees}
        for model, row in made.rows
    ]


def _shown(table: pd.DataFrame) -> pd.DataFrame:  # noqa: F821
    """Columns for the terminal: printed, measured, interval, verdict."""
    import pandas as pd

    def number(value: Any) -> str:
        return "–" if value is None or value != value else f"{value:.4g}"

    def printed(row: Any) -> str:
        if row.published is None or row.published != row.published:
            ends = row.range
            if not isinstance(ends, (tuple, list)):
                return "–"
            return f"({ends[0]:g})" if ends[0] == ends[1] else f"({ends[0]:g} to {ends[1]:g})"
        sd = f" ± {row.sd:g}" if row.sd is not None and row.sd == row.sd else ""
        return f"{'' if row.relation == '=' else row.relation + ' '}{row.published:g}{sd}"

    rows = list(table.itertuples())
    return pd.DataFrame(
        {
            "model": table["model"],
            "quantity": table["name"],
            "printed": [printed(row) for row in rows],
            "measured": [number(row.measured) for row in rows],
            "interval": [
                "–" if row.low is None or row.low != row.low else f"{number(row.low)} to {number(row.high)}"
                for row in rows
            ],
            "unit": table["unit"],
            "agrees": [{True: "yes", False: "no"}.get(row.agrees, "–") for row in rows],
        }
    )


def _report(made: Any, base: Path) -> Path:
    """A run folder of the item itself: the comparison, where its runs lie, and a report that draws it."""
    import pandas as pd

    from perpend.runs import Run

    item = made.item
    stem, number = base / item.item.replace("/", "-"), 1
    while (folder := Path(f"{stem}-{number}")).exists():
        number += 1
    records = _records(made)
    for record in records:
        record["range_low"], record["range_high"] = record.pop("range") or (None, None)
    request = {"model": {"name": ",".join(made.runs)}, "item": item.item, "commands": made.commands}
    with Run.start(folder, command="paper", request=request) as run:
        run.table("comparison", pd.DataFrame(records))
        runs = {model: [str(path.resolve()) for path in paths] for model, paths in made.runs.items()}
        run.finish(
            results={"item": item.item, "comparisons": records, "runs": runs, "failures": made.failures},
            conventions={
                "agrees": "the printed value lies within half a printed digit and three printed sd of the "
                "measured one, or of its 95 % interval",
                "range": "smallest and largest printed value over the paper's models, for a model that is "
                "not among them",
                **({"note": item.note} if item.note else {}),
            },
            findings=_findings(made),
        )
    return folder


def _findings(made: Any) -> list[str]:
    """One line a model: how many printed numbers agree, or that there are none."""
    lines = []
    for model in made.runs:
        rows = [row for name, row in made.rows if name == model]
        told = [row for row in rows if row.agrees is not None]
        where = f" on {model}" if model else ""
        if told:
            agreeing = sum(bool(row.agrees) for row in told)
            lines.append(f"{made.item.item}{where}: {agreeing} of {len(told)} printed numbers agree.")
        elif rows:
            inside = [row for row in rows if row.range]
            within = sum(row.range[0] <= row.measured <= row.range[1] for row in inside)
            ranged = f"; {within} of {len(inside)} lie within the range of its models" if inside else ""
            lines.append(f"{made.item.item}{where}: the paper prints no value of this model{ranged}.")
        else:
            lines.append(f"{made.item.item}{where}: the text carries no values to compare.")
    lines += [f"{made.item.item} on {model}: not made ({why})." for model, why in made.failures.items()]
    return lines


def _claims(item: str | None) -> int:
    import pandas as pd

    from perpend import output
    from perpend.papers import claims

    judged = claims.judge_all(claims.summaries(), paper=item)
    table = pd.DataFrame(
        [
            {"paper": one.claim.paper, "claim": one.claim.statement, "status": one.status, "found": one.found}
            for one in judged
        ]
    )
    counted = table["status"].value_counts(sort=False)
    counts = ", ".join(f"{count} {status}" for status, count in counted.items())
    document = {"claims": [one.record() for one in judged]}
    output.answer(document, ("Claims of both papers, as found here", table), counts)
    return 0


def figures(run: Any) -> list[Figure]:
    """The figures of an item: its runs' own that draw it, and the printed values beside the measured."""
    from perpend.commands._paper_figures import figures as made

    return made(run)
