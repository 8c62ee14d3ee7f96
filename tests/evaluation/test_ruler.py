"""The thirteen tasks: prompts that fit, needles that are there, right answers, scores as published."""

from __future__ import annotations

import json
import re
from collections import Counter

import pytest

import perpend
from perpend.errors import InputError
from perpend.evaluation import ruler
from perpend.evaluation.ruler._run import generate, match
from perpend.evaluation.scoring import Encoder

THIRTEEN = {
    *(f"niah_single_{i}" for i in (1, 2, 3)),
    *(f"niah_multikey_{i}" for i in (1, 2, 3)),
    *("niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2"),
}
STEPS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}


@pytest.fixture(scope="session")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    (folder / "essays.txt").write_text(
        " ".join(
            f"This is sentence {i} of an essay. Does it matter? It does, said no. {i}!" for i in range(150)
        )
    )
    squad = {
        "data": [
            {
                "paragraphs": [
                    {
                        "context": f"Passage {a}.{p} tells that the colour of {a}{p} is hue{a}{p}.",
                        "qas": [
                            {
                                "question": f"What is the colour of {a}{p}?",
                                "answers": [{"text": f"hue{a}{p}"}, {"text": f"the hue{a}{p}"}],
                                "is_impossible": False,
                            },
                            {"question": "Unknown?", "answers": [], "is_impossible": True},
                        ],
                    }
                    for p in range(3)
                ]
            }
            for a in range(30)
        ]
    }
    (folder / "squad.json").write_text(json.dumps(squad))
    hotpot = [
        {
            "question": f"Who lives in town {i}?",
            "answer": f"Person{i}",
            "context": [
                [f"Town {i}.{j}", [f"Person{i} lives here. ", f"It rains ({i}{j})."]] for j in range(3)
            ],
        }
        for i in range(40)
    ]
    (folder / "hotpot.json").write_text(json.dumps(hotpot))
    return {
        "essays": folder / "essays.txt",
        "squad": folder / "squad.json",
        "hotpotqa": folder / "hotpot.json",
    }


@pytest.fixture(scope="session")
def encoder(tokenizer):
    return Encoder(tokenizer)


LENGTH = 2048


@pytest.fixture(scope="session")
def made(encoder, files):
    return {name: generate(name, encoder, LENGTH, count=3, files=files) for name in THIRTEEN}


def test_there_are_thirteen():
    assert set(ruler.names()) == THIRTEEN
    with pytest.raises(InputError, match="niah_single_1"):
        ruler.task("niah_single1")


@pytest.mark.parametrize("name", sorted(THIRTEEN))
def test_samples_fill_the_length_and_no_more(name, made, encoder):
    data, task = made[name], ruler.task(name)
    assert task.steps == STEPS[name.split("_")[0]]
    assert task.match == ("part" if name.startswith("qa") else "all")
    for sample, tokens in zip(data.samples, data.tokens):
        assert tokens == len(encoder(sample.prompt)) <= LENGTH - task.steps
    if name not in ("qa_1", "qa_2"):  # those end where the passages do
        assert data.tokens[0] > 0.9 * (LENGTH - task.steps)
    assert len({one.prompt for one in data.samples}) == 3


@pytest.mark.parametrize("name", sorted(one for one in THIRTEEN if one.startswith("niah")))
def test_each_needle_is_in_the_haystack_once(name, made):
    multiple = {"niah_multivalue": 4, "niah_multiquery": 4}.get(name, 1)
    for sample in made[name].samples:
        context, question = sample.prompt.split("\nWhat ")
        assert len(sample.outputs) == multiple
        for value in sample.outputs:
            assert context.count(f" is: {value}.") == 1
            needle = re.search(rf"One of the special magic (\w+) for (\S+) is: {value}\.", context)
            assert needle[2] in question
            kind = "uuids" if len(value) == 36 else "numbers"
            assert needle[1] == kind
            assert kind == "uuids" or re.fullmatch(r"[1-9]\d{6}", value)
        keys = re.findall(r"One of the special magic \w+ for (\S+) is: ", context)
        if name.startswith("niah_multikey"):
            assert len(set(keys)) >= 4
        single = multiple == 1
        assert sample.prompt.startswith("A special magic" if single else "Some special magic")
        assert sample.prompt.endswith("mentioned in the provided text " + ("is" if single else "are"))
        assert all(one in sample.gold for one in sample.outputs)


def test_the_chain_is_the_answer(made):
    for sample in made["vt"].samples:
        text = sample.prompt[sample.prompt.rindex("Memorize and track") :]
        value = re.search(r"assigned the value (\d+) in the text", text)[1]
        held = {m[1]: m[2] for m in re.finditer(r"VAR ([A-Z]{5}) = (VAR [A-Z]{5}|\d+)", text)}
        right = {name for name, what in held.items() if what == value}
        while True:
            more = {name for name, what in held.items() if what.removeprefix("VAR ") in right} - right
            if not more:
                break
            right |= more
        assert right == set(sample.outputs)
        assert len(right) == 5
        # the worked example is there, solved, with other names
        example = sample.prompt[: sample.prompt.rindex("Memorize and track")]
        assert example.count("VAR") == 9
        assert not right & set(re.findall(r"[A-Z]{5}", example))


@pytest.mark.parametrize("length", [2048, 8192])
def test_common_words_are_the_common_ones(length, encoder):
    for sample in generate("cwe", encoder, length, count=2).samples:
        text = sample.prompt[sample.prompt.rindex("Below is a numbered") :]
        counts = Counter(re.findall(r"\d+\. (\S+)", text[: text.index("\nQuestion")]))
        assert {word for word, _ in counts.most_common(10)} == set(sample.outputs)
        assert {counts[word] for word in sample.outputs} == {6 if length < 4096 else 30}
        assert {counts[word] for word in counts if word not in sample.outputs} == {1 if length < 4096 else 3}


def test_frequent_words_are_the_frequent_ones(made):
    for sample in made["fwe"].samples:
        text = sample.prompt.split("coded words. ")[1].split("\nQuestion")[0]
        ranked = Counter(text.split()).most_common(5)
        assert ranked[0][0] == "..."
        assert [word for word, _ in ranked[1:4]] == list(sample.outputs)
        assert ranked[3][1] > ranked[4][1]


@pytest.mark.parametrize(("name", "mark"), [("qa_1", "colour"), ("qa_2", "Who lives")])
def test_the_passage_with_the_answer_is_there(name, mark, made):
    for sample in made[name].samples:
        context, question = sample.prompt.rsplit("Question: ", 1)
        assert mark in question
        assert any(one in context for one in sample.outputs)
        numbers = [int(n) for n in re.findall(r"^Document (\d+):$", context, re.M)]
        assert numbers == list(range(1, len(numbers) + 1))
        assert len(numbers) > 5


def test_generation_depends_on_seed_and_index_only(encoder, made, files):
    again = generate("niah_multikey_2", encoder, LENGTH, count=2, files=files)
    assert again.samples == made["niah_multikey_2"].samples[:2]
    assert again.sha256 != made["niah_multikey_2"].sha256
    assert generate("niah_multikey_2", encoder, LENGTH, count=3).sha256 == made["niah_multikey_2"].sha256
    assert (
        generate("niah_multikey_2", encoder, LENGTH, count=3, seed=1).sha256 != made["niah_multikey_2"].sha256
    )


def test_needles_move(encoder):
    """Depth is drawn anew for every sample."""
    places = []
    for sample in generate("niah_single_1", encoder, 1024, count=12).samples:
        lines = sample.prompt.split("\n")
        places.append(next(i for i, line in enumerate(lines) if line.startswith("One of the")) / len(lines))
    assert max(places) - min(places) > 0.4


@pytest.mark.parametrize(
    ("text", "outputs", "how", "value"),
    [
        ("1234567 and 7654321", ["1234567", "7654321"], "all", 1.0),
        ("only 1234567", ["1234567", "7654321"], "all", 0.5),
        ("nothing", ["1234567"], "all", 0.0),
        ("THE Normans", ["normans", "vikings"], "part", 1.0),
        ("franks", ["normans", "vikings"], "part", 0.0),
        ("\x00abc\x1f", ["abc"], "all", 1.0),
        ("", ["x"], "all", 0.0),
    ],
)
def test_string_match(text, outputs, how, value):
    assert match(text, outputs, how) == value


def test_string_match_equals_the_harness_own(monkeypatch):
    common = pytest.importorskip("lm_eval.tasks.ruler.common_utils")
    for text in ("One 12 two\t34", " 34\n", "", "\x0112", "12 34 56"):
        for outputs in (["12"], ["12", "34"], ["56", "12", "zz"]):
            predictions = common.postprocess_pred([text])
            assert match(text, outputs, "all") == common.string_match_all(predictions, [outputs])


def test_prompts_are_the_published_ones(made):
    """Template texts against the harness' port (its cwe lacks the worked example that the original has)."""
    pytest.importorskip("lm_eval")
    import ast
    from pathlib import Path

    import lm_eval.tasks

    folder = Path(lm_eval.tasks.__path__[0]) / "ruler"

    def constants(file):
        tree = ast.parse((folder / file).read_text())
        return [
            node.value
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        ]

    def pieces(file, beginning):
        template = next(one for one in constants(file) if one.startswith(beginning))
        return [part for part in re.split(r"\{\w+\}", template) if part.strip()]

    for name, file, beginnings in (
        ("vt", "vt_utils.py", ("Memorize and track", " Answer: According")),
        ("cwe", "cwe_utils.py", ("Below is a numbered", " Answer: The top 10")),
        ("fwe", "fwe_utils.py", ("Read the following", " Answer: According")),
        ("qa_1", "qa_utils.py", ("Answer the question",)),
        ("niah_multivalue", "niah_utils.py", ("Some special magic",)),
    ):
        prompt = made[name].samples[0].prompt
        for beginning in beginnings:
            for piece in pieces(file, beginning):
                assert piece.rstrip() in prompt, (name, piece)


def test_a_model_that_reads_the_needle_scores_one(encoder, tokenizer, monkeypatch):
    """Scores come from what is written: a stand-in that writes the right answer, and one that does not."""
    from perpend.evaluation.ruler import _run

    data = generate("niah_multikey_2", encoder, 1024, count=4)
    right = {one.prompt: f" it is {one.outputs[0]}, I think" for one in data.samples}
    monkeypatch.setattr(
        _run, "loglikelihoods", lambda model, enc, requests, **_: [(-9.0, False)] * len(requests)
    )
    for writes, value in ((lambda p: right[p], 1.0), (lambda p: " nothing", 0.0)):
        monkeypatch.setattr(
            _run, "continuations", lambda m, e, prompts, w=writes, **_: [w(p) for p in prompts]
        )
        scores = _run.score(None, encoder, "niah_multikey_2", 1024, count=4, context=2048)
        assert scores.rows()[0]["value"] == value
        assert scores.label == "niah_multikey_2@1024"


def test_early_stops_change_no_score(model, tokenizer):
    """Against plain full-length generation of every sample."""
    from perpend.evaluation.generation import continuations

    encoder = Encoder(tokenizer)
    scores = perpend.evaluate(model, tokenizer, "fwe", lengths=(512,), limit=3)["fwe@512"]
    data = generate("fwe", encoder, 512, count=3)
    plain = continuations(model, encoder, [one.prompt for one in data.samples], steps=50, context=2048)
    assert scores.items["string_match"] == [match(t, s.outputs, "all") for t, s in zip(plain, data.samples)]
    assert scores.settings["sha256"] == data.sha256
    assert all(ll < 0 for ll in scores.items["gold_ll"])


def test_what_does_not_fit_is_refused_before_anything_is_scored(model, tokenizer, monkeypatch):
    from perpend.evaluation.ruler import _run

    def scored(*args, **kwargs):
        raise AssertionError("a task was scored before the other one was refused")

    monkeypatch.setattr(_run, "loglikelihoods", scored)
    for lengths, says in (((512, 4096), "context of 2048"), ((512, 64), "choose a longer length")):
        with pytest.raises(InputError, match=says):
            perpend.evaluate(model, tokenizer, "fwe", lengths=lengths, limit=1)
    with pytest.raises(InputError, match="needs essays"):
        perpend.evaluate(model, tokenizer, "fwe,niah_single_2", lengths=(512,), limit=1)


def test_what_is_missing_is_named(model, tokenizer, files, tmp_path):
    with pytest.raises(InputError, match=r"essays.*text"):
        perpend.evaluate(model, tokenizer, "niah_single_2", lengths=(1024,), limit=1)
    with pytest.raises(InputError, match="hotpot_dev_distractor"):
        perpend.evaluate(
            model, tokenizer, "qa_2", lengths=(1024,), files={"hotpotqa": tmp_path / "none"}, limit=1
        )
    with pytest.raises(InputError, match="another layout"):
        perpend.evaluate(
            model, tokenizer, "qa_1", lengths=(1024,), files={"squad": files["hotpotqa"]}, limit=1
        )
    wrong = {"essay": files["essays"]}
    with pytest.raises(InputError, match="did you mean 'essays'"):
        perpend.evaluate(model, tokenizer, "niah_single_2", lengths=(1024,), files=wrong, limit=1)
    with pytest.raises(InputError, match="context of 2048"):
        perpend.evaluate(model, tokenizer, "niah_single_1", lengths=(4096,), limit=1)
    with pytest.raises(InputError, match="choose a longer length"):
        perpend.evaluate(model, tokenizer, "cwe", lengths=(256,), limit=1)


def test_essays_come_in_four_layouts(encoder, tmp_path):
    text = "One two three. Four five six. " * 40
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.json").write_text(json.dumps({"text": text}))
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "b.txt").write_text(text)
    made = {
        generate("niah_single_2", encoder, 512, count=1, files={"essays": tmp_path / one}).sha256
        for one in ("a.txt", "a.json", "a.jsonl", "folder")
    }
    assert len(made) == 1
