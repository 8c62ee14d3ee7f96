"""GSM8K, five worked examples, greedy: the number after "####" (strict) or the last number (flexible)."""

from __future__ import annotations

import re

from perpend.evaluation.tasks._kinds import Document, Generation, Record, Task

_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_IGNORED = tuple(re.compile(one) for one in (",", r"\$", r"(?s).*#### ", r"\.$"))
MISSING = "[invalid]"


def document(record: Record) -> Document:
    return Document((f"Question: {record['question']}\nAnswer:",), (record["answer"],))


def normal(answer: str) -> str:
    """Commas, dollar signs, all up to "#### " and a final full stop do not count; nor does the case."""
    for pattern in _IGNORED:
        answer = pattern.sub("", answer)
    return answer.lower()


def strict(text: str) -> str:
    """The first number behind "####"."""
    found = _STRICT.findall(text)
    return found[0].strip() if found else MISSING


def flexible(text: str) -> str:
    """The last thing that looks like a number."""
    found = _FLEXIBLE.findall(text)
    return next((one for one in found[-1] if one), MISSING).strip() if found else MISSING


def score(text: str, item: Document) -> dict[str, float]:
    gold = normal(item.answers[0])
    return {
        "exact_match_strict": float(normal(strict(text)) == gold),
        "exact_match_flexible": float(normal(flexible(text)) == gold),
    }


TASK = Task(
    name="gsm8k",
    kind="generate",
    document=document,
    metric="exact_match_strict",
    version="3.0",
    split="test",
    files=("gsm8k",),
    metrics=("exact_match_strict", "exact_match_flexible"),
    fewshot=5,
    generation=Generation(("Question:", "</s>", "<|im_end|>"), 256, score),
)
