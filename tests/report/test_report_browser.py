"""Reports in a real browser: they draw, answer, ask for nothing and cannot be made to."""

from __future__ import annotations

import csv
import http.server
import io
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perpend import output
from perpend.report import Figure, charts, theme
from perpend.report.page import build, compare
from perpend.runs import FinishedRun

CELL = "#figure-0 .chart .mark-rect path"


def colour(hexadecimal: str) -> str:
    r, g, b = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgb({r}, {g}, {b})"


@pytest.mark.parametrize(
    ("width", "dark"),
    [(1280, False), (1280, True), (390, False), (320, True)],
    ids=["desk", "dark", "phone", "small"],
)
def test_every_chart_draws_without_a_complaint_or_a_request(
    browser, run: FinishedRun, width: int, dark: bool
) -> None:
    browser.open(run.folder / "report.html", width=width, dark=dark)
    places = browser.js(
        "return [...document.querySelectorAll('.chart')].map(c => [c.dataset.drawn, c.offsetHeight])"
    )
    assert len(places) == 10  # seven figures, one of two charts, and two charts of the chosen head
    assert all(drawn == "yes" and height > 60 for drawn, height in places), places
    assert browser.complaints() == []
    assert browser.requests() == []
    assert browser.js("return document.documentElement.scrollWidth") <= width  # nothing to pan sideways
    overflow = (
        "return [...document.querySelectorAll('.chart')].every(c => c.scrollWidth <= c.clientWidth + 1)"
    )
    assert browser.js(overflow)


def test_legends_keep_to_their_charts_when_the_window_changes(browser, run: FinishedRun) -> None:
    out_of_place = """return [...document.querySelectorAll('.chart svg .role-legend')].filter(legend => {
      const own = legend.getBoundingClientRect(), svg = legend.closest('svg').getBoundingClientRect();
      return own.top < svg.top - 1 || own.bottom > svg.bottom + 1;
    }).length"""
    browser.open(run.folder / "report.html", width=1280)
    assert browser.js(out_of_place) == 0
    browser.do(
        "Emulation.setDeviceMetricsOverride",
        {"width": 420, "height": 900, "deviceScaleFactor": 1, "mobile": False},
    )
    browser.wait("return document.querySelector('.chart svg').getBoundingClientRect().width < 420")
    browser.wait(out_of_place.replace("}).length", "}).length === 0"))


def test_text_and_marks_follow_the_colour_scheme(browser, run: FinishedRun) -> None:
    ground = "return getComputedStyle(document.body).backgroundColor"
    label = "return getComputedStyle(document.querySelector('#figure-1 .role-axis-label text')).fill"
    line = "return getComputedStyle(document.querySelector('#figure-1 .mark-line path')).stroke"
    for dark in (False, True):
        browser.open(run.folder / "report.html", dark=dark)
        assert browser.js(ground) == colour(theme.ROLES["paper"][dark])
        assert browser.js(label) == colour(theme.ROLES["soft"][dark])
        assert browser.js(line) == colour(theme.ROLES["content"][dark])
    browser.do("Emulation.setEmulatedMedia", {"media": "print"})
    assert browser.js(label) == colour(theme.ROLES["soft"][0])  # paper is light, whatever the screen was
    shown = "return getComputedStyle(document.querySelector('.tools')).display"
    assert browser.js(shown) == "none"


def test_hovering_shows_the_numbers(browser, run: FinishedRun) -> None:
    browser.open(run.folder / "report.html")
    assert browser.js("return document.querySelector('.tip').hidden")
    browser.point(CELL, 40)
    browser.wait("return !document.querySelector('.tip').hidden")
    told = browser.js("return [...document.querySelectorAll('.tip dt')].map(e => e.textContent)")
    assert told == ["layer", "head", "sink mass", "dispersion"]


def test_a_click_the_keys_and_the_lists_open_a_head(browser, run: FinishedRun) -> None:
    browser.open(run.folder / "report.html")
    opened = "return document.querySelector('.detail').dataset.open"
    assert browser.js(opened) == "0 0"
    signature = "return [...document.querySelectorAll('.detail .chart')][0].innerHTML"
    before = browser.js(signature)
    browser.point("#figure-0 .chart .mark-rect path[transform], " + CELL, 60, click=True)
    browser.wait("return document.querySelector('.detail').dataset.open !== '0 0'")
    layer, head = map(int, browser.js(opened).split())
    row = run.tables["heads"].set_index(["layer", "head"]).loc[(layer, head)]
    facts = browser.js("return [...document.querySelectorAll('.detail dd')].map(e => e.textContent)")
    assert float(facts[0]) == pytest.approx(row["sink_mass"], rel=1e-3)
    assert browser.js(signature) != before
    frame = """#figure-0 > .charts .mark-rect path[stroke="var(--ink)"]"""
    browser.wait("return document.querySelector(arguments[0])", frame)

    browser.js("document.querySelector('#figure-0 > .charts .chart').focus()")
    step = 1 if layer < 11 else -1
    browser.press("\ue014" if step == 1 else "\ue012")  # right or left
    browser.wait(f"return document.querySelector('.detail').dataset.open === '{layer + step} {head}'")
    browser.js(
        "const list = document.querySelector('select[data-key=head]'); list.value = '5';"
        "list.dispatchEvent(new Event('change'))"
    )
    browser.wait(f"return document.querySelector('.detail').dataset.open === '{layer + step} 5'")
    assert browser.complaints() == []


def test_numbers_open_as_a_table(browser, run: FinishedRun) -> None:
    browser.open(run.folder / "report.html")
    browser.point("#figure-3 button[data-do=table]", click=True)
    browser.wait("return document.querySelector('#figure-3 .numbers table')")
    cells = browser.js(
        "return [...document.querySelectorAll('#figure-3 tbody tr')].map(r => r.cells[0].textContent)"
    )
    assert cells == run.tables["reversal"]["metric"].tolist()
    caption = browser.js("return document.querySelector('#figure-3 caption').textContent")
    assert caption == "Reversals by metric"
    browser.point("#figure-3 button[data-do=table]", click=True)
    browser.wait("return document.querySelector('#figure-3 .numbers').hidden")


def test_numbers_and_pictures_download(browser, run: FinishedRun) -> None:
    browser.open(run.folder / "report.html", dark=True)
    browser.point("#figure-3 button[data-do=csv]", click=True)
    rows = list(csv.DictReader(io.StringIO(browser.downloaded("reversals-by-metric.csv"))))
    table = run.tables["reversal"]
    assert [row["metric"] for row in rows] == table["metric"].tolist()
    assert [float(row["mean"]) for row in rows] == pytest.approx(table["mean"].tolist(), rel=1e-6)
    browser.point("#figure-5 button[data-do=svg]", click=True)
    for number in (1, 2):
        picture = browser.downloaded(f"families-of-heads-{number}.svg")
        assert picture.startswith("<svg")
        assert "var(--" not in picture  # a file of its own needs colours of its own
        assert theme.LIGHT["soft"] in picture
    assert browser.complaints() == []


def test_hostile_strings_stay_text(browser, make_run: Callable[..., FinishedRun]) -> None:
    hostile = make_run("hostile", hostile=True, layers=4, heads=4)
    browser.open(hostile.folder / "report.html")
    assert browser.js("return document.querySelectorAll('img').length") == 0
    assert browser.js("return document.scripts.length") == 3
    assert "onerror" in browser.js("return document.querySelector('.on').textContent")
    assert "onerror" in browser.js("return document.querySelector('#figure-3 svg').textContent")
    browser.point("#figure-3 .mark-rect path", 0)
    browser.wait("return !document.querySelector('.tip').hidden")
    assert browser.js("return document.querySelector('.tip').children.length") == 1
    assert browser.complaints() == []
    assert browser.requests() == []


@pytest.fixture
def listener() -> Iterator[tuple[str, list[str]]]:
    """A server on this machine that notes who calls."""
    calls: list[str] = []

    class Note(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            calls.append(self.path)
            self.send_response(200)
            self.send_header("Access-Control-Allow-Origin", "*")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Note)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", calls
    server.shutdown()


CALL = """
const done = arguments[arguments.length - 1], address = arguments[0];
const image = new Image();
const ask = () => fetch(address + '/fetch').then(() => done('fetched'), () => done('blocked'));
image.onload = image.onerror = ask;
image.src = address + '/image';
"""


def test_even_code_in_the_page_could_ask_for_nothing(
    browser, run: FinishedRun, listener: tuple[str, list[str]], tmp_path: Path
) -> None:
    address, calls = listener
    (tmp_path / "open.html").write_text("<!doctype html><html data-ready=yes><title>no policy</title>")
    browser.open(tmp_path / "open.html")
    assert browser.driver.execute_async_script(CALL, address) == "fetched"
    assert calls == ["/image", "/fetch"]  # so the listener hears what a page without the policy asks
    calls.clear()
    browser.open(run.folder / "report.html")
    assert browser.driver.execute_async_script(CALL, address) == "blocked"
    assert calls == []
    browser.complaints()


def test_a_comparison_draws_too(
    browser, run: FinishedRun, make_run: Callable[..., FinishedRun], tmp_path: Path
) -> None:
    page = tmp_path / "comparison.html"
    page.write_text(compare([run, make_run("other", layers=6, heads=4, seed=1)]), encoding="utf-8")
    browser.open(page)
    drawn = browser.js("return [...document.querySelectorAll('.chart')].map(c => c.dataset.drawn)")
    assert set(drawn) == {"yes"}
    assert browser.js("return document.querySelectorAll('#figure-0 .chart').length") == 2  # side by side
    assert browser.js("return document.querySelectorAll('#figure-1 .chart').length") == 1  # overlaid
    legend = browser.js("return document.querySelector('#figure-1 .role-legend').textContent")
    assert legend == "runother"
    assert browser.complaints() == []
    assert browser.requests() == []


@pytest.mark.slow
def test_a_large_model_opens_quickly(browser, make_run: Callable[..., FinishedRun]) -> None:
    large = make_run("large", layers=32, heads=32)
    page = large.folder / "report.html"
    assert page.stat().st_size < 3_000_000
    browser.open(page)
    assert browser.js("return performance.now()") < 15_000
    assert browser.complaints() == []


def one_figure(
    monkeypatch: pytest.MonkeyPatch, run: FinishedRun, path: Path, chart, table: pd.DataFrame
) -> Path:
    """A page of one figure."""
    from perpend.commands import fake

    monkeypatch.setattr(fake, "figures", lambda run: [Figure("One", "What?", chart, table, "So.")])
    path.write_text(build(run), encoding="utf-8")
    return path


def test_a_table_shows_numbers_as_the_terminal_does(browser, run, tmp_path: Path, monkeypatch) -> None:
    hard = pd.DataFrame(
        {
            "near": [10.8101, 10.8123, 10.8120, 10.8110, 10.8100],
            "wide": [123456.7, 0.000012345, -0.5, 1234.56, 9999.7],
            "whole": [134515008.0, 3.0, -2.0, 0.0, math.nan],
            "count": [1, 20, 300, 4000, 50000],
            "kept": [True, False, True, True, False],
            "name": ["a", "b", "", "d", "e"],
        }
    )
    chart = charts.scatter(hard, "count", "near")
    browser.open(one_figure(monkeypatch, run, tmp_path / "page.html", chart, hard))
    browser.point("#figure-0 button[data-do=table]", click=True)
    shown = browser.wait(
        "const rows = [...document.querySelectorAll('.numbers tbody tr')];"
        "return rows.length && rows.map(r => [...r.cells].map(c => c.textContent))"
    )
    terminal = [list(column.cells) for column in output.table(hard.replace({"name": {"": None}})).columns]
    assert shown == [[str(cell) for cell in row] for row in zip(*terminal)]
    assert [row[0] for row in shown] == ["10.8101", "10.8123", "10.812", "10.811", "10.81"]
    assert [row[1] for row in shown] == ["123457", "1.234e-05", "-0.5", "1235", "10000"]
    assert [row[2] for row in shown] == ["134515008", "3", "-2", "0", "–"]
    browser.point("#figure-0 button[data-do=csv]", click=True)
    assert "10.8101,123456.7,134515008,1,true,a" in browser.downloaded("one.csv")


def test_no_word_of_a_table_is_broken_for_want_of_room(browser, run, tmp_path: Path, monkeypatch) -> None:
    table = pd.DataFrame({f"a long name of column {i}": [0.5, 0.25] for i in range(14)})
    table.insert(0, "metric", ["jensen_shannon", "euclidean"])
    chart = charts.bars(table, "a long name of column 0", by="metric")
    page = one_figure(monkeypatch, run, tmp_path / "page.html", chart, table)
    for width in (1280, 390):
        browser.open(page, width=width)
        browser.point("#figure-0 button[data-do=table]", click=True)
        heights = browser.wait(
            "const rows = [...document.querySelectorAll('.numbers tbody tr')];"
            "return rows.length && rows.map(r => r.cells[0].offsetHeight)"
        )
        assert max(heights) < 40, "a word takes two lines"
        assert browser.js("return document.documentElement.scrollWidth") <= width


def test_names_of_points_cross_nothing(browser, run, tmp_path: Path, monkeypatch) -> None:
    rng = np.random.default_rng(4)
    points = pd.DataFrame({"x": rng.random(14), "y": rng.random(14)})
    points["name"] = [f"some-model-{i}b" for i in range(14)]
    curve = pd.DataFrame({"x": [0.0, 0.5, 1.0], "y": [0.0, 0.7, 1.0]})
    chart = charts.scatter(points, "x", "y", curve=curve, name="name")
    three = {"one": chart, "two": chart, "three": chart}
    page = one_figure(monkeypatch, run, tmp_path / "page.html", three, points)
    crossing = """return [...document.querySelectorAll('.chart svg')].map(svg => {
      const box = (e) => e.getBoundingClientRect();
      const names = [...svg.querySelectorAll('.mark-text.role-mark text')].map(box);
      const marks = [...svg.querySelectorAll('.mark-symbol.role-mark path')].map(box);
      const cross = (a, b) => a.left < b.right - 1 && b.left < a.right - 1
        && a.top < b.bottom - 1 && b.top < a.bottom - 1;
      const bad = names.filter((a, i) => [...marks, ...names.slice(0, i)].some(b => cross(a, b)));
      const cut = names.filter(a => a.left < box(svg).left - 1 || a.right > box(svg).right + 1);
      return [names.length, marks.length, bad.length + cut.length];
    })"""
    for width in (1280, 390):
        browser.open(page, width=width)
        for names, marks, bad in browser.js(crossing):
            assert names >= 5
            assert marks == 14
            assert bad == 0


def test_conventions_use_a_phone_s_width(browser, run: FinishedRun) -> None:
    browser.open(run.folder / "report.html", width=390)
    places = browser.js(
        "return [...document.querySelectorAll('.conventions dd')].map(e => {"
        "const r = e.getBoundingClientRect(); return [r.left, r.width]; })"
    )
    assert len(places) == 5
    assert len({left for left, _ in places}) == 1  # one column
    assert all(width > 0.58 * 390 for _, width in places)
