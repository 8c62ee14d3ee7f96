"""Claims stand in their papers; statuses follow from stored runs, each kind of verdict reached by numbers."""

from __future__ import annotations

import json

import pytest

from perpend.cli import run
from perpend.errors import InputError
from perpend.papers import claims
from perpend.papers.claims import (
    CONTRADICTION,
    NOT_YET,
    OUT_OF_REACH,
    STATUSES,
    Claim,
    Judged,
    judge_all,
    judged,
    overall,
    summary,
)
from perpend.papers.judges import ARTEFACT, JUDGES, REFUTED, REPRODUCED, UNDERPOWERED, Summary, equal
from perpend.papers.protocol import catalog

SOURCES = {
    "attention": "attention-rows-as-compositions.md",
    "directional": "directional-decomposition.md",
}


def by_name(name: str) -> Claim:
    return next(claim for claim in claims.claims() if claim.name == name)


def status(name: str, *stored: Summary) -> Judged:
    return judged(by_name(name), stored)


def stored(verb: str, results: dict, model: str = "some-model") -> Summary:
    return summary(
        f"{verb}-here", {"command": verb, "request": {"model": {"name": model}}, "results": results}
    )


def test_every_claim_stands_in_its_paper(shared) -> None:
    for claim in claims.claims():
        text = (shared / "papers" / SOURCES[claim.paper]).read_text("utf-8").replace("\xa0", " ")
        for quote in claim.quotes or (claim.quote,):
            assert quote, claim.name
            assert quote in text, (claim.name, quote)


def test_claims_are_judged_by_judges_that_exist_and_made_by_items_that_exist() -> None:
    names = [claim.name for claim in claims.claims()]
    assert len(set(names)) == len(names)
    for claim in claims.claims():
        assert claim.judge is None or claim.judge in JUDGES, claim.name
        assert claim.item is None or claim.item in catalog(), claim.name
        assert claim.quotes or bool(claim.judge) != bool(claim.reach), claim.name
        assert claim.quotes or claim.item, claim.name
        assert not claim.judge or claim.quotes or claim.fields, claim.name


def test_nothing_is_guessed_without_runs() -> None:
    found = {one.status for one in judge_all([])}
    assert found == {NOT_YET, OUT_OF_REACH, CONTRADICTION}


def test_the_papers_own_contradictions_are_listed_with_both_sentences() -> None:
    found = {claim.name: claim.quotes for claim in claims.claims() if claim.quotes}
    assert {
        "attention/sink-set-vit",
        "attention/hellinger-fisher-rao",
        "attention/monotone-sink",
        "directional/two-tables-11",
        "directional/two-corpora",
    } <= set(found)
    assert all(len(quotes) == 2 for quotes in found.values())


def test_quotations_are_shown_without_typesetting() -> None:
    row = "| ViT-B/16 | $22.4{\\scriptstyle\\pm 0.1}$% | $\\rho\\geq 0.96$ |"
    assert claims.readable(row) == "ViT-B/16 · 22.4 ± 0.1% · ρ≥ 0.96"


def test_a_claim_about_every_model_falls_with_one() -> None:
    assert overall([REPRODUCED, REFUTED], "every") == REFUTED
    assert overall([REPRODUCED, UNDERPOWERED], "every") == UNDERPOWERED
    assert overall([REPRODUCED, REFUTED], "some") == REPRODUCED
    assert overall([REFUTED, REFUTED], "some") == "not seen here", "that it can happen is not refuted"


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(-0.01, 0.02, REPRODUCED), (-0.02, 0.2, UNDERPOWERED), (0.06, 0.2, REFUTED), (-0.2, -0.06, REFUTED)],
)
def test_equality_is_held_against_a_margin(low: float, high: float, expected: str) -> None:
    assert equal((low + high) / 2, low, high, 0.05) == expected


def cell(change: float, low: float, high: float, **more) -> dict:
    plain = {"site": "value.exclude_self", "reference": "head", "parallel": 0.0, "perpendicular": 1.0}
    rest = {"control": None, "layers": None, "heads": None}
    return {**plain, **rest, "change": change, "change_low": low, "change_high": high, **more}


def test_edits_reach_every_verdict() -> None:
    def edit(*cells: dict) -> Summary:
        return stored("edit", {"cells": [{"site": "unedited"}, *cells]})

    name = "directional/value-removal-benign"
    assert status(name, edit(cell(0.01, -0.01, 0.03))).status == REPRODUCED
    assert status(name, edit(cell(0.9, 0.7, 1.1))).status == REFUTED
    assert status(name, edit(cell(0.05, 0.01, 0.09))).status == UNDERPOWERED
    assert status(name, edit()).status == NOT_YET
    same = edit(cell(0.9, 0.7, 1.1), cell(1.0, 0.8, 1.2, control="opposite"))
    assert status("directional/perpendicular-fragile-at-size", same).status == ARTEFACT
    apart = edit(cell(0.1, 0.0, 0.2), cell(1.0, 0.8, 1.2, control="opposite"))
    assert status("directional/perpendicular-fragile-at-size", apart).status == REPRODUCED


def test_a_ratio_no_larger_than_a_random_direction_is_an_artefact() -> None:
    def updates(ratio: float) -> Summary:
        over = {"block": {"all": {"ratio": ratio}, "without_both": {"ratio": ratio}}}
        return stored("updates", {"updates": {"over_layers": over, "null": {"ratio_mean": 0.03}}})

    assert status("directional/parallel-is-substantial", updates(0.035)).status == ARTEFACT
    assert status("directional/parallel-is-substantial", updates(0.5)).status == REPRODUCED


def test_reversals_below_the_noise_floor_are_an_artefact() -> None:
    def attention(exact: float, floor: float) -> Summary:
        rate = {"exact": exact, "low": exact - 0.01, "high": exact + 0.01, "noise_floor_drop": floor}
        metrics = ("cosine", "jensen_shannon", "euclidean")
        return stored("attention", {"reversal": dict.fromkeys(metrics, rate)})

    assert status("attention/reversal", attention(0.4, 0.1)).status == REPRODUCED
    assert status("attention/reversal", attention(0.2, 0.25)).status == ARTEFACT
    assert status("attention/reversal", attention(0.6, 0.1)).status == REFUTED


def test_audits_are_judged_with_their_intervals_where_a_run_has_them() -> None:
    def audit(own: float, js: float, **intervals: tuple[float, float]) -> Summary:
        sets = {"content": own, "jensen_shannon": js, "violations": 0, "pairs": 10}
        ends = {f"sink_set/{name}": {"low": low, "high": high} for name, (low, high) in intervals.items()}
        return stored("audit", {"sink_set": sets, "intervals": ends})

    name = "attention/sink-set"
    assert status(name, audit(0.04, 0.06)).status == REPRODUCED
    assert status(name, audit(0.06, 0.04)).status == REFUTED
    overlapping = audit(0.04, 0.06, content=(0.03, 0.07), jensen_shannon=(0.05, 0.08))
    assert status(name, overlapping).status == UNDERPOWERED
    assert "[+0.030" not in status(name, overlapping).found
    assert "0.040 [0.030, 0.070]" in status(name, overlapping).found
    rank = {"content": {"spearman": 0.95}, "intervals": {"content/spearman": {"low": 0.94, "high": 0.97}}}
    assert status("attention/content-ranking", stored("audit", rank)).status == UNDERPOWERED
    del rank["intervals"]
    assert status("attention/content-ranking", stored("audit", rank)).status == REFUTED


def test_windows_and_predictions_are_read_as_their_verbs_write_them() -> None:
    rows = [
        {"window": w, "retained": {"value": kept}, "reversal": {"jensen_shannon": {"value": rate}}}
        for w, rate, kept in ((32, 0.40, 0.5), (64, 0.41, 0.6), (128, 0.45, 0.7))
    ]
    between = [{"first": 32, "second": 64, "spearman": {"value": 0.9}}]
    run_ = stored("attention", {"windows": {"by_window": rows, "between": between}})
    assert status("attention/windows", run_).status == REFUTED  # it moves by 5 points
    assert status("attention/windows-retain", run_).status == REPRODUCED
    assert status("attention/windows-agree", run_).status == REPRODUCED

    def scale(outcome: str, **numbers) -> Judged:
        row = {"name": "sink-rises-with-size", "outcome": outcome, "numbers": numbers, "why": ""}
        return status("attention/scale-sink", stored("scale", {"predictions": {"scored": [row]}}))

    assert (scale("mixed", tau=0.3).status, scale("mixed", tau=0.3).found) == (
        REFUTED,
        "scale-here: mixed (tau 0.3)",
    )
    assert scale("confirmed", pairs=6, tau=1.0).status == REPRODUCED
    assert scale("confirmed", pairs=3, tau=1.0).status == UNDERPOWERED  # three models: 1 of 6 by chance
    assert scale("mixed", pairs=3, scope="over all models, of different families").status == UNDERPOWERED


def test_a_training_run_without_a_sink_says_nothing_of_a_sinks_emergence() -> None:
    def checkpoints(after: float, change: float) -> Summary:
        ends = [{"checkpoint": "a", "sink_mass": 0.01}, {"checkpoint": "b", "sink_mass": after}]
        collapse = {"from": "a", "to": "b", "total": -1.0, "share": 0.9, "dispersion_change": change}
        return stored("checkpoints", {"checkpoints": ends, "collapse": collapse})

    assert status("attention/content-flat", checkpoints(0.02, 0.1)).status == UNDERPOWERED
    assert status("attention/content-flat", checkpoints(0.5, 0.1)).status == REPRODUCED
    assert status("attention/content-flat", checkpoints(0.5, 0.6)).status == REFUTED
    assert status("attention/collapse-is-sink", checkpoints(0.5, 0.6)).status == REPRODUCED


def test_training_differences_carry_their_power() -> None:
    def train(mean: float, low: float, high: float) -> Summary:
        row = {"variant": "value-full", "against": "baseline", "budget": "tokens", "n": 3}
        return stored(
            "train", {"paired": [{**row, "mean": mean, "low": low, "high": high, "detectable": 0.02}]}
        )

    assert status("directional/pretraining-faster", train(-0.03, -0.05, -0.01)).status == REPRODUCED
    assert status("directional/pretraining-faster", train(0.03, 0.01, 0.05)).status == REFUTED
    undecided = status("directional/pretraining-faster", train(-0.01, -0.03, 0.01))
    assert undecided.status == UNDERPOWERED
    assert "0.0200 would be found" in undecided.found


def test_compression_is_judged_beside_its_null() -> None:
    def compress(r: float) -> Summary:
        row = {"mode": "local", "part": "mlp", "along": "update", "r_over_tokens": r, "energy_share": 0.99}
        return stored("compress", {"regimes": {"awq": {"summary": [{**row, "r_isotropic": 0.9999}]}}})

    assert status("directional/perpendicular-dominates", compress(0.98)).status == ARTEFACT
    assert status("directional/perpendicular-dominates", compress(0.9)).status == REFUTED


def test_an_unknown_paper_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InputError, match="directional"):
        judge_all([], paper="directionl")


def test_claims_are_listed_with_the_command_and_the_runs_behind_each(capsys) -> None:
    assert run(["paper", "--claims", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["claims"]
    assert len(listed) == len(claims.claims())
    for one in listed:
        assert one["status"] in STATUSES
        assert one["status"] in (NOT_YET, OUT_OF_REACH, CONTRADICTION) or one["runs"], one["name"]
        assert all(run_["command"].split()[0] in ("perpend", "python") for run_ in one["runs"])
    assert any(one["status"] == REFUTED for one in listed)
    assert any(one["status"] == REPRODUCED for one in listed)


def test_the_list_renders_every_claim_once() -> None:
    found = judge_all(claims.summaries())
    text = "\n".join(claims.markdown(found))
    for one in found:
        statement = claims._escaped(one.claim.statement)
        assert text.count(statement) == 1, one.claim.name
    for line in text.splitlines():
        assert not line.startswith("|") or line.replace("\\|", "").count("|") == 6
