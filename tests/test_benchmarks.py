"""benchmarks/run.py: contenders do the same job, a wrong one is not ranked, the tables say what was timed."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

REPO = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPO / "benchmarks"))

from peers.jobs import Job, Setting, jobs  # noqa: E402
from peers.page import BEGIN, END, page, rewritten  # noqa: E402
from peers.race import ROOT, SHARP, Worker, gap, race  # noqa: E402
from peers.results import Result, ends, median_interval, noise_of, results  # noqa: E402
from peers.tools import make_model, some, transformers_model  # noqa: E402

MODEL_JOBS = [name for name, job in jobs().items() if job.sizes is None]
EDITS = ["edit-value", "edit-residual", "ablate"]
OTHERS = [name for name in jobs() if name not in MODEL_JOBS]
NEEDING_NOTHING = ("perpend", "scipy", "transformers", "Wanda's code")
SMALL = {"hidden_size": 36, "intermediate_size": 48, "num_attention_heads": 9, "num_key_value_heads": 3}


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    """A model of two small layers, and two sequences long enough for the survey's window."""
    folder = make_model(tmp_path_factory.mktemp("model"), 2, SMALL)
    return Setting({"layers": 2, "sequences": 2, "length": 80}, str(folder))


def answers(job: Job, setting: Setting) -> dict[str, np.ndarray]:
    found = {}
    for name, make in job.contenders.items():
        if name.startswith(NEEDING_NOTHING) and not isinstance(make, str):
            with torch.no_grad():
                found[name] = np.asarray(make(setting)())
    return found


@pytest.mark.parametrize("name", MODEL_JOBS)
def test_who_does_a_job_on_a_model_agrees_with_perpend(name: str, setting: Setting) -> None:
    job = jobs()[name]
    found = answers(job, setting)
    assert len(found) >= 2
    for other, answer in found.items():
        assert gap(answer, found["perpend"]) <= job.tolerance, other


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_changes_what_the_model_says(name: str, setting: Setting) -> None:
    job = jobs()[name]
    with torch.no_grad():
        edited = np.asarray(job.contenders["perpend"](setting)())
        plain = np.asarray(some(transformers_model(setting.folder)(ids).logits for ids in setting.batches))
    assert gap(plain, edited) > 100 * job.tolerance


@pytest.mark.parametrize("name", OTHERS)
def test_who_does_a_job_without_a_model_agrees_with_perpend(name: str) -> None:
    job = jobs()[name]
    sizes = {"heads": 20, "keys": 12} if "heads" in job.sizes[0] else {"layers": 1}
    found = answers(job, Setting(sizes))
    assert len(found) == 2
    for other, answer in found.items():
        assert gap(answer, found["perpend"]) <= job.tolerance, other


@pytest.mark.parametrize("name", MODEL_JOBS)
def test_no_tool_is_left_out_in_silence(name: str) -> None:
    job = jobs()[name]
    for tool in ("plain", "transformers", "TransformerLens", "nnsight", "pyvene"):
        assert any(contender.startswith(tool) for contender in job.contenders), tool
    assert all(reason for reason in job.contenders.values())


def test_a_gap_is_relative_to_its_column_and_sees_shapes_and_masks() -> None:
    ours = np.array([[1000.0, 0.1], [10.0, 0.2]])
    assert gap(ours + np.array([[0.0, 0.0], [0.0, 0.02]]), ours) == pytest.approx(0.1)
    assert gap(ours + np.array([[1.0, 0.0], [0.0, 0.0]]), ours) == pytest.approx(0.001)
    assert gap(ours[:1], ours) == np.inf
    assert gap(np.where(ours > 1, np.nan, ours), ours) == np.inf
    assert gap(np.array([True, False]), np.array([True, True])) == 0.5


def a_job(**contenders: Any) -> Job:
    made = {
        name: make if isinstance(make, str) else lambda setting: None for name, make in contenders.items()
    }
    return Job("attention", "A job", "It does this.", "plain", made)


@pytest.fixture
def by_hand() -> Result:
    """Three rounds of a machine that slows down: the ratios stay what they are."""
    rounds = [
        {
            "plain": base,
            "plain again": 1.01 * base,
            "perpend": 1.05 * base,
            "rival": 1.25 * base,
            "liar": base,
        }
        for base in (1.0, 1.5, 4.0)
    ]
    return Result(
        a_job(plain=1, perpend=1, rival=1, liar=1, absent="it cannot"),
        {"layers": 2, "sequences": 1, "length": 256},
        rounds,
        added={"plain": 50, "plain again": 50, "perpend": 65, "rival": 200, "liar": 1},
        gap={"rival": 1e-6, "liar": 0.5},
        weights=100,
    )


def test_ratios_are_of_the_same_round_and_a_liar_has_no_rank(by_hand: Result) -> None:
    assert by_hand.times["perpend"] == pytest.approx(1.05)
    assert by_hand.times["rival"] == pytest.approx(1.25)
    assert by_hand.quartiles("plain again") == pytest.approx((1.01, 1.01))
    assert by_hand.seconds("rival") == pytest.approx(1.25 * 1.5)
    assert by_hand.memory["perpend"] == pytest.approx(165 / 150)
    assert by_hand.ranked == ("perpend", "rival")


def raced(job: Job, *ratios: float) -> Result:
    """A rival's seconds over perpend's, of each round."""
    rounds = [{"plain": 1.0, "perpend": 1.1, "rival": 1.1 * ratio} for ratio in ratios]
    return Result(job, {"length": 256}, rounds, gap={"rival": 0.0})


def test_who_is_level_in_time_is_not_slower_for_certain() -> None:
    job = a_job(plain=1, perpend=1, rival=1)
    assert raced(job, *[1.01] * 15).quickest == ("perpend",)  # a little, but in every round
    assert raced(job, *[1.01] * 12, *[0.99] * 3).quickest == ("perpend",)
    assert raced(job, *[1.01] * 11, *[0.99] * 4).quickest == ("perpend", "rival")
    assert raced(job, *[1.02] * 8, *[0.99] * 7).quickest == ("perpend", "rival")  # noise
    assert raced(job, *[0.99] * 15).quickest == ("rival",)
    assert raced(job, *[1.5] * 5).quickest == ("perpend", "rival")  # of five rounds nothing is certain
    assert raced(job, *[1.5] * 6).quickest == ("perpend",)


def test_what_the_baseline_differs_by_from_itself_is_noise() -> None:
    job = a_job(plain=1, perpend=1, rival=1)

    def cell(again: float, rival: float) -> dict[str, Any]:
        seconds = {"plain": 1.0, "plain again": again, "perpend": 1.0, "rival": rival}
        return {"job": "a", "sizes": {"length": 8}, "rounds": [seconds] * 15, "gap": {"rival": 0.0}}

    def level(*off: float) -> list[bool]:
        """Whether a rival 1.2 % slower in every round is level, where the A/A rows are `off` so much."""
        book = {"cells": [cell(1 + x, 1.012) for x in off], "weights": {}}
        return ["rival" in one.quickest for one in results(book, {"a": job})["a"]]

    assert level(0.0, 0.011) == [False, False]
    assert level(*[0.013, -0.013] * 2, 0.0) == [True] * 5
    assert level(*[0.0] * 20, 0.5) == [False] * 21  # one cell of twenty is not what the others are
    assert noise_of([]) == 0.0


def test_the_interval_of_a_median_is_the_sign_tests() -> None:
    values = [float(value) for value in range(1, 16)]
    assert median_interval(values[::-1]) == (4.0, 12.0)
    assert median_interval(values[:6]) == (1.0, 6.0)
    assert median_interval(values[:5]) == (-np.inf, np.inf)
    generator = np.random.default_rng(0)
    held = [low <= 0 <= high for low, high in map(median_interval, generator.normal(size=(4000, 15)))]
    assert np.mean(held) == pytest.approx(0.9648, abs=0.01)  # 1 - 2 P(at most 3 of 15 coins)


@pytest.mark.parametrize(
    ("again", "rival", "level"),
    [(100, 101, True), (100, 103, False), (104, 103, True), (96, 103, True), (104, 105, False)],
)
def test_who_is_level_in_memory_is_as_near_as_the_plain_pass_is_to_itself(
    again: int, rival: int, level: bool
) -> None:
    rounds = [{"plain": 1.0, "plain again": 1.0, "perpend": 1.0, "rival": 1.0}]
    added = {"plain": 0, "plain again": again - 100, "perpend": 0, "rival": rival - 100}
    job = a_job(plain=1, perpend=1, rival=1)
    result = Result(job, {"length": 256}, rounds, added, gap={"rival": 0.0}, weights=100)
    assert result.leanest == (("perpend", "rival") if level else ("perpend",))


@pytest.mark.skipif(platform.system() != "Linux", reason="the peak of resident memory is Linux's to tell")
def test_memory_is_what_is_alive_at_the_peak() -> None:
    """Three arrays of 16 MiB are alive at once, of five that are made; then two, of ten."""
    program = """
import numpy as np
from peers.worker import added
def three():
    a = np.ones(2**21); b = a * 2; c = b + a; del a; d = c * 2; del b; return (c + d).sum()
def two():
    a = np.ones(2**21)
    for _ in range(9): a = a * 2
print(added(three), added(two))
"""
    environment = {**os.environ, **SHARP, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    three, two = (int(word) / 2**24 for word in told.stdout.split())
    assert three == pytest.approx(3, abs=0.05)
    assert two == pytest.approx(2, abs=0.05)


def book_of(*cells: dict[str, Any]) -> dict[str, Any]:
    machine = {"processor": "a machine", "cores": 2, "bf16": False, "python": "3", "keeps_freed": True}
    return {"machine": machine, "versions": {"torch": "2"}, "weights": {"2": 2**20}, "cells": list(cells)}


def cell_of(job: str, times: dict[str, float], gaps: dict[str, float], **sizes: int) -> dict[str, Any]:
    added = dict.fromkeys(times, 2**20) if "layers" in sizes else {}
    return {"job": job, "sizes": sizes, "rounds": [times] * 6, "added": added, "gap": gaps, "failed": {}}


def test_the_page_shows_who_is_first_who_disagrees_and_who_cannot() -> None:
    short = {"plain": 0.1, "plain again": 0.102, "perpend": 0.12, "nnsight": 0.11, "transformers eager": 0.3}
    gaps = {"nnsight": 1e-6, "transformers eager": 0.02}
    long = {"plain": 1.0, "plain again": 1.0, "perpend": 1.05, "nnsight": 2.5}
    deep = {name: 4 * value for name, value in short.items()}
    text = page(
        book_of(
            cell_of("attention", long, {"nnsight": 1e-6}, layers=2, sequences=1, length=1024),
            cell_of("attention", short, gaps, layers=2, sequences=1, length=256),
            cell_of("attention", deep, gaps, layers=8, sequences=1, length=256),
            cell_of("aitchison", {"scipy": 2.0, "perpend": 3.0}, {"scipy": 0.0}, heads=11, keys=4),
        )
    )
    assert "| plain | 1 (100 ms) | 1 (1.00 s) | 1 (2 MiB) | 1 (2 MiB) |" in text
    assert "| plain again (A/A) | 1.02 (1.02 to 1.02) | 1.00 (1.00 to 1.00) |" in text
    assert "| perpend | 1.20 | **1.05** |" in text
    assert "| nnsight | **1.10** | 2.50 |" in text
    assert "| transformers eager | disagrees by 0.02 | – | – | – |" in text
    assert "pyvene (it reads the first output of a module" in text
    assert "time at 2 layers, T = 256 (nnsight 1.10, perpend 1.20)" in text
    assert "time at 2 layers, T = 256 (1.20)" in text  # above 1.1 × the plain pass
    assert "| Attention survey | perpend | 8.8 | 4.0 | – |" in text  # growth with T and with layers
    assert "| Aitchison distances | 11 heads, 4 keys | scipy | 2.00 s | **1.00** | 28 pairs |" in text
    assert "| Aitchison distances | 11 heads, 4 keys | perpend | 3.00 s | 1.50 | 18 pairs |" in text
    assert "first, or level with the first, in 4 of 7 comparisons" in text


def test_code_for_one_model_is_a_yardstick_and_no_tool() -> None:
    times = {"plain": 1.0, "plain again": 1.0, "perpend": 1.05, "transformers hooks": 1.02, "nnsight": 1.08}
    gaps = {"nnsight": 1e-6, "transformers hooks": 1e-6}
    text = page(book_of(cell_of("updates", times, gaps, layers=2, sequences=1, length=256)))
    assert "Of the tools, perpend is first, or level with the first, in 2 of 2 comparisons. It stays" in text
    assert (
        "by hand for this one model are ahead of it in:\n\n- Updates profile: time at 2 layers, T = 256 "
        "(transformers hooks 1.02, perpend 1.05)" in text
    )
    assert "| transformers hooks | **1.02** |" in text


def test_growth_is_along_a_line_with_the_other_sizes_equal() -> None:
    job = a_job(plain=1)

    def cell(**sizes: int) -> Result:
        return Result(job, sizes, [{"plain": 1.0}])

    cells = [cell(layers=1, length=4096), cell(layers=2, length=256), cell(layers=2, length=1024)]
    small, large = ends(cells, "length")
    assert (small.sizes["length"], large.sizes["length"]) == (256, 1024)
    assert ends(cells[:2], "length") is None


def test_only_the_marked_part_of_the_page_is_rewritten() -> None:
    text = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    assert rewritten(text, "new") == f"before\n{BEGIN}\n\nnew\n\n{END}\nafter\n"
    with pytest.raises(ValueError, match="the page has no"):
        rewritten("no marks", "new")


def test_a_race_goes_on_where_it_was_stopped_and_says_who_failed(tmp_path: Path) -> None:
    job = a_job(plain=1, perpend=1, broken=1, tired=1, absent="it cannot")
    cell = cell_of("attention", {"plain": 1.0, "perpend": 1.0}, {}, layers=1) | {"added": {"plain": 5}}
    del cell["rounds"][1:]
    asked: list[tuple[str, str]] = []

    def run(contender: str, kind: str, file: str = "", **request: Any) -> dict[str, Any]:
        asked.append((contender, kind))
        if contender == "broken" or (contender == "tired" and kind == "time"):
            raise RuntimeError("it broke")
        if kind == "answer":
            np.save(file, np.array([1.0]))
        return {"seconds": 2.0, "added": 7}

    race(job, cell, run, tmp_path, "", 3, lambda name: name != "plain again", lambda: None)
    assert [seen["perpend"] for seen in cell["rounds"]] == [1.0, 2.0, 2.0]
    timed = [name for name, kind in asked if kind == "time"]
    assert timed == ["plain", "perpend", "tired", "perpend", "plain"]  # reversed, and once is enough
    assert cell["failed"] == {"broken": "it broke", "tired": "it broke"}
    assert cell["added"] == {"plain": 5, "perpend": 7, "tired": 7}  # once is enough
    assert cell["gap"] == {"plain": 0.0, "tired": 0.0}
    assert Result(job, **{key: value for key, value in cell.items() if key != "job"}).ranked == (
        "perpend",
        "plain",
    )


def test_a_worker_times_a_job_and_tells_its_errors(tmp_path: Path) -> None:
    worker = Worker(sys.executable, tmp_path / "log")
    request = {"job": "aitchison", "contender": "scipy", "sizes": {"heads": 5, "keys": 4}, "folder": ""}
    try:
        worker.run(**request, kind="answer", file=str(tmp_path / "answer.npy"))
        assert np.load(tmp_path / "answer.npy").shape == (5, 5)
        assert worker.run(**request, kind="memory")["added"] >= 0
        assert worker.run(**request, kind="time")["seconds"] > 0
        with pytest.raises(RuntimeError, match="KeyError"):
            worker.run(**request | {"job": "nothing"}, kind="time")
        assert "numpy" in worker.versions
    finally:
        worker.stop()


def test_the_page_of_the_docs_is_what_was_measured() -> None:
    book = json.loads((REPO / "docs" / "benchmarks.json").read_text(encoding="utf-8"))
    text = (REPO / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert results(book, jobs())
    assert rewritten(text, page(book)) == text, "run python benchmarks/run.py --stored --write"
