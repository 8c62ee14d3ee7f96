"""WinoGrande, partial evaluation: each option is written into the blank and the rest of the sentence is
scored.
"""

from __future__ import annotations

from perpend.evaluation.tasks._kinds import Document, Record, Task


def document(record: Record) -> Document:
    before, _, after = record["sentence"].partition("_")
    contexts = (before + record["option1"], before + record["option2"])
    return Document(contexts, (after.strip(),), {"1": 0, "2": 1}[str(record["answer"])])


TASK = Task(
    name="winogrande",
    kind="choice",
    document=document,
    metric="acc",
    version="1.0",
    split="validation",
    files=("winogrande",),
    metrics=("acc",),
)
