"""`perpend models`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perpend.cli import run
from perpend.models.catalog import CATALOG, DEFAULT


@pytest.fixture(autouse=True)
def _nothing_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERPEND_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def test_every_model_is_listed_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    out = capsys.readouterr().out
    for entry in CATALOG.values():
        assert entry.name in out
        assert entry.hub in out
    assert "fetched on first use (93 MB from a package registry)" in out
    assert "the model hub cannot be reached" in out


def test_the_document_is_the_table_and_more(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["default"] == DEFAULT
    assert [m["name"] for m in document["models"]] == list(CATALOG)
    by_name = {m["name"]: m for m in document["models"]}
    assert by_name["pythia-160m"]["revisions"][0] == "step512"
    assert by_name["llama-3.2-1b"]["gated"] is True
    assert by_name["gpt2"]["here"].startswith("no")


def test_a_part_of_a_name_chooses(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models", "PYTHIA", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert {m["family"] for m in document["models"]} == {"gpt_neox"}
    assert run(["models", "pithia"]) == 2
    assert "did you mean 'pythia-" in capsys.readouterr().err


def test_a_cached_model_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    from perpend.models._wheel import SEAL, cached_folder

    folder = cached_folder(CATALOG["minilm"].wheel, "minilm")
    folder.mkdir(parents=True)
    (folder / SEAL).write_text('{"files": {}}')
    assert run(["models", "minilm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"][0]["here"] == "yes"


def test_hub_models_in_the_hubs_own_cache_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from huggingface_hub import constants

    repo = tmp_path / "hub" / "models--openai-community--gpt2"
    for file in ("config.json", "model.safetensors"):
        (repo / "snapshots" / "abc").mkdir(parents=True, exist_ok=True)
        (repo / "snapshots" / "abc" / file).write_text("{}")
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("abc")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert run(["models", "gpt2", "--json"]) == 0
    here = {m["name"]: m["here"] for m in json.loads(capsys.readouterr().out)["models"]}
    assert here["gpt2"] == "yes"
    assert here["distilgpt2"].startswith("no")


@pytest.mark.parametrize(("reachable", "says"), [(True, "fetched on first use"), (False, "no: the hub")])
def test_what_a_hub_model_takes(reachable: bool, says: str) -> None:
    from perpend.commands.models import state

    assert state(CATALOG["llama-3.2-1b"], reachable).startswith(says)
    if reachable:
        assert "about 2.5 GB" in state(CATALOG["llama-3.2-1b"], True)
        assert "licence" in state(CATALOG["llama-3.2-1b"], True)
        assert "licence" not in state(CATALOG["gpt2"], True)
