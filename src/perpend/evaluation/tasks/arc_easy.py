"""ARC-Easy: science questions of grade school, three to five answers."""

from __future__ import annotations

from perpend.evaluation.tasks._kinds import Document, Record, Task
from perpend.evaluation.tasks._question import parts


def document(record: Record) -> Document:
    question, answers, gold = parts(record, "question")
    return Document((f"Question: {question}\nAnswer:",), answers, gold)


TASK = Task(
    name="arc_easy",
    kind="choice",
    document=document,
    metric="acc_norm",
    version="1.0",
    split="test",
    files=("arc_easy",),
    metrics=("acc", "acc_norm", "acc_bytes"),
)
