"""`perpend attention` and `perpend prune` from the words typed to what the run folder holds."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

import perpend
import tiny
from perpend import texts
from perpend.cli import run
from perpend.geometry import split_entropy
from perpend.runs import Run
from perpend.studies import reversal
from perpend.studies.attention import attention_study


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A tiny model with a byte tokenizer, as a folder, and a text."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.save_llama(folder / "model", initializer_range=0.4)
    words_of_text = np.random.default_rng(0).permutation(
        ["sink", "content", "row", "head", "layer", "mass", "share", "key"] * 90
    )
    (folder / "text.txt").write_text(" ".join(words_of_text))
    return folder


def words(saved: Path, *more: str) -> list[str]:
    return [
        "attention", str(saved / "model"), "--text", str(saved / "text.txt"), "--length", "40",
        "--window", "16", "--sequences", "48", "--batch", "4", "--triples", "3000", "--bootstrap", "20",
        "--quiet", *more,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def surveyed(saved: Path, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "survey"
    assert run(words(saved, "--seed", "0", "--out", str(out))) == 0
    return Run.open(out)


def eager_rows(saved: Path) -> torch.Tensor:
    """All rows of seed 0 on the support, float64, [layers, n, heads, rows, 16], from eager attention."""
    model, tokenizer = perpend.load(str(saved / "model"))
    tokens = texts.sequences(texts.read_text(str(saved / "text.txt")), tokenizer, length=40).take(48, 0)
    model = model.double()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = torch.stack(model(tokens, output_attentions=True).attentions).double()[..., 16:, :16]
    return rows / rows.sum(-1, keepdim=True)


def test_run_json_has_the_promised_shape(surveyed) -> None:
    results = surveyed.document["results"]
    json.dumps(surveyed.document, allow_nan=False)
    assert set(results["sink"]["per_layer"][0]) == {"row", "signature"}
    expected = {"total", "binary", "content", "weighted_content", "sink_mass", "dispersion"}
    assert set(results["entropy"]["per_layer"][0]) == expected
    assert len(results["entropy"]["per_layer"]) == 3
    assert set(results["reversal"]) == set(reversal.METRICS)
    for rate in results["reversal"].values():
        assert {"mean", "sd", "ties", "exact", "low", "high"} <= set(rate)
        assert 0 <= rate["exact"] <= 1
    assert results["reversal"]["content"]["exact"] == 0
    assert results["regime"] in ("content", "js", "abstain")
    assert {"disagreement", "disagreement_dispersion"} <= set(results["collapse"])
    assert surveyed.arrays["signatures"].shape == (3, 4, 16)
    assert surveyed.arrays["signatures"].dtype == np.float64
    assert len(surveyed.document["findings"]) == 4


def test_signatures_and_split_are_those_of_the_eager_rows(surveyed, saved: Path) -> None:
    rows = eager_rows(saved)
    flat = rows.permute(0, 2, 1, 3, 4).flatten(2, 3)  # layers, heads, rows, keys
    signature = flat.log().mean(2).softmax(-1)
    np.testing.assert_allclose(np.exp(surveyed.arrays["signatures"]), signature, atol=2e-6)
    np.testing.assert_allclose(surveyed.arrays["arithmetic"], flat.mean(2), atol=2e-6)
    split = split_entropy(flat, sink=0)
    layers = pd.DataFrame(surveyed.results["entropy"]["per_layer"])
    for name, values in (("total", split.total), ("content", split.content), ("binary", split.binary)):
        np.testing.assert_allclose(layers[name], values.mean((1, 2)), atol=1e-5)
    weighted = (1 - split.sink_mass) * split.content
    np.testing.assert_allclose(layers["weighted_content"], weighted.mean((1, 2)), atol=1e-5)
    np.testing.assert_allclose(layers["total"], layers["binary"] + layers["weighted_content"], atol=1e-12)


def test_reversals_are_those_of_the_stored_signatures(surveyed) -> None:
    pairs = reversal.matrices(surveyed.arrays["signatures"].reshape(12, 16), 0)
    for metric, (keep, drop) in pairs.items():
        exact = reversal.exact_rates(keep, drop)[0].mean()
        assert surveyed.results["reversal"][metric]["exact"] == pytest.approx(exact, abs=1e-12)


def test_the_report_opens_with_every_figure(surveyed) -> None:
    page = (surveyed.folder / "report.html").read_text()
    for title in ("Sink mass by head", "Entropy split", "Verdicts that reverse", "Calibration"):
        assert title in page
    assert len(page) < 3_000_000


def test_a_sink_block_and_another_sink_change_the_question_not_the_code(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "block"
    assert run(words(saved, "--sink", "first:4", "--seed", "0", "--bootstrap", "0", "--out", str(out))) == 0
    found = Run.open(out).document
    assert found["results"]["sink"]["columns"] == [0, 1, 2, 3]
    assert found["results"]["sink"]["uniform_mass"] == 0.25
    assert found["results"]["reversal"]["content"]["exact"] == 0


def test_three_seeds_on_the_whole_text_read_it_once(saved: Path, monkeypatch) -> None:
    from perpend.commands import attention

    class Held:
        class sequences:
            tokens = range(10)

    assert attention._distinct(Held, {0: range(10), 1: range(10), 2: range(10)}) == [0]
    assert attention._distinct(Held, {0: range(9), 1: range(9)}) == [0, 1]


@pytest.fixture(scope="module")
def extended(saved: Path, tmp_path_factory):
    """Everything that one pass can read besides."""
    out = tmp_path_factory.mktemp("extended") / "survey"
    more = [
        "--windows", "8,16,24", "--value-weights", "value,output", "--whole-rows", "log", "--row-audit", "40",
        "--seed", "0,1", "--out", str(out),
    ]  # fmt: skip
    assert run(words(saved, *more)) == 0
    return Run.open(out)


def test_readings_leave_the_survey_as_it_was(extended, surveyed) -> None:
    """The main rows, their rates and intervals are those of a run without any further reading."""
    np.testing.assert_array_equal(extended.arrays["signatures"], surveyed.arrays["signatures"])
    assert set(surveyed.results) | {"windows", "weights", "whole_rows", "row_audit"} == set(extended.results)
    one, other = (found.results["reversal"]["cosine"] for found in (surveyed, extended))
    assert (one["low"], one["high"]) == (other["low"], other["high"])


def test_readings_in_the_run_folder(extended) -> None:
    json.dumps(extended.document, allow_nan=False)
    results, tables = extended.results, extended.tables
    assert [row["window"] for row in results["windows"]["by_window"]] == [8, 16, 24]
    kept = [row["retained"] for row in results["windows"]["by_window"]]
    assert all(0 < number["low"] <= number["value"] <= number["high"] < 1 for number in kept)
    own = results["windows"]["by_window"][1]["reversal"]["cosine"]["value"]
    rate = tables["reversal"].set_index("metric").loc["cosine"]
    pairs = reversal.matrices(extended.arrays["signatures"].reshape(12, 16), 0, ("cosine",))
    assert own == pytest.approx(reversal.exact_rates(*pairs["cosine"])[0].mean())
    assert rate["exact"] != 0
    assert len(tables["windows"]) == 3 * 5
    assert len(tables["windows_between"]) == 3
    assert set(results["weights"]) == {"plain", "value", "output"}
    assert set(tables["weights_layers"]["weight"]) == {"plain", "value", "output"}
    whole = results["whole_rows"]
    assert whole["edges"] == [0, 1, 2, 4, 8, 16, 32]
    assert whole["same_queries"]["fixed"]["total"]["value"] == pytest.approx(
        np.mean([row["fixed_total"] for row in whole["per_layer"]])
    )
    assert results["row_audit"]["places"] == 40
    assert len(tables["row_audit"]) == 40 * 6
    assert extended.arrays["block_logits"].shape == (12, 3, 4, 16)
    assert extended.arrays["block_rows"].sum() == 48 * 24 * 3
    mean = extended.arrays["block_logits"].sum(0) / extended.arrays["block_rows"].sum(0)[:, None, None]
    closed = mean - np.log(np.exp(mean).sum(-1, keepdims=True))
    np.testing.assert_allclose(closed, extended.arrays["signatures"], atol=1e-12)
    page = (extended.folder / "report.html").read_text()
    for title in ("Windows", "Value-weighted rows", "Whole rows", "Single rows"):
        assert title in page
    assert len([line for line in extended.document["findings"] if "interval" in line]) >= 6


def test_single_rows_in_the_table_are_the_rows_of_eager_attention(extended, saved: Path) -> None:
    """The places named in the table, read from eager attention and judged by hand, agree with its counts."""
    rows = eager_rows(saved)
    table = extended.tables["row_audit"]
    rate = extended.results["row_audit"]["metrics"]["jensen_shannon"]["reversal"]["value"]
    places = table[table["metric"] == "jensen_shannon"]
    assert rate == pytest.approx(places["reversal"].sum() / places["triples"].sum())
    expected = []
    for place in places.itertuples():
        at = rows[:, place.sequence, :, place.query - 16].reshape(12, 16).log().numpy()
        keep, drop = reversal.matrices(at, 0, ("jensen_shannon",))["jensen_shannon"]
        expected.append(reversal.exact_rates(keep, drop)[0].mean())
    found = (places["reversal"] / places["triples"]).to_numpy()
    np.testing.assert_allclose(found, expected, atol=5 * np.sqrt(0.25 / 1000))
    assert np.corrcoef(found, expected)[0, 1] > 0.9


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--windows", "8,x"], "32,64,128"),
        (["--value-weights", "values"], "known: value, output"),
        (["--drop-both"], "same as dropping"),
        (["--windows", "16,500"], "a window of 500 keys"),
    ],
)
def test_readings_that_cannot_be(saved: Path, tmp_path: Path, capsys, more: list[str], told: str) -> None:
    assert run(words(saved, "--seed", "0", "--out", str(tmp_path / "a"), *more)) == 2
    assert told in " ".join(capsys.readouterr().err.split())


def test_one_block_has_no_intervals_and_says_why(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "few"
    assert run(words(saved, "--seed", "0", "--sequences", "2", "--batch", "2", "--out", str(out))) == 0
    found = Run.open(out)
    told = found.document["undefined"]["intervals"]
    assert "all 2 sequences are in one block" in told
    assert "smaller batches" in told
    assert any("No intervals" in line for line in found.document["findings"])
    assert "low" not in found.results["reversal"]["cosine"]
    assert found.results["reversal"]["cosine"]["sd"] is None, "one seed has no spread"
    assert found.tables["reversal"]["sd"].isna().all()
    quiet = tmp_path / "none"
    none = ["--seed", "0", "--sequences", "2", "--batch", "2", "--bootstrap", "0", "--out", str(quiet)]
    assert run(words(saved, *none)) == 0
    assert "intervals" not in Run.open(quiet).document["undefined"], "none were asked for"


def test_content_alone_is_numbered_by_key_of_the_window(surveyed) -> None:
    from perpend.commands.attention import figures

    table = figures(surveyed)[0].detail.table
    for kept, content in zip(table["kept"], table["content_row"]):
        assert len(kept) == len(content) == 16
        assert content[0] is None, "the sink's own place is empty"
        shares = np.array(kept[1:]) / (1 - kept[0])
        np.testing.assert_allclose(content[1:], shares, rtol=2e-3, atol=1e-6)


def test_a_study_of_no_survey_is_refused() -> None:
    with pytest.raises(perpend.InputError, match="at least one survey"):
        attention_study({})


def test_prune_predicts_first_and_evaluates_every_set(saved: Path, tmp_path: Path) -> None:
    out, smaller = tmp_path / "prune", tmp_path / "smaller"
    arguments = [
        "prune", str(saved / "model"), "--text", str(saved / "text.txt"), "--length", "40", "--window", "16",
        "--sequences", "24", "--tokens", "400", "--context", "40", "--seed", "0,1", "--sparsity", "0.25",
        "--quiet", "--save", str(smaller), "--out", str(out),
    ]  # fmt: skip
    assert run(arguments) == 0
    found = Run.open(out).document["results"]
    assert {cell["criterion"] for cell in found["cells"]} >= {"js", "content_l1", "random_b"}
    assert all(cell["heads"] + cell["shortfall"] == 3 for cell in found["cells"])
    assert found["prediction"]["regime"] == found["score"]["predicted"]
    assert len(found["sets"]) == 2 * 7 + 2  # the random draws carry no seed
    assert found["cost"] < 1
    assert found["saved"]["perplexity_after_loading"] == pytest.approx(found["saved"]["perplexity"], rel=1e-4)
    assert found["weighted"]["curve"][0]["weight"] == "0"
    assert found["weighted"]["against"]["js"]["verdict"] in ("better", "worse", "undecided")
