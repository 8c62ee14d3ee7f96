"""HellaSwag: which of four endings goes on with the scene."""

from __future__ import annotations

import re

from perpend.evaluation.tasks._kinds import Document, Record, Task

_BRACKETS = re.compile(r"\[.*?\]")  # leftovers of WikiHow's markup


def clean(text: str) -> str:
    """[title] becomes a full stop, other bracketed marks go, double blanks become one (once)."""
    return _BRACKETS.sub("", text.strip().replace(" [title]", ". ")).replace("  ", " ")


def document(record: Record) -> Document:
    scene = f"{record['activity_label']}: {record['ctx_a']} {record['ctx_b'].capitalize()}"
    return Document((clean(scene),), tuple(map(clean, record["endings"])), int(record["label"]))


TASK = Task(
    name="hellaswag",
    kind="choice",
    document=document,
    metric="acc_norm",
    version="1.0",
    split="validation",
    files=("hellaswag",),
    metrics=("acc", "acc_norm", "acc_bytes"),
)
