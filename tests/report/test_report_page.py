"""The page as a file: whole, small, escaped, reachable without a mouse or eyes, and honest about gaps."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perpend import cli
from perpend.errors import InputError, PerpendError
from perpend.report import Detail, Figure, charts, theme
from perpend.report.data import Store, script_json
from perpend.report.libraries import libraries
from perpend.report.markup import _conventions, _more_findings, figure_block, question
from perpend.report.notebook import Rich, table_html
from perpend.report.page import _readings, build, compare, figures_of, names_of
from perpend.runs import FinishedRun, Run


class Elements(HTMLParser):
    """Every start tag with its attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def text_of(run: FinishedRun) -> str:
    return (run.folder / "report.html").read_text(encoding="utf-8")


def data_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="page-data">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_a_note_that_another_convention_says_is_said_once() -> None:
    notes = {"support": "keys 0 to 63", "notes": ["keys 0 to 63", "no BOS"], "opening": []}
    page = "".join(_conventions(notes))
    assert page.count("keys 0 to 63") == 1
    assert "no BOS" in page
    assert "opening" in page
    assert "notes" not in "".join(_conventions({"support": "keys 0 to 63", "notes": ["keys 0 to 63"]}))


# --- whole and safe ---


def test_nothing_points_outside(run: FinishedRun) -> None:
    page = Elements(text_of(run))
    addresses = [a[k] for _, a in page.tags for k in ("src", "href", "action", "data") if a.get(k)]
    assert all(address.startswith(("#", "data:,")) for address in addresses), addresses
    assert "@import" not in text_of(run)
    assert not re.search(r"url\(\s*['\"]?http", text_of(run))


def test_the_policy_names_exactly_what_is_there(run: FinishedRun) -> None:
    page = Elements(text_of(run))
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == "'none'"
    assert "unsafe" not in policy
    code = re.findall(r"<(style|script)>(.*?)</\1>", text_of(run), re.DOTALL)
    for tag, text in code:
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in rules[f"{tag}-src"]
    assert [tag for tag, _ in code] == ["style", "script", "script"]


def test_hostile_strings_become_text(make_run: Callable[..., FinishedRun]) -> None:
    from perpend.commands.fake import HOSTILE

    hostile = make_run("hostile", hostile=True, layers=4, heads=4)
    for text in (text_of(hostile), compare([hostile, make_run("tame", layers=4, heads=4)])):
        page = Elements(text)
        assert len(page.all("script")) == 3
        assert page.all("img") == []
        assert HOSTILE not in text
        assert "&lt;/script&gt;&lt;img" in text
        values = json.dumps(data_of(text), ensure_ascii=False)
        assert json.dumps(HOSTILE, ensure_ascii=False)[1:-1] in values  # kept as it is, as data


@pytest.mark.parametrize("value", ["</script>", "<!--<script>", "\u2028", "&lt;", "]]>"])
def test_json_in_a_script_is_inert_and_exact(value: str) -> None:
    text = script_json({"x": value})
    assert not set("<>&\u2028\u2029") & set(text)
    assert json.loads(text) == {"x": value}


def test_a_large_model_stays_under_three_megabytes(make_run: Callable[..., FinishedRun]) -> None:
    assert (make_run("large", layers=32, heads=32).folder / "report.html").stat().st_size < 3_000_000


def test_one_copy_of_the_libraries_and_of_equal_data(run: FinishedRun) -> None:
    page = text_of(run)
    assert page.count(libraries()) == 1
    assert page.count("</script") == 3
    store = Store()
    table = pd.DataFrame({"a": [1, 2], "b": [0.5, np.nan]})
    spec = store.chart(charts.profile(table.fillna(1), "b", x="a"))
    assert store.table(table.fillna(1)) in spec["uses"]
    assert len(store.columns) == 1


def test_a_kept_library_that_was_altered_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = libraries()
    libraries.cache_clear()
    monkeypatch.setenv("PERPEND_CACHE", str(tmp_path))
    assert libraries() == good
    (kept,) = tmp_path.glob("vega-*.js")
    kept.write_text(kept.read_text(encoding="utf-8").replace("vega", "evil", 1), encoding="utf-8")
    libraries.cache_clear()
    assert libraries() == good
    libraries.cache_clear()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PERPEND_CACHE", str(tmp_path / "file" / "below"))  # cannot be a folder
    assert libraries() == good


def test_a_rebuilt_report_is_the_same_page(run: FinishedRun) -> None:
    assert build(Run.open(run.folder)) == text_of(run)


# --- what the first screen says ---


def test_the_first_screen_names_model_text_convention_and_findings(run: FinishedRun) -> None:
    head = re.sub(r"<[^>]+>", " ", text_of(run).partition("<header>")[2].partition("</header>")[0])
    for part in (
        "How much of each attention row is sink, and what the rest says",
        "small-model", "135M parameters", "30 layers", "some text", "64 sequences of 192 tokens",
        "without a BOS", "seeds 0, 1, 2", "keys 0–63, queries from 64", "Dropping the sink changes 17.1 %",
    ):  # fmt: skip
        assert part in head
    assert "A second paragraph" not in head


def test_what_is_undefined_is_listed_with_its_reason(run: FinishedRun) -> None:
    assert "the sink lies outside the window that this layer sees" in text_of(run)


def test_a_run_of_an_unknown_command_still_has_a_page(tmp_path: Path) -> None:
    for command in ("gone", "__import__('os')", "../x"):
        folder = tmp_path / str(abs(hash(command)))
        with Run.start(folder, command=command, request={}) as run:
            run.finish({}, {}, ["one thing"])
        page = (folder / "report.html").read_text()
        assert "one thing" in page
        assert len(Elements(page).all("script")) == 0


# --- for every reader ---


def test_every_figure_has_names_roles_and_a_way_without_pictures(run: FinishedRun) -> None:
    page = Elements(text_of(run))
    assert page.all("html")[0]["lang"] == "en"
    ids = [a["id"] for _, a in page.tags if a.get("id")]
    assert len(ids) == len(set(ids))
    figures = page.all("figure")
    assert len(figures) == 7
    assert all(a["aria-labelledby"] in ids for a in figures)
    drawn = [a for a in page.all("div") if a.get("class") == "chart"]
    assert all(a.get("role") in ("img", "application") and a.get("aria-label") for a in drawn)
    buttons = [a.get("data-do") for a in page.all("button")]
    assert buttons == ["table", "csv", "svg"] * 7
    links = {a["href"] for a in page.all("a")}
    assert "#main" in links
    assert all(link[1:] in ids for link in links)
    headings = [tag for tag, _ in page.tags if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == "h1"
    assert headings.count("h1") == 1
    assert all(int(b[1]) - int(a[1]) <= 1 for a, b in pairwise(headings))  # no level is skipped


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    high, low = sorted((luminance(a), luminance(b)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("ground", ["paper", "panel"])
def test_contrast_is_enough_for_reading(mode: int, ground: str) -> None:
    under = theme.ROLES[ground][mode]
    for role in ("ink", "soft", "sink"):  # roles that text is set in
        assert contrast(theme.ROLES[role][mode], under) >= 4.5, role
    for role in theme.SERIES:
        assert contrast(theme.ROLES[role][mode], under) >= 3, role


def test_the_ramp_gets_lighter_all_the_way() -> None:
    values = [luminance(colour) for colour in theme.SEQUENTIAL]
    assert values == sorted(values)


# The deuteranope's, protanope's and tritanope's view of linear RGB (Machado, Oliveira & Fernandes 2009,
# severity 1), and the way to OKLab (Ottosson 2020), in which a step of 0.02 is just seen.
VIEWS = {
    "all cones": np.eye(3),
    "no green cones": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no red cones": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no blue cones": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
CONES = np.array(
    [[0.4122215, 0.5363325, 0.0514460], [0.2119035, 0.6806995, 0.1073970], [0.0883025, 0.2817188, 0.6299787]]
)
OKLAB = np.array(
    [
        [0.2104543, 0.7936178, -0.0040720],
        [1.9779985, -2.4285922, 0.4505937],
        [0.0259040, 0.7827718, -0.8086758],
    ]
)


@pytest.mark.parametrize("mode", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_any_two_series_can_be_told_apart_in_every_kind_of_sight(mode: int, view: str) -> None:
    colours = [theme.ROLES[role][mode] for role in theme.SERIES]
    assert len(colours) == len(set(colours)) >= 12
    parts = np.array([[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in colours])
    linear = np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)
    seen = np.cbrt(np.clip(linear @ VIEWS[view].T, 0, 1) @ CONES.T) @ OKLAB.T
    apart = np.linalg.norm(seen[:, None] - seen[None], axis=-1)[np.triu_indices(len(colours), 1)]
    assert apart.min() > (0.09 if view == "all cones" else 0.05)


# --- the first screen ---


def test_conventions_too_long_for_their_column_go_below_it() -> None:
    short = {"sink": "first", "entropy": "nats"}
    beside, below = _conventions(short, ["A finding of a few words."])
    assert "sink" in beside
    assert "entropy" in beside
    assert below == ""
    edits = {f"edit {i}": ['{"heads": null, "parallel": 0.5, "site": "residual.mlp"}'] for i in range(12)}
    beside, below = _conventions({**short, "edits": edits, "interval": "95 %"}, ["A finding of a few words."])
    assert "interval" in beside  # what has room stays beside the findings
    assert "edits" not in beside
    assert "Further conventions" in below
    assert "<br>edit 1: parallel 0.5 site residual.mlp<br>" in below  # a line each, what is unset left out
    assert "null" not in below


def test_a_long_list_of_findings_is_folded() -> None:
    assert "details" not in _more_findings(["one"] * 12)
    folded = _more_findings([f"finding {i}" for i in range(13)])
    assert "<summary>13 further findings</summary>" in folded
    assert "finding 12" in folded


@pytest.mark.parametrize("command", ["scale", "audit", "attention", "report"])
def test_the_heading_of_a_report_reads_as_a_sentence(command: str) -> None:
    said = question(command)
    assert not re.search(r"MODEL|RUN|`|\b(each|the) an? ", said), said


# --- comparisons and the command ---


def test_a_comparison_shows_what_differs_and_only_that(make_run: Callable[..., FinishedRun]) -> None:
    a, b = make_run("a", layers=4, heads=4), make_run("b", layers=6, heads=4)
    table = compare([a, b]).partition("What differs")[2].partition("</table>")[0]
    cells = re.findall(r"<td>(.*?)</td>", table)
    assert cells == ["layers", "4", "6"]


def test_what_is_said_of_one_run_is_not_said_of_all() -> None:
    assert _readings(
        [("a", "A bar is a head. More is better."), ("b", "A bar is a head. More is better.")]
    ) == ("A bar is a head. More is better.")
    said = _readings(
        [("a", "A bar is a head. The rule said no."), ("b", "A bar is a head. The rule said yes.")]
    )
    assert said == "A bar is a head. a: The rule said no. b: The rule said yes."


def test_names_of_runs_tell_them_apart() -> None:
    assert names_of([Path("x/a"), Path("y/b")]) == ["a", "b"]
    assert names_of([Path("x/a"), Path("y/a")]) == ["x/a", "y/a"]


def test_the_command_rebuilds_and_compares(
    make_run: Callable[..., FinishedRun], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = make_run("a", layers=4, heads=4), make_run("b", layers=6, heads=4)
    whole = text_of(a)
    (a.folder / "report.html").unlink()
    assert cli.run(["report", str(a.folder)]) == 0
    assert text_of(a) == whole
    out = tmp_path / "c.html"
    assert cli.run(["report", str(a.folder), str(b.folder), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.partition("\n")[2])["report"] == str(out)
    assert "What differs" in out.read_text(encoding="utf-8")
    assert cli.run(["report", str(a.folder), str(a.folder)]) == 2
    assert cli.run(["report", str(tmp_path / "none")]) == 2
    assert "no run folder at" in capsys.readouterr().err


def test_comparing_needs_two(run: FinishedRun) -> None:
    with pytest.raises(InputError, match="two runs or more"):
        compare([run])


def test_a_detail_without_its_keys_is_refused() -> None:
    table = pd.DataFrame({"layer": [0], "x": [1.0]})
    figure = Figure(
        "t", "q", charts.heat(table.assign(head=0), "x"), table, "h", Detail(("layer", "head"), table)
    )
    with pytest.raises(InputError, match="lacks the key"):
        figure_block(figure, 1, Store())


def test_a_damaged_table_is_named_not_hidden(make_run: Callable[..., FinishedRun]) -> None:
    damaged = make_run("damaged", layers=4, heads=4)
    (damaged.folder / "heads.csv").write_text("layer,head\n")
    with pytest.raises(PerpendError, match=r"heads\.csv is damaged"):
        build(Run.open(damaged.folder))


# --- notebooks ---


def test_a_study_has_the_figures_of_its_run(run: FinishedRun) -> None:
    class Study:
        tables, arrays, results = run.tables, run.arrays, run.results

    assert [f.title for f in figures_of(Study(), "fake")] == [f.title for f in figures_of(run)]


def test_a_survey_is_told_which_study_has_its_figures() -> None:
    class AttentionSurvey:
        tables, arrays, results = {}, {}, {}

    with pytest.raises(InputError, match=r"attention_study\(\{0: survey\}\)"):
        figures_of(AttentionSurvey(), "attention")
    with pytest.raises(InputError, match="name the command"):
        figures_of(AttentionSurvey())


def test_a_printed_study_is_short() -> None:
    @dataclass(frozen=True, repr=False)
    class Study(Rich):
        results: dict
        tables: dict
        findings: list

    text = str(Study({"sink": {"row_mass": 0.5}}, {"layers": pd.DataFrame({"a": range(999)})}, ["Half."]))
    assert text == "Study (results: sink; tables: layers)\n  · Half."


def test_results_show_findings_numbers_and_tables_in_a_notebook() -> None:
    class Survey(Rich):
        findings = ("<b>half</b> is sink",)
        results = {"sink": {"mass": 0.123456, "layers": [1, 2], "none": None}}
        tables = {"layers": pd.DataFrame({"layer": range(20), "name": ["<i>"] * 20})}

    text = Survey()._repr_html_()
    assert "&lt;b&gt;half" in text
    assert 'sink.mass</th><td class="n">0.1235' in text
    assert "12 of 20 rows" in text
    assert "<i>" not in text
    assert table_html(pd.DataFrame()).startswith("<table>")


def test_a_figure_shows_its_chart_in_a_notebook() -> None:
    table = pd.DataFrame({"layer": [0, 1], "x": [1.0, 2.0]})
    one = charts.profile(table, "x")
    for chart in (one, {"a": one, "b": one}):
        shown = Figure("t", "q", chart, table, "h")._repr_mimebundle_()
        assert any("vega" in kind for kind in shown)
        assert base64.b64decode(shown["image/png"]).startswith(b"\x89PNG")
        assert shown["text/plain"] == "t"


def test_a_comparison_invites_to_no_panel_that_it_does_not_have() -> None:
    from perpend.report.page import _readings

    told = "One cell a head. Choose a head to see its neighbours."
    assert _readings([("a", told), ("b", told)]) == "One cell a head."
