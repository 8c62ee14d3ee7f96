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
    assert any("the order " in f and " < " in f and "in e⊥; in e∥ it" in f for f in findings)
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


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A tiny random Llama, and a text: what is asked of it is how it is answered, not how good it is."""
    import tiny

    folder = tmp_path_factory.mktemp("small")
    tiny.save_llama(folder / "model", num_hidden_layers=2, intermediate_size=64)
    (folder / "text.txt").write_text(" ".join(f"row {i} of the sink and its content" for i in range(120)))
    return folder


def words(small, verb, *more):
    cut = ["--text", small / "text.txt", "--sequences", 3, "--length", 32, "--device", "cpu", "--quiet"]
    calibrated = ["--calibration-sequences", 2, "--calibration-length", 32] if verb == "compress" else []
    return [verb, small / "model", *more, *cut, *calibrated]


def test_mistakes_cost_nothing(capsys, tmp_path, small):
    """Each is told before anything is computed, and leaves no run behind."""
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    for arguments, message in (
        (["--method", "wanda", "--save", tmp_path / "full"], "is not empty"),
        (["--method", "wanda", "--save", tmp_path / "run"], "a folder of its own"),
        (["--method", "wanda", "--save", ""], "has no name"),
        (["--method", "wanda", "--tasks", "bolq"], "unknown task 'bolq'"),
        (["--method", "wanda", "--keep", "typo"], "matches no weight"),
        (["--method", "wanda", "--method", "wanda:unstructured"], "named twice"),
        (["--method", "wanda", "--allocate", "sparsity=nan"], "got nan"),
        (["--method", "wanda", "--allocate", "sparsity=0.5,0.5"], "besides 0.5"),
        (["--method", "wanda", "--allocate", "sparsity=half"], "must be a number"),
        (["--method", "wanda:2:4", "--allocate", "sparsity=0.4"], "fixes the sparsity at 0.5"),
        (["--method", "rtn:group=32", "--allocate", "bits=3,99"], "1..16, got 99"),
    ):
        code, _, err = run(capsys, *words(small, "compress", *arguments), "--out", tmp_path / "run")
        assert (code, "Traceback" in err) == (2, False), (arguments, err)
        assert message in err, arguments
        assert not (tmp_path / "run").exists(), arguments
    assert (tmp_path / "full" / "mine.txt").read_text() == "kept"
    code, _, err = run(
        capsys, *words(small, "compare", small / "model", "--tasks", "bolq"), "--out", tmp_path / "run"
    )
    assert code == 2
    assert "unknown task 'bolq'" in err
    assert not (tmp_path / "run").exists()


def test_a_switch_is_allocated_by_its_word(capsys, tmp_path, small):
    """clip=false is no clip; taken for a text it would be true."""
    code, out, err = run(
        capsys, *words(small, "compress", "--method", "awq:group=32,grid=2", "--allocate", "clip=false"),
        "--mode", "local", "--json", "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    plan = json.loads(out)["results"]["plan"][0]
    assert plan["uniform"]["value"] is True
    assert {site["clip"] for site in plan["choice"]} <= {True, False}


def test_other_directions_come_beside_the_update_and_nothing_comes_twice(capsys, tmp_path, small):
    code, out, err = run(
        capsys, *words(small, "compress", "--method", "wanda", "--method", "rtn:group=32"),
        "--along", "input", "--along", "input", "--mode", "local", "--mode", "local",
        "--error-sequences", 50, "--surgery", 50, "--json", "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    document = json.loads(out)
    found = Run.open(tmp_path / "run")
    assert len(found.tables["regimes"]) == 2 * 3, "a regime and part once each"
    assert found.tables["layers"]["along"].unique().tolist() == ["update", "input"]
    assert len(found.tables["layers"]) == 2 * 2 * 3 * 2
    assert document["conventions"]["error_sequences"] == 3, "what there was, not what was asked for"
    assert document["conventions"]["surgery_sequences"] == 3
    assert not any("nan" in finding for finding in document["findings"])


def test_a_model_against_itself(capsys, tmp_path, small):
    code, out, err = run(
        capsys, *words(small, "compare", small / "model"), "--surgery", 2, "--map", 1, "--json", "--out",
        tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    document = json.loads(out)
    results = document["results"]
    assert results["kl"] == 0
    assert results["agreement"] == 1
    assert results["other"]["change"]["difference"] == 0
    assert all(s["total"] == s["kappa"] == s["perpendicular"] == 0 for s in results["summary"])
    assert all(s["rotation_degrees"] < 1e-4 for s in results["summary"])
    assert [row["change"] for row in results["surgery"][str(small / "model")]] == [0.0] * 9
    assert sum("no error at any layer" in finding for finding in document["findings"]) == 2
    assert not any("nan" in finding for finding in document["findings"])


def test_numbers_that_overflow_are_told(capsys, tmp_path, small):
    """A base without a finite loss is refused, another model is described."""
    import perpend

    model, tokenizer = perpend.load(small / "model", device="cpu")
    model.model.layers[0].mlp.down_proj.weight.data *= 3e37
    model.save_pretrained(tmp_path / "large")
    tokenizer.save_pretrained(tmp_path / "large")
    cut = words(small, "compare")[2:]
    code, _, err = run(capsys, "compare", tmp_path / "large", small / "model", *cut, "--out", tmp_path / "a")
    assert code == 2
    assert "is not finite at" in err
    assert "--dtype" in err
    code, out, err = run(
        capsys, *words(small, "compare", tmp_path / "large"), "--json", "--out", tmp_path / "b"
    )
    assert code == 0, err
    assert any("its loss is not finite at" in finding for finding in json.loads(out)["findings"])


def test_calibration_within_the_positions_and_away_from_shuffled_evaluation(capsys, tmp_path, small):
    code, out, err = run(
        capsys, *words(small, "compress", "--method", "wanda"), "--mode", "local", "--calibration",
        small / "text.txt", "--calibration-length", 512, "--calibration-sequences", 1, "--seed", 3, "--json",
        "--out", tmp_path / "run",
    )  # fmt: skip
    assert code == 0, err
    record = json.loads(out)["request"]["calibration_text"]
    assert record["length"] == 256, "the positions of the model"
    assert record["skipped"] >= 1
