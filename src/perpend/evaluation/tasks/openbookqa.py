"""OpenBookQA: the bare question stem, four answers. (No "Question:" before it: the harness has none.)"""

from __future__ import annotations

from perpend.evaluation.tasks._kinds import Document, Record, Task
from perpend.evaluation.tasks._question import parts


def document(record: Record) -> Document:
    stem, answers, gold = parts(record, "question_stem")
    return Document((stem,), answers, gold)


TASK = Task(
    name="openbookqa",
    kind="choice",
    document=document,
    metric="acc_norm",
    version="1.0",
    split="test",
    files=("openbookqa",),
    metrics=("acc", "acc_norm", "acc_bytes"),
)
