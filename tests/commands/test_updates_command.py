"""`perpend updates` and `perpend verify` from the words typed to the run folder and the exit status."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from perpend.cli import run
from perpend.models import checks
from perpend.models.smaller import dropped
from perpend.runs import Run

PARTS = ("attn", "mlp", "block")


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny model with a tokenizer of single bytes, as a folder, and a text."""
    folder = tmp_path_factory.mktemp("saved")
    tiny.save_llama(folder / "model", num_hidden_layers=4)
    (folder / "text.txt").write_text("The stream carries what every layer adds to it. " * 80)
    return folder


def words(saved, verb: str, *more: str) -> list[str]:
    text = (
        ["--text", str(saved / "text.txt"), "--length", "24", "--sequences", "40"]
        if verb == "updates"
        else []
    )
    return [verb, str(saved / "model"), *text, "--quiet", *more]


def test_a_run_holds_profile_generation_dropping_and_the_smaller_model(saved, tmp_path, capsys):
    out, smaller = tmp_path / "run", tmp_path / "smaller"
    arguments = words(
        saved, "updates", "--generate", "4", "--generate-layers", "0,3", "--evaluate", "--drop", "1,2",
        "--eval-sequences", "4",
        "--save", str(smaller), "--by", "rotation", "--seed", "0,1", "--out", str(out),
    )  # fmt: skip
    assert run(arguments) == 0, capsys.readouterr().err
    printed = capsys.readouterr().out
    assert "Perplexity without so many blocks" in printed
    finished = Run.open(out)
    assert set(finished.tables) == {"updates", "ranking", "generation", "dropping"}
    results = finished.document["results"]
    json.dumps(finished.document, allow_nan=False)
    assert [entry["layer"] for entry in results["updates"]["per_layer"]] == [0, 1, 2, 3]
    assert all(results["updates"]["per_layer"][0][part]["ratio"] > 0 for part in PARTS)
    assert results["generation"]["cached"] is True
    assert [entry["layer"] for entry in results["generation"]["per_layer"]] == [0, 3]
    assert results["updates"]["left_out"]["padding"] == 0
    assert {row["count"] for row in results["dropping"]["curve"]} == {0, 1, 2}
    assert finished.arrays["histograms"].sum() > 0
    updates = pd.DataFrame(finished.tables["updates"])
    assert len(updates) == 4 * 3 * 4
    assert "seed" in json.dumps(finished.document["request"])

    order = results["dropping"]["orders"]["rotation"]["block"]
    loaded = AutoModelForCausalLM.from_pretrained(smaller).eval()
    whole = AutoModelForCausalLM.from_pretrained(saved / "model").eval()
    assert loaded.config.num_hidden_layers == 2
    ids = tiny.tokens(1, 12)
    with torch.no_grad(), dropped(whole, [(layer, "block") for layer in order[:2]]):
        expected = whole(ids).logits
    with torch.no_grad():
        torch.testing.assert_close(loaded(ids).logits, expected, rtol=1e-4, atol=1e-5)
    assert any("blocks left out" in line for line in finished.document["findings"])

    from perpend.commands.updates import figures

    found = figures(finished)
    assert [figure.title for figure in found][:2] == [
        "Parallel over perpendicular",
        "Which tokens carry the ratio",
    ]
    assert len(found) == 8
    assert all(len(figure.table) and figure.question.endswith("?") for figure in found)
    assert (out / "report.html").stat().st_size > 10_000


def test_an_interrupted_run_resumes_to_the_same_numbers(saved, tmp_path, monkeypatch, capsys):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    short = ("--generate", "0")
    assert run(words(saved, "updates", *short, "--out", str(whole))) == 0
    from perpend.surveys._update_sums import Collector

    own, calls = Collector.reduce, []

    def stops(self, *given):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return own(self, *given)

    monkeypatch.setattr(Collector, "reduce", stops)
    assert run(words(saved, "updates", *short, "--out", str(broken))) == 130
    assert run(words(saved, "updates", *short, "--out", str(broken), "--resume")) == 0
    assert len(calls) == 3  # the first block was kept
    one, two = Run.open(whole), Run.open(broken)
    assert np.array_equal(one.arrays["sums"], two.arrays["sums"])
    assert one.document["results"] == two.document["results"]
    capsys.readouterr()


def test_one_json_document_and_a_plan(saved, tmp_path, capsys):
    assert run(words(saved, "updates", "--generate", "0", "--out", str(tmp_path / "a"), "--json")) == 0
    document = json.loads(capsys.readouterr().out)
    assert "generation" not in document["results"]
    assert run(words(saved, "updates", "--plan", "--out", str(tmp_path / "b"))) == 0
    assert "forward passes" in capsys.readouterr().out
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--drop", "4"), "one must be left"),
        (("--drop", "0"), "no list of numbers from 1 on"),
        (("--generate-layers", "1,4"), "layers 0 to 3"),
        (("--evaluate", "--eval-sequences", "5000"), "lower --sequences or --eval-sequences"),
        (("--by", "cosin"), "did you mean 'cosine'"),
        (("--save", "smaller"), "--save needs --drop"),
        (("--save", ".", "--drop", "1"), "is not empty"),
        (("--save", "/dev/null/x", "--drop", "1"), "/dev/null takes no files"),
        (("--images", "nowhere"), "there is no folder of images nowhere"),
    ],
)
def test_bad_requests_say_what_to_do(saved, tmp_path, capsys, more, message):
    assert run(words(saved, "updates", *more, "--out", str(tmp_path / "none"))) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "none").exists()


def test_a_language_model_given_images_says_what_it_reads(saved, tmp_path, capsys):
    image = pytest.importorskip("PIL.Image")
    image.new("RGB", (4, 4)).save(tmp_path / "one.png")
    assert run(words(saved, "updates", "--images", str(tmp_path), "--out", str(tmp_path / "none"))) == 2
    assert "is a language model: it reads --text" in " ".join(capsys.readouterr().err.split())


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Models that are no plain decoder, with a tokenizer of words that are not English, and their text."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("other")
    known = ["<pad>", "<s>", "</s>", "[UNK]", *(f"w{i}" for i in range(80))]
    own = Tokenizer(models.WordLevel({word: i for i, word in enumerate(known)}, unk_token="[UNK]"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="[UNK]"
    )
    torch.manual_seed(0)
    config = transformers.XGLMConfig(
        vocab_size=tiny.VOCAB,
        d_model=32,
        ffn_dim=48,
        num_layers=3,
        attention_heads=4,
        max_position_embeddings=64,
    )
    built = {
        "xglm": transformers.XGLMForCausalLM(config),  # no adapter
        "multimodal": tiny.build("gemma3_multimodal"),
        "bert": tiny.build("bert"),
    }
    for name, model in built.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    (folder / "text.txt").write_text(" ".join(np.random.default_rng(0).choice(known[4:], 900)))
    return folder


def asked(other, name: str, verb: str, *more: str) -> list[str]:
    text = ["--text", str(other / "text.txt"), "--length", "24", "--sequences", "8"]
    return [verb, str(other / name), *(text if verb == "updates" else []), "--quiet", *more]


@pytest.mark.parametrize("name", ["xglm", "multimodal", "bert"])
def test_other_models_are_proved_and_profiled_too(other, tmp_path, capsys, name):
    assert run(asked(other, name, "verify", "--out", str(tmp_path / "verify"))) == 0
    assert run(asked(other, name, "updates", "--generate", "3", "--out", str(tmp_path / "updates"))) == 0
    capsys.readouterr()
    document = Run.open(tmp_path / "updates").document
    layers = document["results"]["updates"]["per_layer"]
    if name == "xglm":
        assert set(layers[0]) == {"layer", "block"}
        assert "perpend/models/families" in document["findings"][0]
    else:
        assert set(layers[0]) == {"layer", *PARTS}
    assert ("generation" in document["results"]) == (name != "bert")
    assert len(layers) == (4 if name == "multimodal" else 3)  # the decoder's, not the vision tower's


def test_without_an_adapter_only_blocks_can_be_dropped(other, tmp_path, capsys):
    out = tmp_path / "run"
    assert run(asked(other, "xglm", "updates", "--unit", "mlp", "--out", str(out))) == 2
    assert "no adapter for 'xglm'" in " ".join(capsys.readouterr().err.split())
    assert not out.exists()
    curve = ("--evaluate", "--drop", "1", "--eval-sequences", "4", "--seed", "0", "--out", str(out))
    assert run(asked(other, "xglm", "updates", *curve)) == 0
    rows = Run.open(out).results["dropping"]["curve"]
    assert {"last first", "random 0"} < {row["order"] for row in rows}
    assert {row["count"] for row in rows} == {0, 1}
    capsys.readouterr()


def test_verify_passes_and_leaves_its_table(saved, tmp_path, capsys):
    out = tmp_path / "run"
    assert run(words(saved, "verify", "--out", str(out))) == 0
    assert "decode = prefill, static cache" in capsys.readouterr().out
    finished = Run.open(out)
    assert finished.document["results"]["passed"] is True
    table = pd.DataFrame(finished.tables["checks"])
    assert set(table["status"]) == {"ok"}
    from perpend.commands.verify import figures

    assert [figure.title for figure in figures(finished)] == ["Errors against tolerance"]


def test_a_failed_check_is_exit_status_one(saved, tmp_path, capsys, monkeypatch):
    own = checks.self_weight
    monkeypatch.setattr(checks, "self_weight", lambda call: own(call) * 1.01)
    out = tmp_path / "run"
    arguments = words(saved, "verify", "--only", "self message apart", "--out", str(out), "--json")
    assert run(arguments) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["results"]["checks"]["self message apart"]["status"] == "failed"
    assert document["findings"][0].startswith("failed: self message apart")
    assert run(words(saved, "verify", "--only", "self mesage", "--out", str(tmp_path / "x"))) == 2
    assert "did you mean" in capsys.readouterr().err
