"""Multiple-choice records in the two layouts they come in: flat (query, choices, gold) and the data set's
own.
"""

from __future__ import annotations

from perpend.evaluation.tasks._kinds import Record

OPENING, CLOSING = "Question: ", "\nAnswer:"


def bare(query: str) -> str:
    """The question inside "Question: ...\\nAnswer:"."""
    return query.removeprefix(OPENING).removesuffix(CLOSING)


def parts(record: Record, question: str) -> tuple[str, tuple[str, ...], int]:
    """(question, answers, gold) of a flat record, or of one with choices {text, label} and answerKey."""
    if "query" in record:
        return bare(record["query"]), tuple(record["choices"]), int(record["gold"])
    choices = record["choices"]
    gold = list(choices["label"]).index(record["answerKey"].strip())
    return record[question], tuple(choices["text"]), gold
