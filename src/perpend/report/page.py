"""One HTML file that holds a whole report: text, charts, numbers, and the code that draws them.

    build(run)          the report of one run folder
    compare(runs)       several runs side by side: settings that differ, findings, figures

The page makes no request and may make none: its content security policy forbids everything but its own two
scripts and its own style sheet, named by their hashes. Every string that comes from a model, a text or a run is
escaped where it enters.
"""

from __future__ import annotations

import base64
import hashlib
import importlib
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib import resources
from typing import Any

from perpend.errors import InputError
from perpend.report import theme
from perpend.report.data import Store, script_json
from perpend.report.figure import Figure
from perpend.runs import differences


def build(run: Any) -> str:
    """The report of a run: what was measured, on what, how, what was found, then the figures."""
    store = Store()
    figures = figures_of(run)
    document = run.document
    parts = [
        _header(run),
        _findings(document.get("findings") or []),
        _conventions(document.get("conventions") or {}),
        _contents([figure.title for figure in figures]),
    ]
    specs = []
    for number, figure in enumerate(figures, 1):
        spec, markup = _figure(figure, number, store)
        specs.append(spec)
        parts.append(markup)
    parts.append(_undefined(document.get("undefined")))
    parts.append(_record(document))
    return _page(f"{question(run.command)} – {_model_name(document)}", parts, specs, store, [run])


def compare(runs: Sequence[Any], names: Sequence[str] | None = None) -> str:
    """Several runs on one page; figures with the same title are overlaid where they can be, else side by side."""
    if len(runs) < 2:
        raise InputError("a comparison needs two runs or more")
    names = list(names or [str(run.folder) for run in runs])
    store = Store()
    made = [{figure.title: figure for figure in figures_of(run)} for run in runs]
    titles = list(dict.fromkeys(title for figures in made for title in figures))
    parts = [
        _compare_header(runs, names),
        _settings(runs, names),
        _findings_beside(runs, names),
        _contents(titles),
    ]
    specs = []
    for number, title in enumerate(titles, 1):
        having = [(name, figures[title]) for name, figures in zip(names, made) if title in figures]
        spec, markup = _figure(_joined(title, having), number, store)
        specs.append(spec)
        parts.append(markup)
    return _page(f"Comparison of {len(runs)} runs", parts, specs, store, runs)


def figures_of(run: Any) -> list[Figure]:
    """The figures that the run's command makes of it; a command that perpend does not know has none."""
    module = _module(run.command)
    make = getattr(module, "figures", None)
    return list(make(run)) if make is not None else []


def question(command: str) -> str:
    """What the command asks, as its help says it."""
    described = getattr(getattr(_module(command), "command", None), "help", None) or ""
    first = re.split(r"\n\s*\n", described.strip())[0]
    return " ".join(first.split()).rstrip(".") or command


def _module(command: str) -> Any:
    name = command.replace("-", "_")
    if not name.isidentifier():
        return None
    try:
        return importlib.import_module(f"perpend.commands.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"perpend.commands.{name}":
            raise
        return None


# --- parts of the page ---


def _header(run: Any) -> str:
    return (
        f'<header><p class="kind">perpend {escape(run.command)} · {escape(_day(run.document))}</p>'
        f"<h1>{escape(question(run.command))}</h1><p class=on>{_on(run.document)}</p>"
    )


def _on(document: Mapping[str, Any]) -> str:
    """The model and the text in a sentence."""
    model, data = document.get("model"), document.get("data")
    parts = []
    if isinstance(model, Mapping):
        facts = [
            _count(model.get("parameters"), "parameters"),
            _count(model.get("layers"), "layers"),
            model.get("dtype"),
        ]
        told = ", ".join(str(fact) for fact in facts if fact)
        parts.append(f"On <b>{_text(model.get('name'))}</b>" + (f" ({escape(told)})" if told else ""))
    elif model:
        parts.append(f"On <b>{_text(model)}</b>")
    if isinstance(data, Mapping):
        cut = ""
        if data.get("sequences") and data.get("length"):
            cut = f", {data['sequences']:,} sequences of {data['length']:,} tokens"
        bos = {True: ", each opened by a BOS", False: ", without a BOS"}.get(data.get("bos"), "")
        parts.append(f"reading <b>{_text(data.get('name'))}</b>{escape(cut + bos)}")
    elif data:
        parts.append(f"reading <b>{_text(data)}</b>")
    seeds = document.get("seeds")
    if isinstance(seeds, list) and seeds:
        parts.append(f"{'seed' if len(seeds) == 1 else 'seeds'} {escape(', '.join(map(str, seeds)))}")
    return ", ".join(parts) + "." if parts else ""


def _findings(findings: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(str(line))}</li>" for line in findings)
    return f'<ol class="findings" aria-label="Findings">{items}</ol>' if items else ""


def _conventions(conventions: Mapping[str, Any]) -> str:
    facts = "".join(
        f"<div><dt>{_words(name)}</dt><dd>{_text(value)}</dd></div>" for name, value in conventions.items()
    )
    return (
        f'<h2 class="caps">Conventions</h2><dl class="facts">{facts}</dl></header>' if facts else "</header>"
    )


def _contents(titles: Sequence[str]) -> str:
    if len(titles) < 3:
        return ""
    items = "".join(
        f'<li><span>{number}</span><a href="#figure-{number - 1}">{escape(title)}</a></li>'
        for number, title in enumerate(titles, 1)
    )
    return f'<nav class="contents" aria-label="Figures"><ol>{items}</ol></nav>'


def _figure(figure: Figure, number: int, store: Store) -> tuple[dict[str, Any], str]:
    """The specification for the script and the markup it fills."""
    charts = figure.charts
    drawn = [store.chart(chart) for chart in charts.values()]
    spec: dict[str, Any] = {
        "title": figure.title,
        "file": re.sub(r"[^A-Za-z0-9]+", "-", figure.title).strip("-").lower()[:60] or f"figure-{number}",
        "charts": drawn,
        "table": store.table(figure.table),
    }
    pickable = figure.detail is not None
    sides = []
    for (subtitle, _), one in zip(charts.items(), drawn):
        name = f"{figure.title}: {subtitle}" if subtitle else figure.title
        head = f"<h3>{escape(subtitle)}</h3>" if subtitle else ""
        keys = ' tabindex="0" data-pickable="yes"' if pickable else ""
        how = (
            ". Arrow keys choose; the numbers are in the table below"
            if pickable
            else ". Its numbers are below"
        )
        sides.append(
            f'<div class="side">{head}<div class="chart" role="img"{keys}'
            f'{" data-framed=yes" if one["framed"] else ""} aria-label="{escape(name + how)}"></div></div>'
        )
    panel = ""
    if figure.detail is not None:
        spec["detail"], panel = _detail(figure, store)
    two = " two" if len(charts) > 1 else ""
    index = number - 1
    title = f'<span class="number">{number}</span>{escape(figure.title)}'
    tools = (
        '<button type="button" data-do="table" aria-expanded="false">Show numbers</button>'
        '<button type="button" data-do="csv">CSV</button><button type="button" data-do="svg">SVG</button>'
    )
    return spec, (
        f'<figure class="study" id="figure-{index}" aria-labelledby="title-{index}"><h2 id="title-{index}">{title}</h2>'
        f'<p class="question">{escape(figure.question)}</p><div class="charts{two}">{"".join(sides)}</div>'
        f'<figcaption><p class="read">{escape(figure.how_to_read)}</p><div class="tools">{tools}</div></figcaption>'
        f'<div class="numbers" hidden tabindex="0" role="region" aria-label="Numbers of {escape(figure.title)}"></div>'
        f"{panel}</figure>"
    )


def _detail(figure: Figure, store: Store) -> tuple[dict[str, Any], str]:
    assert figure.detail is not None
    keys = [str(key) for key in figure.detail.keys]
    missing = [key for key in keys if key not in figure.detail.table.columns]
    if missing or not len(figure.detail.table):
        raise InputError(f"the detail of figure {figure.title!r} has no rows or lacks the key {missing}")
    spec = {
        "keys": keys,
        "table": store.table(figure.detail.table),
        "charts": [store.chart(chart) for chart in figure.detail.charts.values()],
    }
    lists = "".join(
        f'<label>{_words(key)} <select data-key="{escape(key)}"></select></label>' for key in keys
    )
    charts = "".join(
        f'<div class="side"><h3>{escape(name)}</h3><div class="chart" role="img" aria-label="{escape(name)}"></div></div>'
        for name in figure.detail.charts
    )
    two = " two" if len(figure.detail.charts) > 1 else ""
    return spec, (
        f'<section class="detail" aria-label="Detail of {escape(figure.title)}"><form>{lists}</form>'
        f'<dl class="facts" aria-live="polite"></dl><div class="charts{two}">{charts}</div></section>'
    )


def _undefined(undefined: Any) -> str:
    if not undefined:
        return ""
    if isinstance(undefined, Mapping):
        rows = [(str(name), _plainly(why)) for name, why in undefined.items()]
        return '<section class="also"><h2>Left undefined</h2>' + _grid(["what", "why"], rows) + "</section>"
    items = "".join(f"<li>{_text(item)}</li>" for item in undefined)
    return f'<section class="also"><h2>Left undefined</h2><ul>{items}</ul></section>'


def _record(document: Mapping[str, Any]) -> str:
    """What is needed to repeat the run."""
    request = {key: value for key, value in (document.get("request") or {}).items()}
    blocks = [
        ("Request", [(name, _plainly(value)) for name, value in _flat(request)]),
        (
            "Environment",
            [(name, _plainly(value)) for name, value in _flat(document.get("environment") or {})],
        ),
    ]
    told = "".join(
        f"<details><summary>{title}</summary>{_grid(['setting', 'value'], rows)}</details>"
        for title, rows in blocks
        if rows
    )
    return f'<section class="also"><h2>To repeat this run</h2>{told}</section>'


# --- comparisons ---


def _compare_header(runs: Sequence[Any], names: Sequence[str]) -> str:
    commands = list(dict.fromkeys(run.command for run in runs))
    title = question(commands[0]) if len(commands) == 1 else "Runs of different kinds, side by side"
    models = ", ".join(dict.fromkeys(_model_name(run.document) for run in runs))
    return (
        f'<header><p class="kind">perpend {escape(" and ".join(commands))} · {len(runs)} runs</p>'
        f"<h1>{escape(title)}</h1><p class=on>On <b>{escape(models)}</b>.</p></header>"
    )


def _settings(runs: Sequence[Any], names: Sequence[str]) -> str:
    """The settings in which the runs differ; equal ones are not repeated."""
    flat = [
        dict(_flat({"request": r.document.get("request"), "environment": r.document.get("environment")}))
        for r in runs
    ]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = []
    for key in keys:
        values = [one.get(key, "–") for one in flat]
        if any(differences(values[0], value) for value in values[1:]):
            rows.append((key.removeprefix("request."), *(_plainly(value) for value in values)))
    told = _grid(["setting", *names], rows) if rows else "<p>The requests are the same.</p>"
    return f'<section class="also"><h2>What differs</h2>{told}</section>'


def _findings_beside(runs: Sequence[Any], names: Sequence[str]) -> str:
    sections = "".join(
        f"<section><h3>{escape(name)}</h3>{_findings(run.document.get('findings') or ['no findings'])}</section>"
        for name, run in zip(names, runs)
    )
    return f'<section class="also"><h2>Findings</h2><div class="runs">{sections}</div></section>'


def _joined(title: str, having: Sequence[tuple[str, Figure]]) -> Figure:
    """One figure of several runs: overlaid where the figure says how, else chart beside chart."""
    import pandas as pd

    first = having[0][1]
    table = pd.concat([figure.table.assign(run=name) for name, figure in having], ignore_index=True)
    table = table[["run", *(column for column in table.columns if column != "run")]]
    if first.overlay is not None and len(having) > 1:
        chart: Any = first.overlay(table)
    else:
        chart = {
            f"{name} – {subtitle}" if subtitle else name: one
            for name, figure in having
            for subtitle, one in figure.charts.items()
        }
    return Figure(title, first.question, chart, table, first.how_to_read)


# --- the whole ---

_POLICY = (
    "default-src 'none'; script-src {scripts}; style-src {style}; img-src data: blob:; "
    "base-uri 'none'; form-action 'none'"
)


def _page(title: str, parts: Sequence[str], specs: list[Any], store: Store, runs: Sequence[Any]) -> str:
    style = _asset("page.css")
    style = f"{_variables()}\n{style}"
    scripts = [_libraries(), _asset("page.js")] if specs else []
    data = {"figures": specs, "data": store.columns, "roles": theme.LIGHT, "config": _config()}
    policy = _POLICY.format(scripts=" ".join(map(_hash, scripts)) or "'none'", style=_hash(style))
    embedded = f'<script type="application/json" id="page-data">{script_json(data)}</script>' if specs else ""
    code = "".join(f"<script>{script}</script>" for script in scripts)
    version = runs[0].document.get("version")
    folders = ", ".join(str(run.folder) for run in runs)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="referrer" content="no-referrer">\n'
        f'<link rel="icon" href="data:,">\n<title>{escape(title)}</title>\n<style>{style}</style>\n</head>\n<body>\n'
        '<a class="skip" href="#main">To the content</a>\n'
        f'<main class="page" id="main">\n{"".join(parts)}\n'
        f"<footer>perpend {_text(version)} · {escape(folders)} · this page is complete: it loads nothing.</footer>"
        "<noscript><p>The charts of this report are drawn by the script inside it; every number is in the "
        f"folder beside it.</p></noscript>\n</main>\n{embedded}{code}\n</body>\n</html>\n"
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


@lru_cache(1)
def _libraries() -> str:
    """Vega, Vega-Lite and Vega-Embed in the version that altair writes for, with nothing that could end a script."""
    import altair as alt
    import vl_convert

    wanted = re.sub(r"^v?(\d+\.\d+).*", r"\1", alt.SCHEMA_VERSION)
    offered = vl_convert.get_vegalite_versions()
    newest = offered[-1]
    version = wanted if wanted in offered and wanted != newest else None
    return (
        vl_convert.javascript_bundle(vl_version=version)
        .replace("</script", "<\\/script")
        .replace("<!--", "<\\!--")
    )


def _asset(name: str) -> str:
    return resources.files("perpend.report").joinpath("assets", name).read_text(encoding="utf-8")


def _hash(content: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


# --- words ---


def _grid(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="wide" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _flat(value: Mapping[str, Any], name: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, item in value.items():
        path = f"{name}.{key}" if name else str(key)
        out += _flat(item, path) if isinstance(item, Mapping) and item else [(path, item)]
    return out


def _plainly(value: Any) -> str:
    if value is None or value == {} or value == []:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(_plainly(item) for item in value)
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_plainly(item)}" for name, item in value.items())
    return str(value)


def _text(value: Any) -> str:
    return escape(_plainly(value))


def _words(name: Any) -> str:
    return escape(str(name).replace("_", " "))


def _count(number: Any, what: str) -> str:
    from perpend.progress import short

    if not isinstance(number, (int, float)):
        return ""
    return f"{short(number) if number >= 10_000 else number} {what}"


def _model_name(document: Mapping[str, Any]) -> str:
    model = document.get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    return str(name) if name else str(document.get("command"))


def _day(document: Mapping[str, Any]) -> str:
    return str(document.get("finished", ""))[:10]
