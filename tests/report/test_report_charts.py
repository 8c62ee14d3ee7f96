"""The recurring charts: each compiles, under ordinary and odd names, with gaps and without data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import vl_convert
from scipy.cluster.hierarchy import dendrogram as scipy_dendrogram
from scipy.cluster.hierarchy import linkage

from perpend.errors import InputError
from perpend.report import charts, theme
from perpend.report.labels import named

ODD = "a.b[0]:Q 'x' \"y\" \\z"


def tables(value: str = "value", other: str = "other") -> pd.DataFrame:
    return pd.DataFrame(
        {
            "layer": [0, 0, 1, 1],
            "head": [0, 1, 0, 1],
            value: [0.1, np.nan, 0.3, 0.4],
            other: [1.0, 2.0, 3.0, 4.0],
            "low": [0.0, 0.1, 0.2, 0.3],
            "high": [0.2, 0.3, 0.4, 0.5],
            "kind": ["one", "one", "two", "two"],
            "flag": [True, False, True, False],
        }
    )


KINDS: dict[str, Callable[[pd.DataFrame, str, str], Any]] = {
    "heat": lambda t, v, o: charts.heat(t, v, tooltip=[o, "kind"]),
    "heat around zero": lambda t, v, o: charts.heat(t, v, middle=0.0, domain=(-1, 2)),
    "surface": lambda t, v, o: charts.surface(t, v, x="layer", y="head", mark={"layer": 1, "head": 1}),
    "profile": lambda t, v, o: charts.profile(
        t, v, low="low", high="high", marks="flag", reference={"null": 0.2}
    ),
    "profile by series": lambda t, v, o: charts.profile(t, o, series="kind", log_y=True),
    "profile of columns": lambda t, v, o: charts.profile(t, {v: "first", o: "second"}),
    "profile of names": lambda t, v, o: charts.profile(t, o, x="kind"),
    "profile in log steps": lambda t, v, o: charts.profile(t, v, x=o, log_x=True),
    "bars": lambda t, v, o: charts.bars(
        t, v, by="kind", low="low", high="high", ticks={o: "paper"}, percent=True
    ),
    "bars by series": lambda t, v, o: charts.bars(t, v, by="kind", series="head", reference={"chance": 0.5}),
    "scatter": lambda t, v, o: charts.scatter(t, v, o, name="kind", series="kind", diagonal=True, size="low"),
    "scatter on a curve": lambda t, v, o: charts.scatter(
        t, v, o, curve=t, curve_low="low", curve_high="high"
    ),
    "dendrogram": lambda t, v, o: charts.dendrogram(
        linkage(t[[o]].to_numpy()), list("abcd"), groups=[0, 0, 1, 1]
    ),
    "dendrogram of kinds": lambda t, v, o: charts.dendrogram(
        linkage(t[[o]].to_numpy()), list("abcd"), groups=t["kind"].tolist(), keys={v: t[v].tolist()}
    ),
    "dendrogram bare": lambda t, v, o: charts.dendrogram(linkage(t[[o]].to_numpy()), list("abcd")),
    "chosen": lambda t, v, o: charts.chosen_profile(v),
    "chosen several": lambda t, v, o: charts.chosen_profile({v: "first", o: "second"}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("names", [("value", "other"), (ODD, "b]c")], ids=["plain", "odd"])
def test_every_kind_draws(kind: str, names: tuple[str, str]) -> None:
    chart = KINDS[kind](tables(*names), *names)
    picture = vl_convert.vegalite_to_svg(charts.themed(chart).to_dict())
    assert picture.startswith("<svg")
    if not kind.startswith("chosen"):  # those get their data from a click
        assert picture.count("<path") > 4


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind.startswith(("chosen", "dendrogram"))])
def test_a_missing_column_is_named(kind: str) -> None:
    table = tables()
    needed = "other" if kind in ("profile by series", "profile of names") else "value"
    with pytest.raises(InputError, match=f"no column '{needed}'; it has layer, head"):
        KINDS[kind](table.drop(columns=needed), "value", "other")


def test_a_map_with_only_gaps_still_draws() -> None:
    table = tables().assign(value=np.nan)
    for chart in (charts.heat(table, "value"), charts.heat(table, "value", middle=0.0)):
        assert vl_convert.vegalite_to_svg(charts.themed(chart).to_dict()).startswith("<svg")


def test_the_middle_of_a_two_sided_ramp_is_in_the_middle() -> None:
    spec = charts.heat(tables().assign(value=[-1.0, 0.0, 1.0, 3.0]), "value", middle=0.0).to_dict()
    scale = next(
        layer["encoding"]["color"]["scale"] for layer in spec["layer"] if "color" in layer.get("encoding", {})
    )
    assert scale["domain"] == [-3.0, 3.0]
    assert len(theme.DIVERGING) % 2 == 1


def test_a_tree_has_scipys_order_and_heights() -> None:
    data = np.random.default_rng(0).normal(size=(20, 3))
    merges = linkage(data, "average")
    segments, leaves = charts.tree(merges, [str(i) for i in range(20)])
    theirs = scipy_dendrogram(merges, no_plot=True)
    assert leaves["name"].tolist() == theirs["ivl"]
    bars = segments[segments["height"] == segments["top"]]
    assert sorted(bars["height"]) == pytest.approx(sorted(heights[1] for heights in theirs["dcoord"]))
    ours = sorted((row.right - row.left) for row in bars.itertuples())
    assert ours == pytest.approx(sorted((c[2] - c[1]) / 10 for c in theirs["icoord"]))
    upright = segments[segments["left"] == segments["right"]]
    assert (upright["top"] >= upright["height"]).all()


def test_a_tree_as_deep_as_it_is_wide_needs_no_recursion() -> None:
    count = 3000
    merges = [(0, 1, 1.0, 2), *((count + k - 2, k, float(k), k + 1) for k in range(2, count))]
    _, leaves = charts.tree(merges, [str(i) for i in range(count)])
    assert sorted(leaves["name"], key=int) == [str(i) for i in range(count)]


def test_a_tree_of_the_wrong_size_is_refused() -> None:
    with pytest.raises(InputError, match="3 leaves has 2 merges"):
        charts.tree([(0, 1, 1.0, 2)], ["a", "b", "c"])
    with pytest.raises(InputError, match="two leaves"):
        charts.tree([], ["a"])


def test_tables_are_left_as_they_were() -> None:
    table = tables()
    before = table.copy()
    for make in KINDS.values():
        make(table, "value", "other")
    pd.testing.assert_frame_equal(table, before)


def test_names_that_would_collide_are_left_out_and_the_rare_series_wins() -> None:
    table = pd.DataFrame({"x": [0.0, 0.5, 0.501, 1.0], "y": [0.0, 0.5, 0.501, 1.0]})
    table["name"], table["kind"] = ["a", "common", "mine", "b"], ["other", "other", "this", "other"]
    shown = named(table, "x", "y", "name", "kind")
    assert shown["name"].tolist() == ["a", "mine", "b"]
    apart = table.assign(y=[0.0, 0.2, 0.9, 1.0])
    assert len(named(apart, "x", "y", "name", None)) == 4
    gaps = table.assign(y=[np.nan, 0.5, np.nan, 1.0])
    assert named(gaps, "x", "y", "name", "kind")["name"].tolist() == ["common", "b"]


def many(count: int) -> pd.DataFrame:
    """Lines of so many series over three layers."""
    rows = [(layer, f"series {i}", float(i + layer)) for i in range(count) for layer in range(3)]
    return pd.DataFrame(rows, columns=["layer", "kind", "value"])


@pytest.mark.parametrize("points", [True, False])
def test_two_dozen_lines_each_look_their_own_way(points: bool) -> None:
    spec = charts.profile(many(24), "value", series="kind", points=points).to_dict()
    found: dict[str, list[Any]] = {}
    for layer in spec["layer"]:
        for channel in ("color", "shape", "strokeDash"):
            if channel in layer["encoding"]:
                found[channel] = layer["encoding"][channel]["scale"]["range"]
    if points:  # a layer of lines for each dash, so that the legend's marks are not dashed
        assert "strokeDash" not in found
        drawn = [layer for layer in spec["layer"] if layer["mark"]["type"] == "line"]
        found["strokeDash"] = [
            layer["mark"]["strokeDash"] for layer in drawn for _ in layer["transform"][0]["filter"]["oneOf"]
        ]
    looks = list(zip(*(map(str, values) for values in found.values()), strict=True))
    assert len(set(looks)) == len(looks) == 24
    assert len(set(found["color"][:12])) == 12
    # without colour, as on paper, the first eight lines still differ where they have points, else four
    plain = list(zip(*(map(str, found[channel]) for channel in found if channel != "color")))
    assert len(set(plain[: 8 if points else 4])) == (8 if points else 4)


def test_a_bar_s_interval_lies_in_the_middle_of_it() -> None:
    table = pd.DataFrame({"by": list("aabb"), "v": [1.0, 2, 3, 4], "k": ["x", "y"] * 2})
    table = table.assign(low=table["v"] - 0.5, high=table["v"] + 0.5)
    chart = charts.themed(charts.bars(table, "v", by="by", series="k", low="low", high="high"))
    vega = vl_convert.vegalite_to_vega(chart.to_dict())
    bar, rule = (mark["encode"]["update"]["y"] for mark in vega["marks"])
    assert "band" not in bar  # from the upper edge of its place …
    assert "band" not in bar["offset"]
    assert rule["offset"]["band"] == 0.5  # … whose middle the interval takes


def test_bars_that_are_not_grouped_have_a_row_each() -> None:
    table = many(3)[lambda t: t["layer"] == 0]
    shape = {"by": "kind", "series": "kind", "grouped": False}
    spec = charts.bars(table, "value", **shape, kinds=["none", "series 0", "series 1", "series 2"]).to_dict()
    encoding = spec["layer"][0]["encoding"]
    assert "yOffset" not in encoding
    assert encoding["color"]["scale"]["domain"][0] == "none"  # charts beside one another keep their colours
    assert encoding["color"]["scale"]["range"][:4] == theme.PALETTE[:4]


def test_a_map_of_magnitudes_is_coloured_by_logarithms() -> None:
    spec = charts.heat(tables(), "other", log=True).to_dict()
    scales = [layer["encoding"]["color"]["scale"] for layer in spec["layer"] if "color" in layer["encoding"]]
    assert [scale.get("type") for scale in scales] == ["log"]


def test_ticks_of_whole_numbers_are_whole() -> None:
    across = charts.profile(many(1), "value").to_dict()["layer"][0]["encoding"]["x"]["axis"]
    assert across["values"] == [0, 1, 2]
    steps = pd.DataFrame({"layer": range(30), "value": 0.5})
    assert "values" not in charts.profile(steps, "value").to_dict()["layer"][0]["encoding"]["x"]["axis"]


def test_names_make_room_for_what_the_curve_takes_of_the_plot() -> None:
    points = pd.DataFrame({"x": [0.030, 0.031, 0.032], "y": [0.030, 0.018, 0.017], "name": ["a", "b", "c"]})
    curve = pd.DataFrame({"x": [0.1, 0.9], "y": [0.1, 0.45]})
    alone = named(points, "x", "y", "name", None)
    assert list(alone["name"]) == ["a", "b", "c"]  # a plot that is all theirs holds them
    assert list(named(points, "x", "y", "name", None, curve)["name"]) == ["a"]


def test_a_line_of_one_point_is_a_point() -> None:
    table = pd.DataFrame({"tokens": [100.0, 100.0], "loss": [3.0, 3.1], "variant": ["a", "b"]})
    drawn = {"x": "tokens", "series": "variant", "points": False}
    kinds = [layer["mark"]["type"] for layer in charts.profile(table, "loss", **drawn).to_dict()["layer"]]
    assert kinds == ["line", "point"]
    long = pd.concat([table.assign(tokens=float(n)) for n in range(charts.FEW + 1)], ignore_index=True)
    kinds = [layer["mark"]["type"] for layer in charts.profile(long, "loss", **drawn).to_dict()["layer"]]
    assert kinds == ["line"]


def test_maps_of_one_quantity_share_their_colours() -> None:
    def cells(top: float, **more: Any) -> Any:
        table = pd.DataFrame({"layer": [0, 1], "head": [0, 0], "share": [0.1, top]})
        return charts.heat(table, "share", **more)

    def domain(chart: Any) -> Any:
        return chart.to_dict()["layer"][1]["encoding"]["color"]["scale"].get("domain")

    given = [cells(0.5), cells(0.9), cells(7.0, label="another"), cells(0.4, middle=0.0)]
    shared = charts.one_scale(given)
    assert [domain(chart) for chart in shared] == [[0.1, 0.9], [0.1, 0.9], [0.1, 7.0], [-0.4, 0.4]]
    assert domain(given[0]) is None, "the chart that was given is changed"
