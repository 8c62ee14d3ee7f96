"""The texts that three kinds of tasks need and perpend does not bring: essays, SQuAD, HotpotQA."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from perpend.errors import InputError, unknown_name
from perpend.evaluation.ruler._kinds import Sources

FORMATS = {
    "essays": "a text file, a folder of .txt files, or a .json/.jsonl file whose records have the key 'text' "
    "(the original uses Paul Graham's essays)",
    "squad": "SQuAD 2.0's dev-v2.0.json as published: {'data': [{'paragraphs': [{'context', 'qas'}]}]}",
    "hotpotqa": "HotpotQA's hotpot_dev_distractor_v1.json as published: [{'question', 'answer', 'context'}]",
}


def load(
    needs: Iterable[str], files: Mapping[str, str | Path], length: int
) -> tuple[Sources, dict[str, str]]:
    """The sources, and the sha256 of each file read. A missing or malformed file is an InputError with its
    format.
    """
    for name in files:
        if name not in FORMATS:
            raise unknown_name("file of the long-context tasks", name, FORMATS)
    words: tuple[str, ...] = ()
    documents: dict[str, Any] = {}
    hashes = {}
    for name in needs:
        if name not in files:
            raise InputError(f"this task needs {name}: pass files={{'{name}': PATH}}, {FORMATS[name]}")
        path = Path(files[name])
        if not path.exists():
            raise InputError(f"{path} does not exist; {name} is {FORMATS[name]}")
        try:
            if name == "essays":
                text = _essays(path)
                words = tuple(text.split())
                hashes[name] = hashlib.sha256(text.encode()).hexdigest()
            else:
                raw = path.read_bytes()
                documents[name] = (_squad if name == "squad" else _hotpotqa)(json.loads(raw))
                hashes[name] = hashlib.sha256(raw).hexdigest()
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise InputError(f"{path} has another layout ({error!r}); {name} is {FORMATS[name]}") from error
        if name == "essays" and not words:
            raise InputError(f"{path} holds no word; {name} is {FORMATS[name]}")
    return Sources(length, words, documents), hashes


def _essays(path: Path) -> str:
    if path.is_dir():
        return " ".join(one.read_text(encoding="utf-8") for one in sorted(path.glob("*.txt")))
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".jsonl":
        return " ".join(json.loads(line)["text"] for line in text.split("\n") if line.strip())
    if path.suffix == ".json":
        loaded = json.loads(text)
        several = loaded if isinstance(loaded, list) else [loaded]
        return " ".join(one["text"] for one in several)
    return text


def _squad(loaded: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Passages, and the answerable questions; `related`: the article's other passages."""
    passages = sorted({part["context"] for article in loaded["data"] for part in article["paragraphs"]})
    place = {text: index for index, text in enumerate(passages)}
    questions = []
    for article in loaded["data"]:
        own = list(dict.fromkeys(place[part["context"]] for part in article["paragraphs"]))
        for part in article["paragraphs"]:
            here = place[part["context"]]
            questions += [
                {
                    "query": question["question"],
                    "outputs": [answer["text"] for answer in question["answers"]],
                    "context": [here],
                    "related": [one for one in own if one != here],
                }
                for question in part["qas"]
                if not question.get("is_impossible", False)
            ]
    return passages, questions


def _hotpotqa(loaded: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """Passages "title\\ntext", and questions with their ten passages (two hold the answer)."""
    texts = [[f"{title}\n{''.join(parts)}" for title, parts in one["context"]] for one in loaded]
    passages = sorted({text for several in texts for text in several})
    place = {text: index for index, text in enumerate(passages)}
    questions = [
        {
            "query": one["question"],
            "outputs": [one["answer"]],
            "context": [place[text] for text in several],
            "related": [],
        }
        for one, several in zip(loaded, texts)
    ]
    return passages, questions
