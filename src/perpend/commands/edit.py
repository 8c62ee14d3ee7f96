"""`perpend edit`: scale the parallel or the perpendicular part at a site, and see what the loss does."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from perpend.errors import InputError
from perpend.evaluation.options import add_tasks
from perpend.options import Near, model_options, run_options, seed_options, text_options, verb

if TYPE_CHECKING:
    from perpend.report.figure import Figure
    from perpend.studies.edit_sweep import Cell

SITES = ("residual.attn", "residual.mlp", "residual.block", "value.full", "value.exclude_self")
BASIN_SCALES = (-0.5, 0.0, 0.5, 0.75, 0.9, 1.1, 1.25, 1.5, 2.0, 2.5)


class Numbers(click.ParamType):
    """A list of numbers, `0,0.5,2`."""

    name = "numbers"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return tuple(value)
        with suppress(ValueError):
            found = tuple(float(part) for part in value.split(",") if part.strip())
            if all(map(math.isfinite, found)):
                return found
        self.fail(f"{value!r} is no list of finite numbers; write 0 or 0,0.5,2", param, ctx)


class Indices(click.ParamType):
    """A list of indices, `0,3` or `0-5`."""

    name = "indices"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return tuple(value)
        found: list[int] = []
        for part in value.split(","):
            first, dash, last = part.strip().partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                self.fail(f"{value!r} is no list of indices; write 0,3 or 0-5", param, ctx)
            if dash and int(last) < int(first):
                self.fail(f"{part.strip()!r} runs backwards; write {last}-{first}", param, ctx)
            found += range(int(first), int(last if dash else first) + 1)
        return tuple(found)


@verb(
    "perpend edit --site value.exclude_self --parallel 0",
    "perpend edit --site residual.attn --site value.full --parallel 0,0.5,2 --perpendicular 0,0.5 --controls",
    "perpend edit path/to/model --edit shared-edit.json --text book.txt",
    "perpend edit --site residual.mlp --basin",
    "perpend edit --audit --gradient --head-sensitivity --sequences 8 --length 256",
)
@model_options
@text_options(sequences=16, length=512, batch=4)
@click.option("--site", "sites", multiple=True, type=Near(SITES), help="Repeatable.  [default: all five]")
@click.option(
    "--parallel",
    type=Numbers(),
    default="0,0.5,2",
    show_default=True,
    help="Scales of the parallel part, each with s⊥ = 1.",
)
@click.option(
    "--perpendicular",
    type=Numbers(),
    default="",
    help="Scales of the perpendicular part, each with s∥ = 1.  [default: none]",
)
@click.option("--grid", is_flag=True, help="Every pair of the two lists, not each with 1.")
@click.option(
    "--reference",
    "references",
    multiple=True,
    type=Near(("head", "token")),
    help="Value space: each head against its own value, or all heads together. Repeatable.  [default: head]",
)
@click.option("--layers", type=Indices(), help="Layers edited, as 0,3 or 0-5.  [default: all]")
@click.option("--heads", type=Indices(), help="Heads edited at value sites.  [default: all]")
@click.option("--edit", "files", multiple=True, metavar="FILE", help="An edit in JSON. Repeatable.")
@click.option("--controls", is_flag=True, help="Beside each parallel scale, three moves of the same size.")
@click.option(
    "--controls-at",
    type=Numbers(),
    help="The parallel scales that get controls.  [default: with --controls, all of --parallel]",
)
@click.option("--basin", is_flag=True, help="Measure the tolerance basin of each site, for s∥ and s⊥.")
@click.option(
    "--audit", is_flag=True, help="The edit as a change of A_tt, and what it does to the output after W_O."
)
@click.option(
    "--gradient", is_flag=True, help="Slopes of every scale in one backward pass, beside finite removals."
)
@click.option(
    "--head-sensitivity", is_flag=True, help="Every head edited alone, beside all of its layer at once."
)
@click.option(
    "--compile",
    "compile_",
    is_flag=True,
    help="The edits' arithmetic through torch.compile; needs a compiler.",
)
@add_tasks
@seed_options((0,))
@run_options
def command(**options: Any) -> None:
    """Scale the part along a reference, or across it, at sites of MODEL, and report what the loss does.

    Beside each edit: the paired change of the loss with its interval over sequences, KL divergence from the
    unedited model and agreement of the top token. With --controls, moves of the same size that do not go
    along the reference; with --basin, how far from 1 a scale may go before the loss rises by 0.01 and 0.05
    nats.

    --audit, --gradient and --head-sensitivity are studies of their own, with the first scale of --parallel;
    the sweep runs beside them where --site, --edit or --basin asks for it. --tasks scores every edit of the
    sweep and pairs it with the unedited model, item by item.
    """
    from perpend.commands import _edit_parts as parts
    from perpend.commands._tasks import Tasks
    from perpend.job import Job

    job = Job("edit", options)
    chosen = [name for name in ("audit", "gradient", "head_sensitivity") if options[name]]
    sweeps = not chosen or bool(options["sites"] or options["files"] or options["basin"] or options["tasks"])
    if options["head_sensitivity"]:
        parts.head_site(options)  # refused before anything is loaded
    cells = cells_of(options) if sweeps else []
    tokens = job.tokens(options["seeds"][0])
    if job.options["plan"]:
        passes = parts.passes(job.model, options, chosen, len(cells))
        job.planned(tokens, passes=passes, forward=parts.judged(job.model))
        return
    with job.run(cells=[cell.name for cell in cells]) as run:
        studies = parts.studies(job, run, tokens, cells, chosen)
        tasks = Tasks(job, run)
        if tasks:
            parts.score(tasks, job, cells)
        for study in studies.values():
            for name, table in study.tables.items():
                run.table(name, table)
            for name, array in study.arrays.items():
                run.array(name, array)
        results = {} if "sweep" not in studies else dict(studies["sweep"].results)
        results |= {name: study.results for name, study in studies.items() if name != "sweep"}
        conventions = {name: study.conventions for name, study in studies.items()}
        findings = [line for study in studies.values() for line in study.findings]
        if tasks:
            results |= tasks.results
            conventions |= {"tasks": tasks.conventions}
        scores = tasks.tables()
        run.finish(results=results, conventions=conventions, findings=[*findings, *tasks.findings])
    job.answer(run, *parts.shown(studies), *scores)


def cells_of(options: dict[str, Any]) -> list[Cell]:
    """The points of the sweep that the options ask for, without repeats."""
    from perpend.models.controls import CONTROLS
    from perpend.models.edit import Edit
    from perpend.studies.edit_sweep import Cell

    edits = [Edit.load(path) for path in options["files"]]
    sites = options["sites"] or (() if edits else SITES)
    if options["heads"] is not None:
        without = [site for site in options["sites"] if not site.startswith("value.")]
        if without:
            raise InputError(f"{without[0]} has no heads; give --heads with value.full or value.exclude_self")
        sites = [site for site in sites if site.startswith("value.")]
    if options["grid"] and not (options["parallel"] and options["perpendicular"]):
        raise InputError("--grid pairs two lists: give --perpendicular beside --parallel, as in 0,0.5,1")
    pairs = [(s, 1.0) for s in options["parallel"]] + [(1.0, s) for s in options["perpendicular"]]
    if options["grid"]:
        pairs = [(s, t) for s in options["parallel"] for t in options["perpendicular"]]
    if options["basin"]:
        pairs += [(s, 1.0) for s in BASIN_SCALES] + [(1.0, s) for s in BASIN_SCALES]
    for site in sites:
        value = site.startswith("value.")
        for reference in options["references"] or ("head",) if value else ("head",):
            heads = options["heads"] if value else None
            edits += [
                Edit(site, s, t, options["layers"], heads, reference)
                for s, t in pairs
                if (s, t) != (1.0, 1.0)
            ]
    if not edits:
        raise InputError("no scale differs from 1, so there is nothing to edit: give --parallel 0, say")
    cells: dict[str, Cell] = {}
    matched = options["controls_at"] or (options["parallel"] if options["controls"] else ())
    for edit in edits:
        kinds: list[str | None] = [None]
        if edit.perpendicular == 1.0 and edit.parallel in matched:
            kinds += CONTROLS
        for kind in kinds:
            cell = Cell(edit, kind, options["seeds"][0], bool(options.get("compile_")))
            cells.setdefault(cell.name, cell)
    return list(cells.values())


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend edit`."""
    from perpend.commands._edit_figures import figures as made
    from perpend.commands._tasks import figures as scored

    return [*made(run), *scored(run)]
