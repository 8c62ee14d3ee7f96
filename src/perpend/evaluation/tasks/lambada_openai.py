"""LAMBADA in OpenAI's form: the last word of a passage, greedily, and its perplexity."""

from __future__ import annotations

from perpend.evaluation.tasks._kinds import Document, Record, Task


def document(record: Record) -> Document:
    text = record["text"] if "text" in record else f"{record['query']} {record['choices'][0]}"
    words = text.split(" ")
    return Document((" ".join(words[:-1]),), (" " + words[-1],))


TASK = Task(
    name="lambada_openai",
    kind="target",
    document=document,
    metric="acc",
    version="1.0",
    split="test",
    files=("lambada_openai", "lambada"),
    metrics=("acc", "perplexity"),
    shots="test",
)
