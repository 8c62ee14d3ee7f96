"""One HTML file that holds a whole report: text, charts, numbers, and the code that draws them.

    build(run)          the report of one run folder
    compare(runs)       several runs side by side: settings that differ, findings, figures

The page makes no request and may make none: its content security policy forbids everything but its own two
scripts and its own style sheet, named by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

from perpend.errors import InputError
from perpend.report import theme
from perpend.report.data import Store, script_json
from perpend.report.figure import Figure
from perpend.report.libraries import libraries
from perpend.report.markup import (
    compare_header,
    contents,
    figure_block,
    findings_beside,
    header,
    model_name,
    module_of,
    question,
    record,
    settings_that_differ,
    text,
    undefined_list,
)


def build(run: Any) -> str:
    """The report of a run: what was measured, on what, how, what was found, then the figures."""
    store = Store()
    figures = figures_of(run)
    document = run.document
    parts = [
        header(run),
        contents([figure.title for figure in figures]),
    ]
    specs = []
    for number, figure in enumerate(figures, 1):
        spec, markup = figure_block(figure, number, store)
        specs.append(spec)
        parts.append(markup)
    parts.append(undefined_list(document.get("undefined")))
    parts.append(record(document))
    return _page(f"{question(run.command)} – {model_name(document)}", parts, specs, store, [run])


def compare(runs: Sequence[Any], names: Sequence[str] | None = None) -> str:
    """Several runs on one page; figures of one title are overlaid where they can be, else side by side."""
    if len(runs) < 2:
        raise InputError("a comparison needs two runs or more")
    names = list(names or names_of([run.folder for run in runs]))
    store = Store()
    made = [{figure.title: figure for figure in figures_of(run)} for run in runs]
    titles = list(dict.fromkeys(title for figures in made for title in figures))
    parts = [
        compare_header(runs, names),
        settings_that_differ(runs, names),
        findings_beside(runs, names),
        contents(titles),
    ]
    specs = []
    for number, title in enumerate(titles, 1):
        having = [(name, figures[title]) for name, figures in zip(names, made) if title in figures]
        spec, markup = figure_block(_joined(title, having), number, store)
        specs.append(spec)
        parts.append(markup)
    return _page(f"Comparison of {len(runs)} runs", parts, specs, store, runs)


def names_of(folders: Sequence[Path]) -> list[str]:
    """Short names of run folders that tell them apart: the last part of the path, or all of it."""
    short = [folder.name for folder in folders]
    return short if len(set(short)) == len(short) else [str(folder) for folder in folders]


STUDIES = {  # what makes of a survey the study that has figures
    "AttentionSurvey": "make the study first: perpend.studies.attention.attention_study({0: survey})",
    "UpdateSurvey": "make the study first: perpend.studies.updates.updates_study("
    "survey, None, ranking), the ranking from perpend.studies.layer_drop",
}


def figures_of(run: Any, command: str | None = None) -> list[Figure]:
    """The figures that a command makes of its run; a command that perpend does not know has none.

    `run` may also be the result of a study, which has the run's tables, arrays and results; name the command.
    Raises InputError where it is no result of that command, a survey for one.
    """
    if command is None and not hasattr(run, "command"):
        raise InputError(f'name the command: figures_of({type(run).__name__.lower()}, "attention")')
    module = module_of(command or run.command)
    make = getattr(module, "figures", None)
    if make is None:
        return []
    if hasattr(run, "command"):
        return list(make(run))
    try:
        return list(make(run))
    except (KeyError, AttributeError) as error:
        kind = type(run).__name__
        remedy = STUDIES.get(kind, f"run `perpend {command}` and open its folder, or make the study it makes")
        raise InputError(
            f"perpend {command} makes no figures of {'an' if kind[:1] in 'AEIOU' else 'a'} {kind} "
            f"({error} is missing): {remedy}"
        ) from error


def _joined(title: str, having: Sequence[tuple[str, Figure]]) -> Figure:
    """One figure of several runs: overlaid where the figure says how, else chart beside chart."""
    import pandas as pd

    first = having[0][1]
    table = pd.concat([figure.table.assign(run=name) for name, figure in having], ignore_index=True)
    table = table[["run", *(column for column in table.columns if column != "run")]]
    if first.overlay is not None and len(having) > 1:
        chart: Any = first.overlay(table)
    else:
        from perpend.report.charts import one_scale

        chart = {
            f"{name} – {subtitle}" if subtitle else name: one
            for name, figure in having
            for subtitle, one in figure.charts.items()
        }
        chart = dict(zip(chart, one_scale(list(chart.values()))))
    reading = _readings([(name, figure.how_to_read) for name, figure in having])
    return Figure(title, first.question, chart, table, reading)


def _readings(told: Sequence[tuple[str, str]]) -> str:
    """How to read a figure of several runs: once what all say, then by name what tells of one alone."""
    # a comparison opens no panel, so that the sentence that invites to choose a mark is left out
    parts = [(name, re.split(r"(?<=[.!?]) ", text)) for name, text in told]
    sentences = [(name, [one for one in own if not one.startswith("Choose ")]) for name, own in parts]
    shared = [one for one in sentences[0][1] if all(one in other for _, other in sentences)]
    own = [(name, " ".join(one for one in other if one not in shared)) for name, other in sentences]
    return " ".join([*shared, *(f"{name}: {text}" for name, text in own if text)])


_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {style}; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def _page(title: str, parts: Sequence[str], specs: list[Any], store: Store, runs: Sequence[Any]) -> str:
    style = _asset("page.css")
    style = f"{_variables()}\n{style}"
    scripts = [libraries(), _asset("page.js")] if specs else []
    data = {
        "figures": specs,
        "data": store.columns,
        "digits": store.digits,
        "roles": theme.LIGHT,
        "config": _config(),
    }
    policy = _POLICY.format(scripts=" ".join(map(_hash, scripts)) or "'none'", style=_hash(style))
    embedded = f'<script type="application/json" id="page-data">{script_json(data)}</script>' if specs else ""
    code = "".join(f"<script>{script}</script>" for script in scripts)
    version = runs[0].document.get("version")
    folders = ", ".join(str(run.folder) for run in runs)
    head = (
        '<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{style}</style>"
    )
    foot = (
        f"<footer>perpend {text(version)} · {escape(folders)} · This page is complete: it loads nothing."
        "</footer>"
        "<noscript><p>The charts are drawn by the script in this page; every number is in the folder beside "
        "it.</p></noscript>"
    )
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n'
        '<a class="skip" href="#main">To the content</a>\n'
        f'<main class="page" id="main">\n{"".join(parts)}\n{foot}\n</main>\n'
        f"{embedded}{code}\n</body>\n</html>\n"
    )


def _variables() -> str:
    """The theme as custom properties: light, dark where the reader's system is, and light again on paper."""
    light = "".join(f"--{role}:{pair[0]};" for role, pair in theme.ROLES.items())
    dark = "".join(f"--{role}:{pair[1]};" for role, pair in theme.ROLES.items())
    return (
        f":root{{{light}--sans:{theme.SANS};--serif:{theme.SERIF}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{dark}}}}}"
    )


def _config() -> dict[str, Any]:
    return theme.config({role: f"var(--{role})" for role in theme.ROLES})


def _asset(name: str) -> str:
    return resources.files("perpend.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
