"""The report's HTML, part by part; every string from a model, a text or a run is escaped where it enters."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from perpend.errors import InputError
from perpend.progress import short
from perpend.report.data import Store
from perpend.report.figure import Figure
from perpend.runs import differences

FIRST = 4  # findings on the first screen
SHOWN = 16  # findings open to the eye; what a long sweep adds is folded away


def question(command: str) -> str:
    """What the command asks, as its help says it."""
    described = getattr(getattr(module_of(command), "command", None), "help", None) or ""
    first = " ".join(re.split(r"\n\s*\n", described.strip())[0].split()).replace("`", "")
    first = re.sub(r"\b(each|the|every) (MODEL|RUN)\b", lambda m: m[0].lower(), first)
    first = first.replace("a MODEL", "a model")
    return re.sub(r"\b(MODEL|RUN)\b", lambda m: f"a {m[0].lower()}", first).rstrip(".") or command


def module_of(command: str) -> Any:
    name = command.replace("-", "_")
    if not name.isidentifier():
        return None
    try:
        return importlib.import_module(f"perpend.commands.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"perpend.commands.{name}":
            raise
        return None


def header(run: Any) -> str:
    """The first screen: what was asked, of what, what was found, and under which conventions."""
    document = run.document
    findings = [str(line) for line in document.get("findings") or []]
    beside, below = _conventions(document.get("conventions") or {}, findings[:FIRST])
    return (
        f'<header><p class="kind">perpend {escape(run.command)} · {escape(_day(document))}</p>'
        f"<h1>{escape(question(run.command))}</h1><p class=on>{_on(document)}</p>"
        f'<div class="first">{findings_list(findings[:FIRST])}{beside}</div>'
        f"{below}{_more_findings(findings[FIRST:])}</header>"
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
        parts.append(f"On <b>{text(model.get('name'))}</b>" + (f" ({escape(told)})" if told else ""))
    elif model:
        parts.append(f"On <b>{text(model)}</b>")
    if isinstance(data, Mapping):
        cut = ""
        if data.get("sequences") and data.get("length"):
            cut = f", {data['sequences']:,} sequences of {data['length']:,} tokens"
        bos = {True: ", each opened by a BOS", False: ", without a BOS"}.get(data.get("bos"), "")
        parts.append(f"reading <b>{text(data.get('name'))}</b>{escape(cut + bos)}")
    elif data:
        parts.append(f"reading <b>{text(data)}</b>")
    seeds = document.get("seeds")
    if isinstance(seeds, list) and seeds:
        parts.append(f"{'seed' if len(seeds) == 1 else 'seeds'} {escape(', '.join(map(str, seeds)))}")
    return ", ".join(parts) + "." if parts else ""


def findings_list(findings: Sequence[str]) -> str:
    items = "".join(f"<li>{escape(str(line))}</li>" for line in findings)
    return f'<ol class="findings" aria-label="Findings">{items}</ol>' if items else ""


def _more_findings(findings: Sequence[str]) -> str:
    """What does not belong on the first screen, smaller and counted on."""
    if not findings:
        return ""
    items = "".join(f"<li>{escape(str(line))}</li>" for line in findings)
    listed = f'<ol class="findings more" aria-label="More findings">{items}</ol>'
    if FIRST + len(findings) <= SHOWN:
        return listed
    return f"<details class=folded><summary>{len(findings)} further findings</summary>{listed}</details>"


def _conventions(conventions: Mapping[str, Any], findings: Sequence[str] = ()) -> tuple[str, str]:
    """Conventions for the column beside the findings, as many as it has room for, and the rest."""
    told = [v for v in conventions.values() if isinstance(v, str)]
    once = {
        k: [part for part in v if part not in told] if isinstance(v, list) else v
        for k, v in conventions.items()  # a note that another entry says word for word is not said again
    }
    room = max(sum(1.9 + 1.86 * -(-len(line) // 50) for line in findings), 14.0)  # rem, as the sheet sets it
    beside, below, used = "", "", 2.4
    for name, value in once.items():
        if value == [] and conventions[name]:
            continue
        lines = _lines(value)
        tall = 1.9 + 1.3 * sum(-(-len(line) // 34) for line in lines)
        wide = " class=long" if tall > 7 else ""
        item = f"<dt>{_words(name)}</dt><dd>{'<br>'.join(map(escape, lines))}</dd>"
        if not beside or used + tall <= room + 2:
            beside, used = beside + f"<div>{item}</div>", used + tall
        else:
            below += f"<div{wide}>{item}</div>"
    title = '<h2 class="caps">{}</h2>'
    column, rest = (
        f'<section class="conventions">{title.format(said)}<dl class="facts">{facts}</dl></section>'
        for said, facts in (("Conventions", beside), ("Further conventions", below))
    )
    return column if beside else "", rest.replace("conventions", "conventions rest", 1) if below else ""


def _lines(value: Any) -> list[str]:
    """A convention line by line: each entry of a mapping on its own, a record in JSON in words."""
    if not isinstance(value, Mapping) or not value:
        return [_plainly(value)]
    return [
        f"{name}: {', '.join(map(_worded, item if isinstance(item, list) else [item]))}"
        for name, item in value.items()
    ]


def _worded(value: Any) -> str:
    if not isinstance(value, str) or not value.startswith("{"):
        return _plainly(value)
    try:
        record = json.loads(value)
    except ValueError:
        return value
    return " ".join(f"{name} {_plainly(item)}" for name, item in record.items() if item is not None)


def contents(titles: Sequence[str]) -> str:
    if len(titles) < 3:
        return ""
    items = "".join(
        f'<li><span>{number}</span><a href="#figure-{number - 1}">{escape(title)}</a></li>'
        for number, title in enumerate(titles, 1)
    )
    return f'<nav class="contents" aria-label="Figures"><ol>{items}</ol></nav>'


def figure_block(figure: Figure, number: int, store: Store) -> tuple[dict[str, Any], str]:
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
        role = "application" if pickable else "img"  # arrow keys reach an application, not an image
        how = (
            ". Arrow keys choose; the numbers are in the table below"
            if pickable
            else ". Its numbers are below"
        )
        sides.append(
            f'<div class="side">{head}<div class="chart" role="{role}"{keys}'
            f'{" data-framed=yes" if one["framed"] else ""} aria-label="{escape(name + how)}"></div></div>'
        )
    panel = ""
    if figure.detail is not None:
        spec["detail"], panel = _detail(figure, store)
    two = {1: "", 3: " three"}.get(len(charts), " two")
    index, name = number - 1, escape(figure.title)
    title = f'<span class="number">{number}</span>{escape(figure.title)}'
    tools = (
        '<button type="button" data-do="table" aria-expanded="false">Show numbers</button>'
        '<button type="button" data-do="csv">CSV</button><button type="button" data-do="svg">SVG</button>'
    )
    return spec, (
        f'<figure class="study" id="figure-{index}" aria-labelledby="title-{index}">'
        f'<h2 id="title-{index}">{title}</h2>'
        f'<p class="question">{escape(figure.question)}</p>'
        f'<div class="charts{two}">{"".join(sides)}</div>'
        f'<figcaption><p class="read">{escape(figure.how_to_read)}</p>'
        f'<div class="tools">{tools}</div></figcaption>'
        f'<div class="numbers" hidden tabindex="0" role="region" aria-label="Numbers of {name}"></div>'
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
        f'<div class="side"><h3>{escape(name)}</h3>'
        f'<div class="chart" role="img" aria-label="{escape(name)}"></div></div>'
        for name in figure.detail.charts
    )
    two = " two" if len(figure.detail.charts) > 1 else ""
    return spec, (
        f'<section class="detail" aria-label="Detail of {escape(figure.title)}"><form>{lists}</form>'
        f'<dl class="facts" aria-live="polite"></dl><div class="charts{two}">{charts}</div></section>'
    )


def undefined_list(undefined: Any) -> str:
    if not undefined:
        return ""
    if isinstance(undefined, Mapping):
        rows = [(str(name), _plainly(why)) for name, why in undefined.items()]
        return '<section class="also"><h2>Left undefined</h2>' + _grid(["what", "why"], rows) + "</section>"
    items = "".join(f"<li>{text(item)}</li>" for item in undefined)
    return f'<section class="also"><h2>Left undefined</h2><ul>{items}</ul></section>'


def record(document: Mapping[str, Any]) -> str:
    """What is needed to repeat the run."""
    request = document.get("request") or {}
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


def compare_header(runs: Sequence[Any], names: Sequence[str]) -> str:
    commands = list(dict.fromkeys(run.command for run in runs))
    title = question(commands[0]) if len(commands) == 1 else "Runs of different kinds, side by side"
    models = ", ".join(dict.fromkeys(model_name(run.document) for run in runs))
    return (
        f'<header><p class="kind">perpend {escape(" and ".join(commands))} · {len(runs)} runs</p>'
        f"<h1>{escape(title)}</h1><p class=on>On <b>{escape(models)}</b>.</p></header>"
    )


def settings_that_differ(runs: Sequence[Any], names: Sequence[str]) -> str:
    """The settings in which the runs differ; equal ones are not repeated."""
    wanted = ("request", "environment")
    flat = [dict(_flat({key: run.document.get(key) for key in wanted})) for run in runs]
    keys = list(dict.fromkeys(key for one in flat for key in one))
    rows = []
    for key in keys:
        values = [one.get(key, "–") for one in flat]
        if any(differences(values[0], value) for value in values[1:]):
            rows.append((key.removeprefix("request."), *(_hashed(_plainly(value)) for value in values)))
    told = _grid(["setting", *names], rows) if rows else "<p>The requests are the same.</p>"
    return f'<section class="also"><h2>What differs</h2>{told}</section>'


def _hashed(value: str) -> str:
    """A long hash by its beginning, which tells two apart; the whole is in run.json."""
    return f"{value[:16]}…" if re.fullmatch("[0-9a-f]{64}", value) else value


def findings_beside(runs: Sequence[Any], names: Sequence[str]) -> str:
    sections = "".join(
        f"<section><h3>{escape(name)}</h3>{findings_list(run.document.get('findings') or ['none'])}</section>"
        for name, run in zip(names, runs)
    )
    return f'<section class="also"><h2>Findings</h2><div class="runs">{sections}</div></section>'


def _grid(names: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return f'<div class="wide" tabindex="0" role="region" aria-label="{escape(names[0])}">{table}</div>'


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


def text(value: Any) -> str:
    return escape(_plainly(value))


def _words(name: Any) -> str:
    return escape(str(name).replace("_", " "))


def _count(number: Any, what: str) -> str:

    if not isinstance(number, (int, float)):
        return ""
    return f"{short(number) if number >= 10_000 else number} {what}"


def model_name(document: Mapping[str, Any]) -> str:
    model = document.get("model")
    name = model.get("name") if isinstance(model, Mapping) else model
    return str(name) if name else str(document.get("command"))


def _day(document: Mapping[str, Any]) -> str:
    return str(document.get("finished", ""))[:10]
