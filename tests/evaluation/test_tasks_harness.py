"""Local files give the harness' own requests and scores, item by item, on every task."""

from __future__ import annotations

from dataclasses import replace

import pytest
from task_records import RECORDS

import perpend
from perpend.evaluation import tasks
from perpend.evaluation.scoring import Encoder, context_length, loglikelihoods
from perpend.evaluation.suite import contexts
from perpend.evaluation.tasks._files import read

OFFICIAL = {"boolq": "super_glue/boolq/default.yaml", "winogrande": "winogrande/default.yaml"}
OFFICIAL |= {"arc_easy": "arc/arc_easy.yaml", "arc_challenge": "arc/arc_challenge.yaml"}
OFFICIAL |= {"lambada_openai": "lambada/lambada_openai.yaml"}
OFFICIAL |= {name: f"{name}/{name}.yaml" for name in ("gsm8k", "hellaswag", "openbookqa", "piqa")}


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
