"""Local files give the harness' own requests and scores, item by item, on every task."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

import perpend
from perpend.errors import InputError
from perpend.evaluation import tasks
from perpend.evaluation.scoring import Encoder, context_length, loglikelihoods
from perpend.evaluation.suite import contexts
from perpend.evaluation.tasks._files import read

RECORDS = {
    "arc_easy": [
        {
            "question": "Which part of a plant takes up water?",
            "choices": {"text": ["the leaf", "the root", "the flower"], "label": ["A", "B", "C"]},
            "answerKey": "B",
        },
        {
            "question": "What do cats drink — as a rule?",
            "choices": {"text": ["milk", "stones", "Äther", "fog"], "label": ["1", "2", "3", "4"]},
            "answerKey": "1",
        },
        {
            "question": "Ice melts when it is",
            "choices": {"text": ["cold.", "warm.", "blue.", "old.", "sold."], "label": list("ABCDE")},
            "answerKey": "B",
        },
    ],
    "openbookqa": [
        {
            "question_stem": "Predators eat",
            "choices": {"text": ["lions", "humans", "bunnies", "grass"], "label": list("ABCD")},
            "answerKey": "C",
        },
        {
            "question_stem": "A fog is likely around:",
            "choices": {"text": ["a marsh", "a tundra", "the plains", "a desert"], "label": list("ABCD")},
            "answerKey": " A",
        },
    ],
    "piqa": [
        {"goal": "dresser", "sol1": "replace it with bobby pin ", "sol2": "finish with  pins ", "label": 1},
        {"goal": "How do I boil water?", "sol1": "Heat it.", "sol2": "Cool it well.", "label": 0},
        {"goal": "Make a pillow.", "sol1": "Blow into a tin can.", "sol2": "Blow into a bag.", "label": 1},
    ],
    "boolq": [
        {"passage": "Barq's -- Barq's is a drink.", "question": "is barqs a drink", "label": 1},
        {"passage": "All biomass goes through steps.", "question": "does it skip steps", "label": 0},
        {"passage": "Ö is a letter.", "question": "is ö a letter", "label": 1},
    ],
    "hellaswag": [
        {
            "activity_label": "Roof removal",
            "ctx_a": "A man is on a roof.",
            "ctx_b": "he",
            "endings": ["wraps a pair of skis.", "rips [substeps] tiles off.", "holds a  cube.", "sings."],
            "label": "3",
        },
        {
            "activity_label": "Baking",
            "ctx_a": "[header] How to bake [title] Mix the flour.",
            "ctx_b": "",
            "endings": ["Wait. [step] Then wait.", "Run.", "Add eggs.", "Sleep."],
            "label": "2",
        },
        {
            "activity_label": "Rowing",
            "ctx_a": "Two women sit in a boat.",
            "ctx_b": "they row",
            "endings": ["to the shore.", "a cake.", "upwards.", "and row."],
            "label": 0,
        },
    ],
    "winogrande": [
        {"sentence": "Sue beat Ann; _ got easy ones.", "option1": "Sue", "option2": "Ann", "answer": "2"},
        {"sentence": "A cup fell off a desk. A _ broke.", "option1": "cup", "option2": "desk", "answer": "1"},
        {"sentence": "_ paid Ann, for Eve had no coin.", "option1": "Ann", "option2": "Eve", "answer": "1"},
    ],
    "lambada_openai": [
        {"text": "He looked at the sea and saw a long grey ship"},
        {"text": "\"Only one source,\" he said,\n\"and I do not trust the source"},
        {"text": "It was cold. She closed the window and lit the lamp"},
    ],
    "gsm8k": [
        {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "3+4=<<3+4=7>>7\n#### 7"},
        {"question": "A robe takes 2 bolts and half as many. Total?", "answer": "2+1=3\n#### 1,003"},
        {"question": "Eggs cost $2 each. Six cost?", "answer": "6*2=12\n#### 12"},
    ],
}  # fmt: skip
RECORDS["arc_challenge"] = RECORDS["arc_easy"][::-1]
OFFICIAL = {"boolq": "super_glue/boolq/default.yaml", "winogrande": "winogrande/default.yaml"}
OFFICIAL |= {"arc_easy": "arc/arc_easy.yaml", "arc_challenge": "arc/arc_challenge.yaml"}
OFFICIAL |= {"lambada_openai": "lambada/lambada_openai.yaml"}
OFFICIAL |= {name: f"{name}/{name}.yaml" for name in ("gsm8k", "hellaswag", "openbookqa", "piqa")}


def write(folder, name, split=None):
    task = tasks.task(name)
    path = folder / f"{task.files[0]}_{split or task.split}.jsonl"
    path.write_text(
        "".join(json.dumps(one, ensure_ascii=False) + "\n" for one in RECORDS[name]), encoding="utf-8"
    )
    return path


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    for name in RECORDS:
        write(folder, name)
        write(folder, name, "train")
    return folder


@pytest.fixture(scope="session")
def official(data, tmp_path_factory):
    """The harness' own task files with nothing changed but where the data lie."""
    pytest.importorskip("lm_eval")
    import lm_eval.tasks as folder_of
    from lm_eval.tasks import TaskManager

    folder = tmp_path_factory.mktemp("official")
    own = folder_of.__path__[0]
    for name, relative in OFFICIAL.items():
        task = tasks.task(name)
        splits = dict.fromkeys(["train", task.split])
        files = "\n".join(f"    {one}: {data / f'{task.files[0]}_{one}.jsonl'}" for one in splits)
        # `include` brings prompt, delimiter, functions, metrics and filters of the published definition
        (folder / f"{name}.yaml").write_text(
            f"include: {own}/{relative}\ntask: own_{name}\ndataset_path: json\ndataset_name: null\n"
            f"dataset_kwargs:\n  data_files:\n{files}\n"
            f"training_split: {'train' if task.shots == 'train' else 'null'}\n"
            f"validation_split: {'validation' if task.split == 'validation' else 'null'}\n"
            f"test_split: {'test' if task.split == 'test' else 'null'}\n"
            "should_decontaminate: false\n"
        )
    return TaskManager(include_path=str(folder), include_defaults=False)


STEPS = 12  # enough to compare what is written; the budget itself is compared below


@pytest.fixture(scope="session", params=[0, 2], ids=["0-shot", "2-shot"])
def scored(request, official, data, model, tokenizer):
    """(shots, the harness' output, ours) for all tasks at once."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM

    shots = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HFLM, "max_gen_toks", STEPS)
        found = tasks.task

        def shorter(name):
            task = found(name)
            return (
                replace(task, generation=replace(task.generation, steps=STEPS)) if task.generation else task
            )

        patch.setattr(tasks, "task", shorter)
        lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=8, backend="causal", device="cpu")
        output = simple_evaluate(
            lm,
            tasks=[f"own_{name}" for name in RECORDS],
            num_fewshot=shots,
            task_manager=official,
            bootstrap_iters=0,
            log_samples=True,
        )
        return shots, output, perpend.evaluate(model, tokenizer, list(RECORDS), data=data, fewshot=shots)


@pytest.mark.parametrize("name", sorted(RECORDS))
def test_requests_and_scores_equal_the_harness_own(name, scored, data):
    shots, output, evaluation = scored
    task = tasks.task(name)
    mine = evaluation[name]
    documents = read(data, task)
    pool = read(data, task, task.shots)
    before = contexts(task, documents.documents, pool, shots)
    samples = output["samples"][f"own_{name}"]
    # the text that reaches the model
    for index, (document, prompt) in enumerate(zip(documents.documents, before)):
        theirs = next(one for one in samples if one["doc_id"] == index)["arguments"]
        if task.kind == "generate":
            assert theirs[0][0] == task.requests(document, prompt)[0][0]
            assert tuple(theirs[0][1]["until"]) == task.generation.until
        else:
            assert [tuple(one) for one in theirs] == task.requests(document, prompt)
    # every metric, item by item
    compared = 0
    for sample in samples:
        index = sample["doc_id"]
        if task.kind == "generate":
            column = "exact_match_" + sample["filter"].split("-")[0]
            assert mine.items[column][index] == sample["exact_match"]
            assert mine.items["prediction"][index] == sample["resps"][0][0]
            compared += 1
            continue
        for metric in ("acc", "acc_norm"):
            if metric in sample:
                assert mine.items[metric][index] == float(sample[metric]), (metric, index)
                compared += 1
        gold = documents.documents[index].gold if task.kind == "choice" else 0
        ll, greedy = sample["filtered_resps"][gold]
        assert mine.items["gold_ll"][index] == pytest.approx(float(ll), abs=1e-3)
        if name == "lambada_openai":
            assert mine.items["acc"][index] == float(greedy == "True" or greedy is True)
    assert compared or name == "lambada_openai"
    # the aggregated numbers, and that the version named is the version compared with
    table = mine.rows()
    results = output["results"][f"own_{name}"]
    for row in table:
        for key in (f"{row['metric']},none", f"exact_match,{row['metric'].split('_')[-1]}-match",
                    f"exact_match,{row['metric'].split('_')[-1]}-extract"):  # fmt: skip
            if key in results:
                assert row["value"] == pytest.approx(results[key], rel=1e-3), key
    assert float(task.version) == float(output["versions"][f"own_{name}"])


def test_defaults_are_the_harness_own(official, model, tokenizer):
    from lm_eval.models.huggingface import HFLM

    for name in RECORDS:
        loaded = official.load([f"own_{name}"])["tasks"][f"own_{name}"]
        assert (loaded.config.num_fewshot or 0) == tasks.task(name).fewshot
    lm = HFLM(pretrained=model, tokenizer=tokenizer, backend="causal", device="cpu")
    assert tasks.task("gsm8k").generation.steps == lm.max_gen_toks
    assert context_length(model, tokenizer) == lm.max_length


ANSWERS = [
    "3+4=7\n#### 7",
    "#### 7.",
    "the answer is 7",
    "#### $7\n#### 8",
    "So 1,003 in all\n#### 1,003",
    "costs $1003.00",
    "#### -7",
    "nothing",
    "",
    "... 12 ... 7",
    "#### 7 apples and 3",
    "$ , .",
    "x#### 12\nQ",
]


@pytest.mark.parametrize("answer", ANSWERS)
def test_extraction_equals_the_harness_own(answer, official, data):
    """Filters and exact match of the published definition on texts a model might write."""
    from lm_eval.api.instance import Instance

    loaded = official.load(["own_gsm8k"])["tasks"]["own_gsm8k"]
    records = list(loaded.test_docs())
    documents = read(data, tasks.task("gsm8k")).documents
    for index, record in enumerate(records):
        instance = Instance("generate_until", record, ("", {}), 0, resps=[answer])
        loaded._instances = [instance]
        loaded.apply_filters()
        mine = tasks.task("gsm8k").generation.score(answer, documents[index])
        for rule, column in (("strict-match", "strict"), ("flexible-extract", "flexible")):
            theirs = loaded.process_results(record, [instance.filtered_resps[rule]])["exact_match"]
            assert mine[f"exact_match_{column}"] == float(theirs)


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


def test_what_is_too_long_loses_its_beginning(model, tokenizer):
    encoder = Encoder(tokenizer)
    text = "the quick brown fox " * 30
    short = loglikelihoods(model, encoder, [(text, " jumps")], context=20)[0][0]
    head, tail = encoder.pair(text, " jumps")
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([(head + tail)[-21:][:-1]])).logits[0], -1)
    want = sum(float(logs[len(logs) - len(tail) + i, token]) for i, token in enumerate(tail))
    assert short == pytest.approx(want, abs=1e-4)


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


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_next", "bloom"])
def test_a_shared_context_gives_the_same_answers(family, monkeypatch):
    from perpend.evaluation import scoring
    from tiny import VOCAB, tiny

    class Letters:
        """Characters as tokens, for the tiny models' vocabulary."""

        bos_token = bos_token_id = None
        eos_token_id = 2

        def encode(self, text, add_special_tokens=True):
            return [3 + ord(one) % (VOCAB - 4) for one in text]

    requests = [
        (f"a rather long question number {i} ", tail) for i in range(3) for tail in ("yes", "no, never", "?")
    ]
    encoder = Encoder(Letters())
    plain = loglikelihoods(tiny(family), encoder, requests, share=False, context=200)
    used = []
    real = scoring._after
    monkeypatch.setattr(scoring, "SAVED", 32)
    monkeypatch.setattr(scoring, "_after", lambda *given: used.append(given[1]) or real(*given))
    shared = loglikelihoods(tiny(family), encoder, requests, share=True, context=200)
    assert len(used) == (1 if family == "qwen3_next" else 3)  # linear attention's state cannot be repeated
    assert [ll for ll, _ in shared] == pytest.approx([ll for ll, _ in plain], abs=1e-4)
    assert [greedy for _, greedy in shared] == [greedy for _, greedy in plain]


def test_sharing_ends_where_it_would_change_an_answer(model, tokenizer, monkeypatch):
    """A cache that forgets is caught by the first context, which is scored both ways."""
    from perpend.evaluation import scoring

    real = scoring.halves

    def forgetful(own):
        parts = real(own)
        return replace(parts, after=lambda prefix, rows: parts.trunk(rows))

    requests = [
        ("the quick brown fox jumps over the lazy dog, and " * 3, tail) for tail in ("sits", "runs off")
    ]
    plain = loglikelihoods(model, Encoder(tokenizer), requests, share=False)
    monkeypatch.setattr(scoring, "SAVED", 32)
    used = []
    real_after = scoring._after
    monkeypatch.setattr(scoring, "_after", lambda *given: used.append(1) or real_after(*given))
    monkeypatch.setattr(scoring, "halves", forgetful)
    assert loglikelihoods(model, Encoder(tokenizer), requests, share=True) == plain
    assert used == [1]


@pytest.fixture(scope="session")
def opening(tokenizer):
    """The tokenizer, with a BOS before every text, as Llama's."""
    import copy

    from tokenizers.processors import TemplateProcessing

    own = copy.deepcopy(tokenizer)
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", own.bos_token_id)]
    )
    assert own.encode("a")[0] == own.bos_token_id
    return own


PAIRS = [
    ("Question: why?\nAnswer:", " because"),
    ("trailing blanks   ", "move"),
    ("<s>a spelled-out BOS", " is not doubled"),
    ("x", "y"),
    ("", "no context"),
]


@pytest.mark.parametrize("policy", ["auto", "always", "never"])
@pytest.mark.parametrize("adds", [False, True])
def test_tokens_equal_the_harness_own_with_and_without_bos(adds, policy, model, tokenizer, opening):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    own = opening if adds else tokenizer
    setting = {"auto": None, "always": True, "never": False}[policy]
    if policy == "always" and not adds:
        setting = None  # the harness cannot add a BOS that the tokenizer does not add by itself
    lm = HFLM(pretrained=model, tokenizer=own, backend="causal", device="cpu", add_bos_token=setting)
    encoder = Encoder(own, policy)
    for context, continuation in PAIRS:
        mine = encoder.pair(context, continuation)
        assert mine[1]
        if context and not (policy == "always" and not adds):
            assert mine == lm._encode_pair(context, continuation), (context, continuation)
        if policy == "always" and context:
            assert mine[0][:1] == [own.bos_token_id]
            assert mine[0][1:2] != [own.bos_token_id]
    if policy == "auto":
        asked = [Instance("loglikelihood", {}, pair, 0) for pair in PAIRS]
        theirs = lm.loglikelihood(asked, disable_tqdm=True)
        for (ll, greedy), (want, wanted) in zip(loglikelihoods(model, encoder, PAIRS), theirs):
            assert ll == pytest.approx(want, abs=1e-3)
            assert greedy == wanted


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
