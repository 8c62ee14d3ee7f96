"""`perpend compress` and `perpend compare`, as a user runs them, on a trained model."""

from __future__ import annotations

import json

import pytest

from perpend import cli
from perpend.runs import Run

SHORT = ["--sequences", "6", "--length", "64", "--calibration-sequences", "4", "--calibration-length", "64"]


@pytest.fixture
def model(shared):
    return str(shared / "data/models/stories260K")


@pytest.fixture
def text(shared):
    return ["--text", str(shared / "data/text/tinystories.txt"), "--device", "cpu"]


def run(capsys, *arguments):
    code = cli.run([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_one_run_compresses_saves_and_reports(capsys, tmp_path, model, text):
    code, out, err = run(
        capsys, "compress", model, *text, *SHORT, "--method", "wanda:2:4+gain", "--surgery", 2, "--map", 2,
        "--layer-changes", 2, "--error-sequences", 2, "--along", "update", "--along", "output",
        "--out", tmp_path / "run", "--save", tmp_path / "smaller", "--json",
    )  # fmt: skip
    assert code == 0, err
    document = json.loads(out)
    results = document["results"]
    regime = results["regimes"]["wanda:2:4+gain"]
    compression = regime["compression"]
    assert compression["method"] == "wanda"
    assert compression["repair"]["name"] == "gain"
    assert compression["sparsity"] == 0.5
    assert compression["calibration"]["tokens"] == 256
    assert len(document["request"]["calibration_text"]["text_sha256"]) == 64
    assert document["request"]["calibration_text"]["skipped"] == 0, "another text than the evaluated one"
    assert {s["along"] for s in regime["summary"]} == {"update", "output"}
    assert {s["part"] for s in regime["summary"]} == {"attn", "mlp", "block"}
    assert len(results["surgery"]["wanda:2:4+gain"]) == 9
    assert len(results["sensitivity"]["wanda:2:4+gain"]) == 5 * 2 * 3
    assert document["conventions"]["local"].startswith("attn and block on the base block input")
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000
    finished = Run.open(tmp_path / "run")
    assert {"layers", "regimes", "relations", "surgery", "sensitivity", "layer_changes", "matrices"} <= set(
        finished.tables
    )
    code, out, err = run(
        capsys, "compare", model, tmp_path / "smaller", *text, "--sequences", 6, "--length", 64,
        "--error-sequences", 2, "--out", tmp_path / "pair", "--json",
    )  # fmt: skip
    assert code == 0, err
    pair = json.loads(out)["results"]
    assert pair["other"]["loss"]["loss"] == pytest.approx(regime["loss"]["loss"], abs=1e-6), "same perplexity"
    assert pair["kl"] > 0
    assert 0 < pair["agreement"] < 1


def test_figures_of_a_run(capsys, tmp_path, model, text):
    from perpend.commands.compress import figures

    code, _, err = run(
        capsys, "compress", model, *text, *SHORT, "--method", "rtn:group=4", "--method", "wanda", "--method",
        "magnitude", "--error-sequences", 2, "--surgery", 1, "--map", 1, "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    made = figures(Run.open(tmp_path / "run"))
    titles = [f.title for f in made]
    assert titles[:2] == ["Error across and along, local", "Error across and along, propagated"]
    assert {"Shrinking and stretching", "Loss against error", "Error surgery", "Sensitivity map"} <= set(
        titles
    )
    for figure in made:
        assert len(figure.table)
        for chart in figure.charts.values():
            chart.to_dict()
    findings = Run.open(tmp_path / "run").document["findings"]
    assert any("the order by loss" in f for f in findings)
    assert any("error without direction" in f for f in findings)


def test_a_resumed_run_has_the_same_numbers(capsys, tmp_path, monkeypatch, model, text):
    arguments = [
        "compress",
        model,
        *text,
        *SHORT,
        "--method",
        "wanda",
        "--method",
        "wanda:2:4",
        "--error-sequences",
        2,
    ]
    assert run(capsys, *arguments, "--out", tmp_path / "whole")[0] == 0
    from perpend.studies import compression

    real = compression.run_regime

    def interrupted(base, regime, setting, nll):
        if regime.name == "wanda:2:4":
            raise KeyboardInterrupt
        return real(base, regime, setting, nll)

    monkeypatch.setattr(compression, "run_regime", interrupted)
    assert run(capsys, *arguments, "--out", tmp_path / "halves")[0] == 130
    monkeypatch.setattr(compression, "run_regime", real)
    assert run(capsys, *arguments, "--out", tmp_path / "halves", "--resume")[0] == 0
    whole, halves = (Run.open(tmp_path / name) for name in ("whole", "halves"))
    assert whole.document["results"] == halves.document["results"]
    assert whole.tables["layers"].equals(halves.tables["layers"])


def test_the_same_text_is_never_calibrated_and_evaluated(capsys, tmp_path, model, text):
    code, out, err = run(
        capsys, "compress", model, *text, *SHORT, "--calibration", text[1], "--method", "wanda",
        "--mode", "local", "--error-sequences", 1, "--out", tmp_path / "run", "--json",
    )  # fmt: skip
    assert code == 0, err
    record = json.loads(out)["request"]["calibration_text"]
    assert record["skipped"] == 6
    assert "left to it" in record["notes"][0]


def test_bad_requests_are_answered_in_one_line(capsys, tmp_path, model, text):
    for arguments, message in (
        (["--method", "wonda"], "did you mean 'wanda'"),
        (["--method", "awq"], "down_proj has 172 input features"),
        (["--method", "wanda:4:8"], "172 input features, not a multiple of 8"),
        (["--method", "wanda", "--method", "rtn", "--save", str(tmp_path / "x")], "exactly one --method"),
        (["--method", "wanda", "--method", "wanda"], "named twice"),
        (["--method", "wanda", "--allocate", "sparsity"], "SETTING=V1,V2"),
        (["--method", "wanda", "--seed", "0,1"], "one --seed"),
    ):
        code, _, err = run(capsys, "compress", model, *text, *SHORT, *arguments, "--out", tmp_path / "none")
        assert code == 2, (arguments, err)
        assert message in err
        assert "Traceback" not in err
        assert not (tmp_path / "none").exists()


def test_models_of_different_kinds_are_refused(capsys, tmp_path, shared, model, text):
    code, _, err = run(
        capsys, "compare", model, shared / "data/models/capp-gpt2", *text, "--out", tmp_path / "none"
    )
    assert code == 2
    assert "architecture: llama against gpt2" in err


def test_the_cost_is_shown_and_nothing_is_run(capsys, tmp_path, model, text):
    code, out, _ = run(
        capsys, "compress", model, *text, *SHORT, "--method", "wanda", "--plan", "--out", tmp_path / "n"
    )
    assert code == 0
    assert "expected time" in out
    assert not (tmp_path / "n").exists()


def test_a_gguf_file_against_safetensors(capsys, tmp_path):
    """A GGUF model, saved compressed: plain transformers loads it, and compare reads both kinds of file."""
    import transformers

    import tiny_gguf

    file = tiny_gguf.write(tmp_path / "tiny.gguf")
    text = tmp_path / "text.txt"
    text.write_text("the thing that the other thing is for the sake of " * 60)
    common = ["--text", text, "--device", "cpu", "--sequences", 4, "--length", 32]
    for method in ("wanda:sparsity=0", "wanda:2:4"):
        code, _, err = run(
            capsys, "compress", file, *common, "--calibration-sequences", 4, "--calibration-length", 32,
            "--method", method, "--mode", "local", "--out", tmp_path / f"run-{method[-1]}",
            "--save", tmp_path / method[-1],
        )  # fmt: skip
        assert code == 0, err
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / method[-1])
    differing = []
    for folder in ("0", "4"):
        code, out, err = run(
            capsys,
            "compare",
            file,
            tmp_path / folder,
            *common,
            "--out",
            tmp_path / f"pair-{folder}",
            "--json",
        )
        assert code == 0, err
        results = json.loads(out)["results"]
        differing.append((results["kl"], results["agreement"], results["summary"][0]["total"]))
    assert differing[0][0] == pytest.approx(0, abs=1e-6)
    assert differing[0][1] == 1
    assert differing[0][2] == pytest.approx(0, abs=1e-6)
    assert differing[1][0] > 0.01
    assert differing[1][2] > 0.1


def test_downstream_scores_stand_beside_the_errors(capsys, tmp_path, shared, model, text):
    arguments = ["compress", model, *text, *SHORT, "--mode", "local", "--error-sequences", 1, "--json"]
    arguments += ["--tasks", "piqa", "--tasks-data", shared / "data/eval", "--tasks-limit", 8]
    for method in ("rtn:group=4", "magnitude", "wanda:2:4"):
        arguments += ["--method", method]
    code, out, err = run(capsys, *arguments, "--out", tmp_path / "run")
    assert code == 0, err
    results = json.loads(out)["results"]
    assert 0 <= results["base"]["scores"]["piqa"] <= 1
    for regime in results["regimes"].values():
        assert -1 <= regime["scores"]["piqa"] <= 1, "the change against the base model"
    assert "piqa" in {row["target"] for row in results["relations"]}
    paired = results["comparison"]["wanda:2:4"]["tasks"]["piqa"]
    assert paired["acc_norm"]["n"] == 8
    assert paired["acc_norm"]["difference"] == pytest.approx(
        results["regimes"]["wanda:2:4"]["scores"]["piqa"]
    )


def test_a_comparison_scores_both_models_on_the_same_items(capsys, tmp_path, shared, model, text):
    asked = ["--tasks", "piqa", "--tasks-data", shared / "data/eval", "--tasks-limit", 4, "--json"]
    code, out, err = run(
        capsys, "compare", model, model, *text, "--mode", "local", *asked, "--out", tmp_path / "run"
    )
    assert code == 0, err
    results = json.loads(out)["results"]
    assert list(results["tasks"]) == ["base", str(model)]
    row = results["comparison"][str(model)]["tasks"]["piqa"]["gold log-likelihood"]
    assert row["difference"] == 0
    assert row["n"] == 4
