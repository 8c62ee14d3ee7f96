"""What a task is: a record turned into a document, and one of three ways to score it.

- `choice`: the log-likelihood of every answer; `acc` takes the largest, `acc_norm` the largest per character,
  `acc_bytes` per UTF-8 byte. (The harness' acc_norm divides by characters, not by bytes: so does this one.)
- `target`: the log-likelihood of one continuation; `acc` asks whether greedy decoding would write it,
  `perplexity` is exp of the mean over items of the negated sum.
- `generate`: greedy text, cut at the stop strings, scored by the task's own function.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Record = dict[str, Any]


@dataclass(frozen=True)
class Document:
    """One item. contexts: one text, or one per answer where the answer stands inside it (WinoGrande).

    answers: the continuations after the delimiter; one only where contexts are several. gold: index of the
    right one (of the right context there).
    """

    contexts: tuple[str, ...]
    answers: tuple[str, ...]
    gold: int = 0


@dataclass(frozen=True)
class Generation:
    """Greedy text: stop strings, the token budget, and scores {metric: value in 0..1} of (text, document)."""

    until: tuple[str, ...]
    steps: int
    score: Callable[[str, Document], dict[str, float]]


@dataclass(frozen=True)
class Task:
    """A task as a constant; `document` turns one JSON record into a `Document`.

    files: beginnings of the names its files may have, split: the split the scores are about. metric: the
    headline. version: of the harness' definition it equals. delimiter stands between context and answer.
    shots: the split that worked examples come from.
    """

    name: str
    kind: str
    document: Callable[[Record], Document]
    metric: str
    version: str
    split: str
    files: tuple[str, ...]
    metrics: tuple[str, ...]
    fewshot: int = 0
    shots: str = "train"
    delimiter: str = " "
    generation: Generation | None = None
    note: str = ""

    def requests(self, document: Document, shots: str = "") -> list[tuple[str, str]]:
        """(context, continuation) pairs to score, or one (prompt, "") to continue."""
        if self.kind == "generate":
            return [(shots + document.contexts[0], "")]
        joint = self.delimiter if self.kind == "choice" else ""
        if len(document.contexts) > 1:
            return [(shots + one, joint + document.answers[0]) for one in document.contexts]
        return [(shots + document.contexts[0], joint + answer) for answer in document.answers]

    def shot(self, document: Document) -> str:
        """The document as a worked example."""
        inside = len(document.contexts) > 1
        context = document.contexts[document.gold if inside else 0]
        answer = document.answers[0 if inside else document.gold]
        return f"{context}{self.delimiter}{answer}\n\n"
