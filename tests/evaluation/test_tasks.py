"""Tasks from local files: what is read, what a result carries, and mistakes by name."""

from __future__ import annotations

import json
import math

import pytest
from task_records import RECORDS, write

import perpend
from perpend.errors import InputError
from perpend.evaluation import tasks
from perpend.evaluation.tasks._files import read


def test_flat_records_are_the_same_items(data, tmp_path):
    """The two layouts: the data set's own, and flat with the prompt around the question."""
    for name in ("arc_easy", "openbookqa"):
        flat = []
        for record in RECORDS[name]:
            question = record.get("question", record.get("question_stem"))
            gold = record["choices"]["label"].index(record["answerKey"].strip())
            flat.append(
                {
                    "query": f"Question: {question}\nAnswer:",
                    "choices": record["choices"]["text"],
                    "gold": gold,
                }
            )
        (tmp_path / f"{name}_test.jsonl").write_text("\n".join(map(json.dumps, flat)))
        assert read(tmp_path, tasks.task(name)).documents == read(data, tasks.task(name)).documents
    split = [{"query": " ".join(r["text"].split(" ")[:-1]), "choices": [r["text"].split(" ")[-1]]}
             for r in RECORDS["lambada_openai"]]  # fmt: skip
    (tmp_path / "lambada_test.jsonl").write_text("\n".join(map(json.dumps, split)))
    task = tasks.task("lambada_openai")
    assert read(tmp_path, task).documents == read(data, task).documents


def test_the_files_that_are_there_can_be_read(shared):
    folder = shared / "data" / "eval"
    for name in tasks.names():
        task = tasks.task(name)
        documents = read(folder, task, limit=50).documents
        assert len(documents) == 50
        for document in documents:
            assert 0 <= document.gold < max(len(document.contexts), len(document.answers))
            assert all(document.answers)
    golds = [one.gold for one in read(folder, tasks.task("piqa"), limit=50).documents]
    assert set(golds) == {0, 1}


def test_limit_takes_the_first_items(data, model, tokenizer):
    whole = perpend.evaluate(model, tokenizer, "piqa", data=data)["piqa"]
    first = perpend.evaluate(model, tokenizer, "piqa", data=data, limit=2)["piqa"]
    assert first.items["prediction"] == whole.items["prediction"][:2]
    assert first.items["gold_ll"] == pytest.approx(whole.items["gold_ll"][:2], abs=1e-5)


def test_every_result_carries_what_repeats_it(data, model, tokenizer):
    evaluation = perpend.evaluate(model, tokenizer, "piqa,lambada", data=data)
    assert [task.task for task in evaluation.tasks] == ["piqa", "lambada_openai"]
    for entry in evaluation.results.values():
        assert {"version", "fewshot", "context", "bos", "split", "source", "sha256"} <= set(entry["settings"])
        assert all(score["n"] == 3 for score in entry["scores"].values())
        assert "nan" not in json.dumps(entry).lower().replace('nan"', "")
    assert set(evaluation.table.columns) >= {
        "task",
        "metric",
        "value",
        "low",
        "high",
        "n",
        "version",
        "fewshot",
    }
    assert len(evaluation.items) == 6
    perplexity = next(r for r in evaluation["lambada_openai"].rows() if r["metric"] == "perplexity")
    assert perplexity["low"] < perplexity["value"] < perplexity["high"]


def test_batch_size_changes_nothing(data, model, tokenizer):
    one = perpend.evaluate(model, tokenizer, "arc_easy,boolq,lambada", data=data, batch=1).items
    many = perpend.evaluate(model, tokenizer, "arc_easy,boolq,lambada", data=data, batch=16).items
    assert one["gold_ll"].to_numpy() == pytest.approx(many["gold_ll"].to_numpy(), abs=1e-4)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (dict(tasks="piqua"), "piqa"),
        (dict(tasks=""), "no task named"),
        (dict(tasks="piqa", limit=0), "limit"),
        (dict(tasks="niah_singel_1"), "niah_single_1"),
        (dict(tasks="piqa", bos="maybe"), "bos"),
        (dict(tasks="piqa", data="/nowhere"), "not a folder"),
    ],
)
def test_mistakes_are_named(asked, told, data, model, tokenizer):
    with pytest.raises(InputError, match=told):
        perpend.evaluate(model, tokenizer, **{"data": data, **asked})


def test_broken_files_are_named(tmp_path, model, tokenizer):
    (tmp_path / "piqa_validation.jsonl").write_text('{"goal": "x", "sol1": "a", "label": 0}\n')
    with pytest.raises(InputError, match=r"line 1.*sol2.*goal"):
        perpend.evaluate(model, tokenizer, "piqa", data=tmp_path)
    (tmp_path / "piqa_validation.jsonl").write_text("{")
    with pytest.raises(InputError, match="not JSON"):
        perpend.evaluate(model, tokenizer, "piqa", data=tmp_path)
    (tmp_path / "piqa_validation_2.jsonl").write_text("{")
    with pytest.raises(InputError, match="keep one"):
        perpend.evaluate(model, tokenizer, "piqa", data=tmp_path)


def test_worked_examples_need_their_split(tmp_path, model, tokenizer):
    write(tmp_path, "piqa")
    with pytest.raises(InputError, match="piqa_train"):
        perpend.evaluate(model, tokenizer, "piqa", data=tmp_path, fewshot=2)


def test_bos_is_recorded_and_settable(data, model, tokenizer):
    auto = perpend.evaluate(model, tokenizer, "piqa", data=data)
    always = perpend.evaluate(model, tokenizer, "piqa", data=data, bos="always")
    assert (auto.settings["bos"], always.settings["bos"]) == (False, True)
    assert auto["piqa"].items["gold_ll"] != always["piqa"].items["gold_ll"]


def test_chance_and_floor(data, model, tokenizer):
    arc = perpend.evaluate(model, tokenizer, "arc_easy", data=data)
    assert arc["arc_easy"].chance == pytest.approx((1 / 3 + 1 / 4 + 1 / 5) / 3)
    assert arc.floor == ["arc_easy"]  # three items cannot be above chance
    assert math.isfinite(arc["arc_easy"].rows()[0]["low"])


def test_training_mode_is_put_back(data, model, tokenizer):
    model.train()
    try:
        perpend.evaluate(model, tokenizer, "piqa", data=data)
        assert model.training
    finally:
        model.eval()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ([1, 2], "JSON object"),
        (None, "JSON object"),
        ({"label": 9}, "0 to 1"),
        ({"label": -1}, "validation split"),  # what published test splits have in place of an answer
        ({"label": "x"}, "cannot use"),
        ({"sol1": None}, "needs texts"),
        ({"sol2": 5}, "needs texts"),
        ({"goal": "half \ud800"}, "needs texts"),
    ],
)
def test_a_record_that_is_none_is_refused_by_its_line(tmp_path, change, said):
    record = {"goal": "a", "sol1": "b", "sol2": "c", "label": 0}
    bad = {**record, **change} if isinstance(change, dict) else change
    (tmp_path / "piqa.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(bad)}\n")
    with pytest.raises(InputError, match=f"piqa.jsonl, line 2: .*{said}"):
        read(tmp_path, tasks.task("piqa"))


def test_a_byte_order_mark_is_skipped_and_other_encodings_are_named(tmp_path):
    record = json.dumps({"goal": "é", "sol1": "b", "sol2": "c", "label": 1}, ensure_ascii=False)
    (tmp_path / "piqa.jsonl").write_bytes(record.encode("utf-8-sig"))
    (document,) = read(tmp_path, tasks.task("piqa")).documents
    assert document.contexts == ("Question: é\nAnswer:",)
    (tmp_path / "piqa.jsonl").write_bytes(record.encode("latin-1"))
    with pytest.raises(InputError, match="not UTF-8"):
        read(tmp_path, tasks.task("piqa"))


@pytest.mark.parametrize(
    "wrong",
    [{"limit": 0}, {"fewshot": -1}, {"context": 0}, {"context": -5}, {"lengths": ()}, {"lengths": (0,)}],
)
def test_numbers_out_of_range_are_refused_by_name(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        perpend.evaluate(None, None, "vt", **wrong)
