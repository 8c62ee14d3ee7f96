"""Text prepared once: what is kept, what is refused, what a kill leaves, and the batches that come of it."""

from __future__ import annotations

import json
import shutil
import sys
from types import SimpleNamespace

import numpy as np
import pytest

from perpend.errors import InputError, PerpendError
from perpend.training import data as module
from perpend.training.data import batch_at, begun, documents, open_data, prepare


@pytest.fixture
def corpus(tmp_path):
    folder = tmp_path / "corpus"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"Document {number}.\n\n" + "the cat sat on the mat. " * 60)
    (folder / "more.jsonl").write_text(
        "".join(json.dumps({"text": f"line {i} " * 30}) + "\n" for i in range(6))
    )
    (folder / "picture.png").write_bytes(b"\x89PNG")
    return folder


def read_back(prepared) -> list[str]:
    """The documents of both parts, decoded from the token streams."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(prepared.tokenizer_folder)
    text = tokenizer.decode(np.concatenate([prepared.train, prepared.valid]).tolist())
    return sorted(text.split(module.END)[:-1])


def test_every_document_is_kept_once_and_comes_back_as_it_was(corpus, tmp_path):
    prepared = prepare(corpus, tmp_path / "data", vocab=270, valid=0.25)
    assert read_back(prepared) == sorted(documents(str(corpus)))
    document = prepared.document
    assert (document["dtype"], document["vocab"], document["documents"]) == ("uint16", 270, 12)
    assert len(prepared.train) == document["tokens"]["train"] > len(prepared.valid) > 0
    assert prepared.identity() == open_data(tmp_path / "data").identity()
    assert "source" not in prepared.identity(), "a moved corpus is the same data"


def test_preparing_again_opens_it_and_another_request_is_refused(corpus, tmp_path):
    prepare(corpus, tmp_path / "data", vocab=270, valid=0.25)
    before = (tmp_path / "data/train.bin").stat().st_mtime_ns
    prepare(corpus, tmp_path / "data", vocab=270, valid=0.25)
    assert (tmp_path / "data/train.bin").stat().st_mtime_ns == before
    with pytest.raises(InputError, match=r"valid is 0\.25, not 0\.5"):
        prepare(corpus, tmp_path / "data", vocab=270, valid=0.5)


def test_a_killed_preparation_goes_on_to_the_same_bytes(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_batched", lambda texts, size: ([text] for text in texts))
    whole = prepare(corpus, tmp_path / "whole", vocab=270, valid=0.25)

    def killed_at_the_sixth(texts, size):
        for index, text in enumerate(texts):
            if index == 5:
                raise KeyboardInterrupt
            yield [text]

    monkeypatch.setattr(module, "_batched", killed_at_the_sixth)
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "killed", vocab=270, valid=0.25)
    with (tmp_path / "killed/train.bin").open("ab") as file:  # written after the last count
        file.write(b"\x01\x02\x03")
    monkeypatch.setattr(module, "_batched", lambda texts, size: ([text] for text in texts))
    with pytest.raises(InputError, match=r"no data\.json"):
        open_data(tmp_path / "killed")
    resumed = prepare(corpus, tmp_path / "killed", vocab=270, valid=0.25)
    for part in ("train.bin", "valid.bin"):
        assert (tmp_path / "killed" / part).read_bytes() == (tmp_path / "whole" / part).read_bytes()
    assert resumed.identity() == whole.identity()


def test_long_documents_are_cut_at_blank_lines_and_nothing_is_lost(tmp_path):
    paragraphs = [f"{i} " * 400 for i in range(120)]
    (tmp_path / "long.txt").write_text("\n\n".join(paragraphs))
    pieces = list(documents(str(tmp_path / "long.txt")))
    assert len(pieces) > 1
    assert "".join(pieces) == "\n\n".join(paragraphs)
    assert all(len(p) <= module.PIECE for p in pieces)
    assert all(p.endswith("\n\n") for p in pieces[:-1])
    (tmp_path / "unbroken.txt").write_text("x" * (2 * module.PIECE + 7))
    assert [len(p) for p in documents(str(tmp_path / "unbroken.txt"))] == [module.PIECE, module.PIECE, 7]


def test_the_limit_stops_early(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_batched", lambda texts, size: ([text] for text in texts))
    prepared = prepare(corpus, tmp_path / "data", vocab=270, valid=0.25, limit=700)
    assert 700 <= len(prepared.train) < 3000
    assert prepared.document["documents"] == 4


def test_a_given_tokenizer_is_used(corpus, tmp_path):
    first = prepare(corpus, tmp_path / "a", vocab=270, valid=0.25)
    second = prepare(corpus, tmp_path / "b", tokenizer=first.tokenizer_folder, valid=0.25)
    assert np.array_equal(first.train, second.train)


def test_hub_data_is_streamed_by_name(tmp_path, monkeypatch):
    asked = []

    def load_dataset(repository, configuration, *, split, streaming):
        asked.append((repository, configuration, split, streaming))
        return ({"text": f"page {i} of the web. " * 20} for i in range(20))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    prepared = prepare("fineweb", tmp_path / "f", vocab=270, valid=0.2)
    assert prepared.document["documents"] == 20
    assert set(asked) == {("HuggingFaceFW/fineweb", "sample-100BT", "train", True)}
    asked.clear()
    assert len(list(documents("openwebtext"))) == len(list(documents("hub:me/mine:small"))) == 20
    assert [a[:2] for a in asked] == [("Skylion007/openwebtext", None), ("me/mine", "small")]
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(PerpendError, match=r"perpend\[train\]"):
        list(documents("openwebtext"))


@pytest.mark.parametrize(
    ("content", "name", "told"),
    [
        (b"\xff\xfe\x00", "bad.txt", "not UTF-8"),
        (b'{"text": 3}\n', "bad.jsonl", 'line 1: no string under the key "text"'),
        (b"{]\n", "bad.jsonl", "is not .jsonl"),
    ],
)
def test_damaged_text_is_named(tmp_path, content, name, told):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=told):
        list(documents(str(tmp_path / name)))


def test_what_cannot_be_prepared_is_refused_with_the_remedy(corpus, tmp_path):
    with pytest.raises(InputError, match="hub:OWNER/NAME"):
        prepare(tmp_path / "nothing", tmp_path / "a", vocab=270)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no text file"):
        prepare(tmp_path / "empty", tmp_path / "b", vocab=270)
    with pytest.raises(InputError, match="valid="):
        prepare(corpus, tmp_path / "c", vocab=270, valid=0.01)
    with pytest.raises(InputError, match="ask for a smaller one"):
        prepare(corpus, tmp_path / "d", vocab=4000, valid=0.25)
    with pytest.raises(InputError, match="between 0 and 1"):
        prepare(corpus, tmp_path / "e", valid=0)
    prepared = prepare(corpus, tmp_path / "f", vocab=270, valid=0.25)
    with (tmp_path / "f/train.bin").open("ab") as file:
        file.write(b"\x00\x00")
    with pytest.raises(InputError, match="delete the folder"):
        _ = open_data(prepared.folder).train


def test_batches_are_a_function_of_seed_and_step_and_each_epoch_reads_everything_once():
    stream = np.arange(1, 1 + 10 * 8 + 1, dtype=np.uint16)  # ten sequences of eight
    rows = np.concatenate([batch_at(stream, step, 4, 8, seed=3) for step in range(5)])
    assert rows.dtype == np.int64
    for epoch in (rows[:10], rows[10:]):
        assert sorted(row[0] for row in epoch) == [1 + 8 * i for i in range(10)]
    assert np.array_equal(rows[:, 1:-1], rows[:, :1] + np.arange(1, 8))
    assert np.array_equal(batch_at(stream, 2, 4, 8, seed=3), rows[8:12])
    assert not np.array_equal(batch_at(stream, 2, 4, 8, seed=4), rows[8:12])
    assert not np.array_equal(rows[:10], rows[10:])
    with pytest.raises(InputError, match="give more text"):
        batch_at(stream[:8], 0, 1, 8, seed=0)


def test_a_corrected_request_finds_nothing_in_its_way(corpus, tmp_path):
    """A vocabulary or a share that the text does not allow leaves no tokenizer that a later one would use."""
    with pytest.raises(InputError, match="with vocab="):
        prepare(corpus, tmp_path / "out", vocab=4000, valid=0.25)
    with pytest.raises(InputError, match="valid="):
        prepare(corpus, tmp_path / "out", vocab=270, valid=0.01)
    assert not begun(tmp_path / "out")
    data = prepare(corpus, tmp_path / "out", vocab=265, valid=0.25)
    assert data.vocab == 265
    assert data.document["valid"] == 0.25


def test_a_tokenizer_of_a_request_that_was_killed_is_used_by_that_request_only(corpus, tmp_path, monkeypatch):
    def killed(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("perpend.training.data._batched", killed)
    with pytest.raises(KeyboardInterrupt):
        prepare(corpus, tmp_path / "out", vocab=270, valid=0.25)
    monkeypatch.undo()
    with pytest.raises(InputError, match="byte-level BPE of 270"):
        prepare(corpus, tmp_path / "out", vocab=265, valid=0.25)
    assert prepare(corpus, tmp_path / "out", vocab=270, valid=0.25).vocab == 270


def test_what_was_tokenized_before_a_damaged_document_is_kept(corpus, tmp_path, monkeypatch):
    whole = prepare(corpus, tmp_path / "whole", vocab=270, valid=0.25)
    own = tmp_path / "own"
    shutil.copytree(corpus, own)
    (own / "z.jsonl").write_text('{"text": 3}\n')
    whole_batches = module._batched
    monkeypatch.setattr(module, "_batched", lambda texts, size: whole_batches(texts, 1000))
    given = whole.tokenizer_folder
    with pytest.raises(InputError, match="line 1"):
        prepare(own, tmp_path / "out", tokenizer=given, valid=0.25)
    assert begun(tmp_path / "out")
    (own / "z.jsonl").unlink()
    again = prepare(own, tmp_path / "out", tokenizer=given, valid=0.25)
    assert np.array_equal(again.train, whole.train)
    assert np.array_equal(again.valid, whole.valid)


@pytest.mark.parametrize("name", ["data.json", "partial.json"])
def test_damaged_records_are_named(corpus, tmp_path, name):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text('{"version"')
    with pytest.raises(InputError, match=f"{name} is damaged; delete"):
        prepare(corpus, tmp_path / "out", vocab=270, valid=0.25)


@pytest.mark.parametrize("valid", [0.9, 1e-300, 5e-324, float("nan"), float("inf")])
def test_shares_that_are_none(corpus, tmp_path, valid):
    with pytest.raises(InputError, match="between 0 and 1/2"):
        prepare(corpus, tmp_path / "out", vocab=270, valid=valid)


def test_tokenizers_that_cannot_be_loaded_are_named(corpus, tmp_path, monkeypatch):
    with pytest.raises(InputError, match="no folder with a tokenizer"):
        prepare(corpus, tmp_path / "a", tokenizer=corpus, valid=0.25)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be loaded"):
        prepare(corpus, tmp_path / "b", tokenizer=tmp_path / "broken", valid=0.25)
    monkeypatch.setattr("perpend.models._source.hub_reachable", lambda: False)
    with pytest.raises(InputError, match="leave tokenizer= out"):
        prepare(corpus, tmp_path / "c", tokenizer="nobody/nothing", valid=0.25)


def test_a_text_of_nothing(tmp_path):
    (tmp_path / "blank.txt").write_text(" \n\n ")
    with pytest.raises(InputError, match="holds no text"):
        prepare(tmp_path / "blank.txt", tmp_path / "out", vocab=257)


def test_a_hub_that_fails_half_way_leaves_what_was_tokenized(tmp_path, monkeypatch):
    rows = [{"text": f"document {i} of the hub"} for i in range(12)]

    def load_dataset(name, configuration, **asked):
        def stream():
            for i, row in enumerate(rows):
                if i == 9 and failing:
                    raise ConnectionError("the hub has gone")
                yield row

        return stream()

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    whole_batches = module._batched
    monkeypatch.setattr(module, "_batched", lambda texts, size: whole_batches(texts, 40))
    failing = False
    whole = prepare("hub:me/mine", tmp_path / "whole", vocab=257, valid=0.25)
    failing = True
    with pytest.raises(PerpendError, match="cannot be read"):
        prepare("hub:me/mine", tmp_path / "out", tokenizer=whole.tokenizer_folder, valid=0.25)
    assert begun(tmp_path / "out")
    failing = False
    again = prepare("hub:me/mine", tmp_path / "out", tokenizer=whole.tokenizer_folder, valid=0.25)
    assert np.array_equal(again.train, whole.train)
