"""The attention paper's model-free numbers come out, and a number that did not would be reported."""

from __future__ import annotations

import json
import math
from fractions import Fraction as F

import mpmath
import numpy as np
import pandas as pd
import pytest
import sympy
import torch

from perpend import cli
from perpend.geometry import dissimilarity
from perpend.geometry.laws import LAWS, Draw
from perpend.papers import Entry, published
from perpend.runs import Run
from perpend.studies.simulation import (
    Part,
    Settings,
    Simulation,
    bands,
    checks,
    keepers,
    openness,
    parts,
    scenarios,
    simulate,
    threshold,
    wedge,
)

SETTINGS = Settings(samples=1000)
WITNESS = dict(zip("pqr", openness.WITNESS))


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    return simulate(SETTINGS)


def test_every_number_and_statement_is_reproduced(simulation):
    missed = simulation.checks[~simulation.checks["reproduced"]]
    assert missed.empty, missed.to_string()
    assert simulation.results["reproduced"] == len(simulation.checks) > 200
    assert simulation.results["not_reproduced"] == []


def test_every_printed_number_that_needs_no_model_is_compared(simulation):
    shown = simulation.checks.groupby("item")["paper"].apply(list)
    for item, name in (("table-1", "Table 1"), ("figure-2", "Figure 2"), ("figure-6", "Figure 6")):
        printed = [entry.printed for entry in published("attention", item).entries.values()]
        for value in printed:
            assert value in shown[name], (name, value)
    for metric in ("cosine", "jensen_shannon", "euclidean"):
        for sink in ("0.5", "0.7", "0.9"):
            assert published("attention", "figure-3")[f"{metric}/{sink}"].printed in shown["Figure 3"]
    prose = [entry.printed for entry in published("attention", "prose").entries.values()]
    everywhere = " ".join(simulation.checks["paper"])
    assert all(value in everywhere for value in prose)


def test_the_same_settings_give_the_same_numbers_and_parts_do_not_touch_each_other(simulation):
    by_name = dict(parts())
    for name in ("wedge", "scenarios", "residuals"):
        alone = pd.DataFrame([vars(check) for check in by_name[name](SETTINGS).checks])
        together = simulation.checks.merge(alone[["item", "quantity", "measured"]], on=["item", "quantity"])
        assert len(together) >= len(alone)
        assert (together["measured_x"] == together["measured_y"]).all()
    other = by_name["wedge"](Settings(samples=1000, seed=8)).checks[0].measured
    assert other != by_name["wedge"](SETTINGS).checks[0].measured


def test_an_interrupted_simulation_goes_on_with_what_it_has():
    kept: dict[str, object] = {}

    def store(name, compute):
        if name not in kept:
            kept[name] = compute()
        return kept[name]

    name, part = next(iter(parts()))
    packed = store(name, lambda: part(SETTINGS).packed())
    assert Part.unpacked(packed).packed().keys() == packed.keys()
    assert Part.unpacked(packed).checks == part(SETTINGS).checks


# --- a number that is wrong is reported ---


def test_checks_say_by_how_much_a_number_is_missed():
    entry = Entry("x", "0.9693")
    assert checks.exact("T", "x", entry, 0.969322).reproduced
    wrong = checks.exact("T", "x", entry, 0.9694)
    assert not wrong.reproduced
    assert wrong.off == pytest.approx(5e-5, rel=1e-6)
    rate = Entry("r", "39.0", kind="sampled", trials=20_000)
    assert checks.share("F", "r", rate, 0.398, 20_000).reproduced  # 1.6 sd of the difference
    far = checks.share("F", "r", rate, 0.41, 20_000)
    spread = 2.5758 * 100 * math.sqrt(2 * 0.41 * 0.59 / 20_000) + 0.05
    assert far.high - far.measured == pytest.approx(spread, rel=1e-4)
    assert far.off == pytest.approx(2.0 - spread, rel=1e-3)
    assert not checks.bound("B", "b", Entry("b", "0.14", relation="<"), 0.15).reproduced
    assert checks.bound("B", "b", Entry("b", "0.94", relation=">"), 0.95).reproduced
    assert not checks.holds("S", "s", "0", math.nan, most=1).reproduced
    assert not checks.holds("S", "s", "0", 2.0, most=1).reproduced


def test_a_published_value_that_is_off_appears_among_the_findings(monkeypatch):
    from perpend.studies import simulation as module

    real = list(parts())

    def lying(settings: Settings) -> Part:
        found = dict(real)["wedge"](settings)
        entry = Entry("cosine", "55.5", kind="sampled", trials=20_000)
        found.checks[0] = checks.share("Figure 6", "share", entry, 0.78, settings.samples)
        return found

    monkeypatch.setattr(module, "parts", lambda: iter([("keepers", dict(real)["keepers"]), ("wedge", lying)]))
    result = module.simulate(SETTINGS)
    assert result.results["not_reproduced"][0]["quantity"] == "share"
    assert any("Not reproduced: Figure 6" in line and "off by" in line for line in result.findings)


# --- exact rationals ---


def square_cosine(x, y) -> F:
    dot = sum(a * b for a, b in zip(x, y))
    return dot**2 / (sum(a * a for a in x) * sum(b * b for b in y))


def test_table_1_in_rationals():
    p, q, r = (WITNESS[name] for name in "pqr")
    assert all(sum(row) == 1 for row in (p, q, r))
    printed = published("attention", "table-1")
    shown = lambda entry, value: f"{float(value):.4f}" == printed[entry].printed  # noqa: E731
    content = lambda x: tuple(v / sum(x[1:]) for v in x[1:])  # noqa: E731
    assert content(p) == content(q) == (F(4, 5), F(1, 5))
    assert content(r) == (F(1, 5), F(4, 5))
    assert square_cosine(p, r) == F(2033, 2042) ** 2
    assert square_cosine(p, q) == F(1626**2, 2042 * 1378)
    assert shown("cosine/keep/pr", F(2033, 2042))
    assert shown("cosine/keep/pq", math.sqrt(square_cosine(p, q)))
    assert shown("cosine/drop/pr", math.sqrt(square_cosine(content(p), content(r))))
    assert math.sqrt(square_cosine(content(p), content(r))) == pytest.approx(8 / 17)
    squares = {
        a + b: sum((x - y) ** 2 for x, y in zip(WITNESS[a], WITNESS[b])) for a, b in ("pq", "pr", "qr")
    }
    assert squares == {"pq": F(168, 2500), "pr": F(18, 2500), "qr": F(222, 2500)}
    assert shown("euclidean/keep/pq", math.sqrt(squares["pq"]))
    assert shown("euclidean/drop/pr", math.sqrt(2 * F(3, 5) ** 2))
    for pair, (x, y) in {"pq": (p, q), "pr": (p, r)}.items():
        with mpmath.workdps(30):
            assert shown(f"jensen_shannon/keep/{pair}", exact_js(x, y))
    # p and r share the sink: JS is the content's, times what the sink leaves.
    assert exact_js(p, r) == pytest.approx(exact_js(content(p), content(r)) / 10, rel=1e-15)


def exact_js(x, y) -> float:
    with mpmath.workdps(40):
        total = mpmath.mpf(0)
        for a, b in zip(x, y):
            m = (a + b) / 2
            for v in (a, b):
                ratio = v / m
                total += (
                    mpmath.mpf(v.numerator)
                    / v.denominator
                    * mpmath.log(mpmath.mpf(ratio.numerator) / ratio.denominator)
                )
        return float(total / 2)


def test_remark_c3_in_whole_numbers():
    u, v = (1, -1, 0, 0), (1, 0, -1, 0)
    norm = lambda x: sum(map(abs, x))  # noqa: E731
    plus, minus = [a + b for a, b in zip(u, v)], [a - b for a, b in zip(u, v)]
    assert (norm(u), norm(v), norm(plus), norm(minus)) == (2, 2, 4, 2)
    assert norm(plus) ** 2 + norm(minus) ** 2 == 20 != 2 * norm(u) ** 2 + 2 * norm(v) ** 2 == 16


def test_the_threshold_turns_the_exact_verdict():
    """Rational rows just before and beyond each metric's threshold, compared without rounding."""
    content, other = np.array([0.8, 0.2]), 0.7
    exact_content = (F(4, 5), F(1, 5))

    def rows(s: F):
        make = lambda mass, pi: (mass, *((1 - mass) * v for v in pi))  # noqa: E731
        return make(s, exact_content), make(F(7, 10), exact_content), make(s, exact_content[::-1])

    for metric in ("cosine", "euclidean", "jensen_shannon"):
        s = threshold.threshold(content, other, metric)
        for shift, reversed_ in ((F(-1, 10**6), False), (F(1, 10**6), True)):
            p, q, r = rows(F(s).limit_denominator(10**9) + shift)
            if metric == "cosine":
                assert (square_cosine(p, r) > square_cosine(p, q)) is reversed_
            elif metric == "euclidean":
                square = lambda a, b: sum((x - y) ** 2 for x, y in zip(a, b))  # noqa: E731
                assert (square(p, r) < square(p, q)) is reversed_
            else:
                assert (exact_js(p, r) < exact_js(p, q)) is reversed_


def test_the_threshold_is_uniform_over_permutations():
    content = np.array([0.5, 0.3, 0.15, 0.05])
    assert len(threshold.rearrangements(content)) == 23
    assert len(threshold.rearrangements(np.array([0.4, 0.4, 0.2]))) == 2
    s = threshold.threshold(content, 0.4, "euclidean")
    assert s == pytest.approx(threshold.euclidean_threshold(content, 0.4), abs=1e-9)
    t = np.array([(1 - s) * 0.999])
    p, q = np.append(1 - t, t * content), np.append(0.4, 0.6 * content)
    for turned in threshold.rearrangements(content):
        r = np.append(1 - t, t * turned)
        assert dissimilarity(p, r, "euclidean") < dissimilarity(p, q, "euclidean")


def test_the_aitchison_cutoff_in_closed_form():
    """s_A for the witness: odds = 7/3 · 4^√3."""
    odds = sympy.Rational(7, 3) * 4 ** sympy.sqrt(3)
    exact = float((odds / (1 + odds)).evalf(30))
    found = threshold.aitchison_cutoff(np.array([0.8, 0.2]), np.array([0.2, 0.8]), 0.7)
    assert found == pytest.approx(exact, rel=1e-14)
    assert found > 0.9


def test_the_radius_is_proved_and_cannot_be_much_larger():
    radius = openness.certified_radius(12)
    assert openness.certified(F(radius))
    assert not openness.certified(F(1, 50))
    # Triples inside keep all six verdicts; the guard has a twin: some outside do not.
    generator = np.random.default_rng(0)
    centre = np.array(openness.WITNESS, dtype=float)
    margins = openness._margins()
    corners = generator.choice([-1.0, 0.0, 1.0], (300, 3))
    turns = np.stack([generator.permutation([1.0, -1.0, 0.0]) for _ in corners])
    for scale, inside in ((radius, True), (5 * radius, False)):
        worst = min(
            margin(
                centre
                + scale
                * generator.choice([-1, 1], (3, 1))
                * np.stack([generator.permutation(turn) for _ in range(3)])
            )
            for turn in turns
            for margin in margins
        )
        assert (worst > 0) is inside


# --- bands, laws, scenarios, wedge ---


def test_the_bands_are_suprema_that_are_not_reached():
    for s0 in (0.3, 0.8, 0.99):
        for metric, (supremum, loose) in bands.bounds(s0).items():
            values = [
                float(dissimilarity(*bands.extremal_pair(s0, 5, d), metric)) for d in (1e-2, 1e-4, 1e-8)
            ]
            assert values[0] < values[1] < values[2] < supremum <= loose
            assert values[2] > 0.999 * supremum
    with_half = bands.bounds(0.5)
    assert with_half["cosine"] == (0.5, 1.0)


def test_a_counter_example_can_be_read_back_and_breaks_its_law(simulation):
    laws = simulation.tables["laws"]
    kept = laws.pivot(index="measure", columns="law", values="kept")
    assert kept.loc[
        "aitchison", ["triangle", "perturbation", "powering", "parallelogram", "permutation"]
    ].all()
    assert kept.loc["clr_l1", ["triangle", "perturbation", "powering", "permutation", "dominance"]].all()
    assert not kept.loc["clr_l1", "parallelogram"]
    assert kept.loc["content", "sink"]
    assert not kept.loc["content_dispersion", "perturbation"]
    assert not kept.loc["ilr_cosine", "perturbation"]
    for measure in keepers.measures():
        line = laws[(laws["measure"] == measure.name) & (laws["law"] == "perturbation")].iloc[0]
        if line["kept"]:
            assert line["counter_example"] == ""
            continue
        rows = {}
        for word in line["counter_example"].split(", "):
            name, _, numbers = word.partition(" = ")
            whole = torch.tensor([float(v) for v in numbers.split(":")], dtype=torch.float64)
            rows[name] = (whole / whole.sum())[None]
        draw = Draw(rows["p"], rows["q"], rows["c"], torch.ones(1).double(), torch.arange(4)[None])
        excess = float(LAWS["perturbation"].excess(measure.delta, draw))
        assert excess == pytest.approx(line["excess"], rel=1e-9)
        assert excess > 1e-3


def test_the_scenarios_run_as_described():
    sink, alpha = scenarios.scenario("a")
    assert sink[5] == pytest.approx(0.45)
    assert (alpha == 0.15).all()
    sink, alpha = scenarios.scenario("b")
    assert (sink[0], sink[-1]) == (0.7, pytest.approx(0.05))
    np.testing.assert_allclose(alpha[1:] / alpha[:-1], (0.02) ** (1 / 11))


def test_the_wedge_by_quadrature_agrees_with_a_large_sample():
    exact = wedge.quadrature("cosine", 300)
    assert exact == pytest.approx(wedge.quadrature("cosine", 500), abs=2e-3)
    q = np.random.default_rng(3).dirichlet(np.ones(3), 60_000)
    q = q[(q > wedge.LEAST).all(1)]
    assert wedge.flips(q, "cosine").mean() == pytest.approx(exact, abs=0.006)


# --- the command ---


def test_the_command_writes_a_run_with_figures_and_answers_in_json(tmp_path, capsys):
    out = tmp_path / "run"
    assert cli.run(["simulate", "--samples", "200", "--out", str(out), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["results"]["checks"] > 200
    assert document["request"]["samples"] == 200
    run = Run.open(out)
    assert (out / "report.html").stat().st_size < 3_000_000
    table = run.tables["comparison"]
    again = [check.measured for check in wedge.part(Settings(samples=200)).checks]
    assert table[table["item"] == "Figure 6"]["measured"].tolist() == again
    from perpend.commands.simulate import figures

    titles = [figure.title for figure in figures(run)]
    assert len(titles) == len(set(titles)) == 11
    for figure in figures(run):
        assert figure.question.endswith("?")
        assert len(figure.table) > 0
        assert all(chart.to_dict() for chart in figure.charts.values())


def test_plan_says_the_cost_and_runs_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.run(["simulate", "--plan", "--samples", "400", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"]["seconds"] > 0
    assert list(tmp_path.iterdir()) == []
