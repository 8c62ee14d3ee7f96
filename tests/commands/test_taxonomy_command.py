"""`perpend taxonomy` from a tiny encoder, a tiny causal model and a finished survey to the run folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny
from perpend.cli import run
from perpend.commands import taxonomy
from perpend.runs import Run


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny BERT with a WordPiece tokenizer that writes [CLS] … [SEP], and a text."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder = tmp_path_factory.mktemp("encoder")
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *(f"##{c}" for c in letters)]
    (folder / "vocab.txt").write_text("\n".join(vocabulary))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder / "model")
    torch.manual_seed(0)
    settings = {**tiny._SMALL, "vocab_size": len(vocabulary)}
    settings.pop("num_key_value_heads")
    BertModel(BertConfig(**settings, initializer_range=0.6)).save_pretrained(folder / "model")
    (folder / "text.txt").write_text(" ".join(["rows", "of", "attention", "are", "compositions"] * 700))
    return folder


def words(encoder: Path, *more: str) -> list[str]:
    return ["taxonomy", str(encoder / "model"), "--text", str(encoder / "text.txt"), "--sequences", "6",
            "--batch", "2", "--bootstrap", "3", "--quiet", *more]  # fmt: skip


def test_clark_on_an_encoder(encoder: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert run([*words(encoder, "--protocol", "clark", "--summed"), "--out", str(out)]) == 0
    found = Run.open(out)
    json.dumps(found.document, allow_nan=False)
    assert found.results["sink"]["columns"] == [0, 127]
    assert found.arrays["signatures"].shape == (3, 4, 128)
    assert set(found.results["majority"]) == {"cls", "sep"}
    aris = found.results["between_conventions"]
    assert aris["content"]["mean"] == 1
    assert set(aris["jensen_shannon"]["by_clusters"]) == {"4", "5", "6", "8"}
    summed = aris["summed_jensen_shannon"]
    assert summed["low"] <= summed["high"]
    scored = found.results["predictions"]
    assert scored["written"] < found.document["finished"] or scored["written"] == found.document["finished"]
    assert scored["scored"][0]["outcome"] in ("confirmed", "refuted")
    titles = [figure.title for figure in taxonomy.figures(found)]
    assert titles[0] == "Clusters between conventions"
    assert "Trees of heads under both conventions" in titles
    for figure in taxonomy.figures(found):
        for chart in figure.charts.values():
            chart.to_dict()


def test_table_5_on_an_encoder_is_the_first_64_keys_and_queries(encoder: Path, tmp_path: Path) -> None:
    from transformers import BertModel

    from perpend import load, survey_attention, texts

    out = tmp_path / "run"
    assert run([*words(encoder), "--out", str(out)]) == 0
    found = Run.open(out)
    assert found.results["sink"]["columns"] == [0]
    assert "sep" not in found.results["majority"]
    model, tokenizer = load(str(encoder / "model"))
    assert isinstance(model, BertModel)
    tokens = texts.sequences(texts.read_text(encoder / "text.txt"), tokenizer, length=128).take(6, 0)
    survey = survey_attention(model, tokens, window=64, queries=(0, 64), sink="cls", batch=2, block=2)
    torch.testing.assert_close(
        torch.as_tensor(found.arrays["signatures"]), torch.as_tensor(survey.signatures), rtol=0, atol=1e-9
    )
    assert [r["clusters"] for r in found.tables["taxonomy"].to_dict("records")[:3]] == [4, 6, 8]


def test_a_finished_survey_is_not_captured_again(encoder: Path, tmp_path: Path, capsys) -> None:
    survey, out = tmp_path / "survey", tmp_path / "run"
    text = ["--text", str(encoder / "text.txt"), "--quiet", "--bootstrap", "0", "--seed", "0"]
    assert run(["attention", str(encoder / "model"), *text, "--sequences", "4", "--length", "32",
                "--window", "16", "--out", str(survey)]) == 0  # fmt: skip
    assert run(["taxonomy", str(survey), "--quiet", "--out", str(out)]) == 0
    found = Run.open(out)
    assert found.document["request"]["run"] == str(survey)
    torch.testing.assert_close(
        torch.as_tensor(found.arrays["signatures"]), torch.as_tensor(Run.open(survey).arrays["signatures"])
    )
    assert run(["taxonomy", str(survey), "--protocol", "clark", "--quiet"]) == 2
    capsys.readouterr()
    assert run(["taxonomy", str(survey), "--text", "wikitext2", "--sequences", "9", "--quiet"]) == 2
    assert "--text, --sequences would change nothing" in capsys.readouterr().err


def test_a_model_without_cls_and_sep_is_told(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert taxonomy.is_encoder(None) is False
    assert run(["taxonomy", str(tmp_path / "nothing")]) == 2


def test_too_few_heads_are_told_before_the_survey(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    tiny.save_llama(tmp_path / "model", num_hidden_layers=1, num_attention_heads=2)
    (tmp_path / "text.txt").write_text("rows of attention are compositions " * 30)
    asked = ["taxonomy", str(tmp_path / "model"), "--text", str(tmp_path / "text.txt"), "--quiet"]
    assert run([*asked, "--out", str(tmp_path / "run")]) == 2
    assert "2 attention heads, too few for the 4 clusters" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
