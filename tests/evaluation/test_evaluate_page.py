"""The tables of docs/evaluate.md say what the code does."""

from __future__ import annotations

import re
from pathlib import Path

from perpend.evaluation import ruler, tasks
from perpend.evaluation.ruler import _words
from perpend.evaluation.suite import COMMONSENSE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluate.md").read_text(encoding="utf-8")


def test_the_table_of_tasks():
    rows = re.findall(r"^\| `(\w+)` \| ([\d.]+) \| (\w+) \| (\d) \| (\w+) \| ([\w, ]*)\|$", PAGE, re.M)
    stated = {}
    for name, version, split, shots, headline, more in rows:
        metrics = {headline, *(one.strip() for one in more.split(",") if one.strip())}
        stated[name] = (version, split, int(shots), headline, metrics)
    real = {}
    for name in tasks.names():
        task = tasks.task(name)
        real[name] = (task.version, task.split, task.fewshot, task.metric, set(task.metrics))
    assert stated == real
    assert set(list(stated)[:7]) == set(COMMONSENSE)


def test_the_tables_of_long_context_tasks():
    for name in ruler.names():
        assert f"`{name}`" in PAGE
    for kind, steps in (
        ("128 for needles", 128),
        ("30 vt", 30),
        ("120 cwe", 120),
        ("50 fwe", 50),
        ("32 qa", 32),
    ):
        assert kind in PAGE
        names = [one for one in ruler.names() if one.startswith("niah" if steps == 128 else kind.split()[1])]
        assert {ruler.task(one).steps for one in names} == {steps}


def test_the_size_of_the_word_list():
    for words, name in ((_words.NOUNS, "nouns"), (_words.ADJECTIVES, "adjectives"), (_words.VERBS, "verbs")):
        stated = int(re.search(rf"(\d+) {name}", PAGE)[1])
        assert abs(len(set(words)) - stated) < 20, (name, len(set(words)))
        assert len(words) == len(set(words)), f"{name} repeats a word"
