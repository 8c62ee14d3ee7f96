"""BoolQ: a passage and a yes/no question, in SuperGLUE's prompt.

SuperGLUE's passages open with the article's title ("Title -- text"). A record that holds the title apart
gets it back; one that has lost it is scored on the passage alone, which is a slightly different prompt.
"""

from __future__ import annotations

from perpend.evaluation.tasks._kinds import Document, Record, Task


def document(record: Record) -> Document:
    passage = record["passage"]
    if record.get("title"):
        passage = f"{record['title']} -- {passage}"
    gold = record["label"] if "label" in record else record["answer"]
    return Document((f"{passage}\nQuestion: {record['question']}?\nAnswer:",), ("no", "yes"), int(gold))


TASK = Task(
    name="boolq",
    kind="choice",
    document=document,
    metric="acc",
    version="2.0",
    split="validation",
    files=("boolq",),
    metrics=("acc", "acc_norm", "acc_bytes"),
    note="records without a title lack SuperGLUE's 'Title -- ' before the passage",
)
