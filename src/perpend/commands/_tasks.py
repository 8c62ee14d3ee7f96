"""What --tasks does in every verb: each condition scored, a step a task, and paired with the first one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from perpend import distributed
from perpend.evaluation.options import task_options
from perpend.evaluation.paired import MARGIN, MARGIN_NATS, Comparison, compare
from perpend.evaluation.result import Evaluation, TaskScores

if TYPE_CHECKING:
    import pandas as pd

    from perpend.job import Job

CONVENTIONS = {
    "scores": "fractions with Wilson 95 % intervals; acc_norm divides by characters, as the harness",
    "gold log-likelihood": "nats, of the right answer given the prompt",
    "different": "95 % interval of the paired difference excludes 0, and not equivalent",
    "intervals of differences": "Newcombe's paired one for 0/1 scores, else bootstrap over items",
}
SHOWN = ["condition", "task", "metric", "value", "low", "high", "n", "chance", "fewshot", "context"]
PAIRED = ["condition", "task", "quantity", "difference", "low", "high", "verdict", "items_for_equivalence"]


class Tasks:
    """The task scores of one run.

    tasks = Tasks(job, run)
    tasks.score("unedited")                       # the first condition is what the others are paired with
    with perpend.edit(...): tasks.score("edited")
    tasks.each({"unedited": nullcontext, "edited": lambda: perpend.edit(...)})        # the same
    run.finish({**tasks.results}, conventions=tasks.conventions, findings=tasks.findings)

    margin: of scores (0.005 is half a point); margin_nats: of the right answer's log-likelihood.
    """

    def __init__(
        self, job: Job, run: Any, *, margin: float = MARGIN, margin_nats: float = MARGIN_NATS
    ) -> None:
        from perpend.evaluation.suite import check_lengths, expand

        self.job, self.run = job, run
        self.margin, self.margin_nats = margin, margin_nats
        self.asked = task_options(job.options)
        self.names = expand(self.asked["tasks"]) if self.asked["tasks"] else []
        self.evaluations: dict[str, Evaluation] = {}
        if self.names:  # what cannot be scored is refused before anything is
            check_lengths(job.model, job.tokenizer, **self.asked)

    def __bool__(self) -> bool:
        return bool(self.names)

    def score(self, condition: str, model: Callable[[], Any] | None = None) -> Evaluation:
        """Scores a condition; what a resumed run has stored is not scored again.

        model: makes the model that is scored, and is called only where something is missing; None is the
        job's own.
        """
        kept = {key: self.asked[key] for key in ("limit", "bos", "batch", "seed")}
        own = model or (lambda: self.job.model)
        self.evaluations[condition] = Evaluation(tuple(self._steps(condition, own)), kept)
        return self.evaluations[condition]

    def each(self, conditions: Mapping[str, Callable[[], AbstractContextManager[Any]]]) -> None:
        """Scores the job's model within each context; several processes divide the conditions."""
        names = list(conditions)

        def compute(index: int) -> Evaluation:
            with conditions[names[index]]():
                return self.score(names[index])

        self.evaluations = dict(zip(names, distributed.map_blocks(len(names), compute)))

    def _steps(self, condition: str, model: Callable[[], Any]) -> Iterator[TaskScores]:
        from perpend.evaluation.ruler import names as generated
        from perpend.evaluation.suite import evaluate

        for name in self.names:
            for length in self.asked["lengths"] if name in generated() else (None,):
                asked = {**self.asked, "tasks": [name], **({"lengths": (length,)} if length else {})}

                def compute(asked: dict[str, Any] = asked) -> list[dict[str, Any]]:
                    found = evaluate(model(), self.job.tokenizer, progress=self.job.progress, **asked)
                    return [asdict(task) for task in found.tasks]

                stored = self.run.step(f"{condition}/{name}" + (f"@{length}" if length else ""), compute)
                yield from (TaskScores(**task) for task in stored)

    @property
    def base(self) -> Evaluation:
        return next(iter(self.evaluations.values()))

    @property
    def comparisons(self) -> dict[str, Comparison]:
        """Every condition but the first, paired item by item with the first."""
        others = list(self.evaluations.items())[1:]
        if not self:
            return {}
        return {
            name: compare(self.base, other, margin=self.margin, margin_nats=self.margin_nats)
            for name, other in others
        }

    @property
    def results(self) -> dict[str, Any]:
        """condition -> scores, and condition -> comparison with the first."""
        return {
            "tasks": {name: one.results for name, one in self.evaluations.items()},
            "comparison": {name: one.results for name, one in self.comparisons.items()},
        }

    @property
    def conventions(self) -> dict[str, str]:
        within = f"±{100 * self.margin:g} points (±{self.margin_nats:g} nats)"
        words = f"90 % interval of the paired difference within {within}"
        return {**CONVENTIONS, "equivalent": words}

    @property
    def findings(self) -> list[str]:
        first = next(iter(self.evaluations), "")
        found = []
        if self and self.base.floor:
            found.append(
                f"The {first} model is not above guessing on {', '.join(self.base.floor)}: what a change "
                "does there cannot be seen in the score."
            )
        for condition, one in self.comparisons.items():
            found += [f"{condition} · {sentence}." for sentence in one.findings]
        return found

    def changes(self, condition: str) -> dict[str, float]:
        """Change of each task's headline score against the first condition, a fraction."""
        first, second = (headline(one) for one in (self.base, self.evaluations[condition]))
        return {task: second[task] - first[task] for task in first}

    def tables(self) -> list[tuple[str, pd.DataFrame]]:
        """Writes scores.csv, items.csv and comparison.csv; returns what the terminal shows."""
        if not self:
            return []
        scores = stacked({name: one.table for name, one in self.evaluations.items()})
        self.run.table("scores", scores)
        self.run.table("items", stacked({name: one.items for name, one in self.evaluations.items()}))
        kept = scores[scores["headline"] | scores["metric"].eq("perplexity")]
        shown = [("Scores (fractions, 95 % intervals)", kept[SHOWN].round(4))]
        comparisons = self.comparisons
        if comparisons:
            table = stacked({name: one.table for name, one in comparisons.items()})
            self.run.table("comparison", table)
            first = next(iter(self.evaluations))
            shown.append((f"Against {first}, item by item", table[PAIRED].round(4)))
        return shown


def headline(evaluation: Evaluation) -> dict[str, float]:
    """task -> its headline score."""
    return {row["task"]: row["value"] for task in evaluation.tasks for row in task.rows() if row["headline"]}


def stacked(parts: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Tables of several conditions as one, with a column that names them first."""
    import pandas as pd

    frames = [frame.assign(condition=name) for name, frame in parts.items() if len(frame)]
    table = pd.concat(frames, ignore_index=True)
    return table[["condition", *(column for column in table if column != "condition")]]


def figures(run: Any) -> list[Any]:
    """Scores by task, and the paired changes."""
    from perpend.report import charts
    from perpend.report.figure import Figure

    made = []
    if "scores" in run.tables:
        scores = run.tables["scores"]
        scores = scores[scores["headline"]]
        made.append(
            Figure(
                "Task scores",
                "What does the model score, as it is and changed?",
                charts.bars(
                    scores, "value", by="task", low="low", high="high", series="condition", percent=True
                ),
                scores,
                "Bars are the headline score of each task, lines its 95 % interval. A score at chance says "
                "nothing about a change.",
            )
        )
    if "comparison" in run.tables:
        table = run.tables["comparison"]
        for quantity, title in (
            (True, "Change of the right answer's log-likelihood"),
            (False, "Change of scores"),
        ):
            part = table[table["quantity"].eq("gold log-likelihood") == quantity]
            if len(part):
                made.append(
                    Figure(
                        title,
                        "Does the change alter the answers to the same questions?",
                        charts.bars(
                            part, "difference", by="task", low="low", high="high", series="condition"
                        ),
                        part,
                        "Each condition minus the first, item by item, with 95 % intervals. Equivalent needs "
                        "the whole (90 %) interval within the margin; one that includes 0 decides nothing.",
                    )
                )
    return made
