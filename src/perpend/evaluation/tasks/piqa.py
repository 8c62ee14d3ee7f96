"""PIQA: a goal and two ways to reach it."""

from __future__ import annotations

from perpend.evaluation.tasks._kinds import Document, Record, Task


def document(record: Record) -> Document:
    return Document(
        (f"Question: {record['goal']}\nAnswer:",), (record["sol1"], record["sol2"]), int(record["label"])
    )


TASK = Task(
    name="piqa",
    kind="choice",
    document=document,
    metric="acc_norm",
    version="1.0",
    split="validation",
    files=("piqa",),
    metrics=("acc", "acc_norm", "acc_bytes"),
)
