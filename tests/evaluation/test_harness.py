"""The harness on a model in memory: the same numbers as the local tasks, and every kind of metric."""

from __future__ import annotations

import json
import math

import pytest

import perpend
from perpend.errors import InputError
from perpend.evaluation.harness import harness_scores
from perpend.evaluation.paired import compare
from perpend.evaluation.result import Evaluation

pytest.importorskip("lm_eval")


@pytest.fixture(scope="session")
def own(tmp_path_factory):
    """Task files on local data: the published PIQA, the same with a correlation, a corpus perplexity."""
    import lm_eval.tasks

    folder = tmp_path_factory.mktemp("own")
    records = [
        {"goal": f"make {i}", "sol1": f"cut {i} wood", "sol2": f"dig a {i}", "label": i % 2} for i in range(6)
    ]
    data = folder / "piqa_validation.jsonl"
    data.write_text("\n".join(map(json.dumps, records)))
    where = f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    validation: {data}\n"
    splits = "training_split: null\nvalidation_split: validation\ntest_split: null\n"
    piqa = f"include: {lm_eval.tasks.__path__[0]}/piqa/piqa.yaml\n{where}{splits}"
    (folder / "one.yaml").write_text(f"task: my_piqa\n{piqa}")
    (folder / "two.yaml").write_text(f"task: my_mcc\n{piqa}metric_list:\n  - metric: mcc\n")
    (folder / "three.yaml").write_text(
        f"task: my_rolling\n{where}{splits}output_type: loglikelihood_rolling\ndoc_to_text: ''\n"
        "doc_to_target: '{{goal}} {{sol1}}'\nmetric_list:\n  - metric: word_perplexity\n"
    )
    return folder


def test_the_same_numbers_as_the_local_task(own, model, tokenizer):
    local = perpend.evaluate(model, tokenizer, "piqa", data=own)["piqa"]
    theirs = harness_scores(model, tokenizer, ["my_piqa"], include=[own], batch=4)[0]
    assert theirs.items["acc"] == local.items["acc"]
    assert theirs.items["acc_norm"] == local.items["acc_norm"]
    assert theirs.items["gold_ll"] == pytest.approx(local.items["gold_ll"], abs=1e-3)
    assert (theirs.metric, theirs.chance) == (local.metric, local.chance)
    assert theirs.settings["version"] == local.settings["version"]
    assert theirs.settings["fewshot"] == 0
    assert "lm-eval" in theirs.settings["source"]


def test_limit_and_shots_reach_the_harness(own, model, tokenizer):
    scores = harness_scores(model, tokenizer, ["my_piqa"], include=[own], limit=3, fewshot=1)[0]
    assert len(scores) == 3
    assert scores.settings["fewshot"] == 1


def test_metrics_that_are_no_mean_over_items(own, model, tokenizer):
    scores = harness_scores(model, tokenizer, ["my_mcc", "my_rolling"], include=[own])
    rows = {row["metric"]: row for one in scores for row in one.rows()}
    assert -1 <= rows["mcc"]["value"] <= 1
    assert rows["word_perplexity"]["value"] > 1
    assert math.isnan(rows["mcc"]["low"])
    evaluation = Evaluation(tuple(scores), {})
    assert evaluation.floor == []
    assert evaluation.results["my_mcc"]["scores"]["mcc"]["low"] is None
    # a comparison falls back on what has items
    assert set(compare(evaluation, evaluation).table["quantity"]) == {"gold log-likelihood"}


def test_standard_names_are_found_without_the_full_index():
    from perpend.evaluation.harness import index

    known = index()
    for name in ("glue", "mmlu", "coqa", "drop", "truthfulqa_mc1", "truthfulqa_mc2", "gsm8k", "hellaswag"):
        assert known[name], name


def test_an_unknown_name_gets_near_ones(model, tokenizer):
    with pytest.raises(InputError, match="mmlu"):
        perpend.evaluate(model, tokenizer, "mmmlu")


def test_without_the_extra_the_remedy_is_named(model, tokenizer, monkeypatch, tmp_path):
    from perpend.evaluation import harness

    monkeypatch.setattr(harness, "available", lambda: False)
    with pytest.raises(InputError, match=r"data=FOLDER.*piqa_validation.*perpend\[eval\]"):
        perpend.evaluate(model, tokenizer, "piqa")
    with pytest.raises(InputError, match="no file for it"):
        perpend.evaluate(model, tokenizer, "piqa", data=tmp_path)
    with pytest.raises(InputError, match=r"perpend\[eval\]"):
        perpend.evaluate(model, tokenizer, "mmlu")


def test_a_hub_out_of_reach_is_named(model, tokenizer, monkeypatch):
    import lm_eval

    def broken(*args, **kwargs):
        raise ConnectionError("no route")

    monkeypatch.setattr(lm_eval, "simple_evaluate", broken)
    with pytest.raises(InputError, match="could not be reached"):
        perpend.evaluate(model, tokenizer, "piqa")
