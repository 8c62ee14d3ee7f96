"""`perpend evaluate`: standard tasks and perplexities of a model, and of the same model edited."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from perpend.evaluation.options import add_tasks
from perpend.options import Near, model_options, run_options, seed_options, text_options, verb

if TYPE_CHECKING:
    import pandas as pd

    from perpend.evaluation.result import Evaluation, TaskScores
    from perpend.report.figure import Figure

LOSSES = ("fixed", "token", "word")


@verb(
    "perpend evaluate --tasks lambada,piqa,arc_easy --tasks-data eval/ --tasks-limit 200",
    "perpend evaluate --tasks niah_single_1,vt --tasks-lengths 1k,2k,4k --tasks-limit 20",
    "perpend evaluate --tasks piqa --tasks-data eval/ --edit value.exclude_self:0 --edit residual.mlp:1:0.5",
    "perpend evaluate --perplexity fixed --perplexity token --text wiki.txt --length 512",
)
@model_options
@add_tasks
@click.option(
    "--edit",
    "edits",
    multiple=True,
    metavar="SITE:PARALLEL[:PERPENDICULAR]|FILE",
    help="Score the model edited so too, and compare; join edits that act together with +. Repeatable.",
)
@click.option(
    "--margin",
    type=click.FloatRange(0, 100, min_open=True),
    default=0.5,
    show_default=True,
    help="Points within which two scores count as equivalent.",
)
@click.option(
    "--margin-nats",
    type=click.FloatRange(0, min_open=True),
    default=0.05,
    show_default=True,
    help="The same for the log-likelihood of the right answer.",
)
@click.option(
    "--perplexity",
    "perplexities",
    multiple=True,
    type=Near(LOSSES),
    help="Loss of --text too: fixed windows of --length tokens, token perplexity, WikiText word perplexity.",
)
@click.option(
    "--stride", type=click.IntRange(1), help="New tokens a window of --perplexity token.  [default: --length]"
)
@text_options(sequences=64, length=512, batch=4)
@seed_options((0,))
@run_options
def command(**options: Any) -> None:
    """Score MODEL on standard tasks, and say whether an edit leaves the scores as they are.

    Tasks with a file in --tasks-data are read from it and scored by the harness' own definitions; the
    thirteen long-context tasks are generated here; other names go to lm-evaluation-harness (the extra
    perpend[eval]). With --edit every score is paired item by item: the verdict is "equivalent" only where
    the interval of the difference lies within the margin, and "undecided" says how many items would decide.
    """
    Evaluate(options).run()


class Evaluate:
    """One invocation: conditions (the model as it is, then each edit) × tasks and losses."""

    def __init__(self, options: dict[str, Any]) -> None:
        from perpend.errors import InputError
        from perpend.evaluation.options import parse_edits
        from perpend.evaluation.suite import expand
        from perpend.job import Job

        self.options = options
        self.job = Job("evaluate", options)
        self.conditions: dict[str, tuple[Any, ...]] = {"unedited": ()}
        self.conditions |= {text: parse_edits(text) for text in options["edits"]}
        self.names = expand(options["tasks"]) if options["tasks"] else []
        if not self.names and not options["perplexities"]:
            raise InputError("nothing to score: name --tasks (lambada, piqa, ruler ...) or --perplexity")

    def run(self) -> None:
        from perpend.evaluation.options import all_edits
        from perpend.evaluation.paired import compare
        from perpend.evaluation.perplexity import paired

        if self.options["plan"]:
            self._plan()
            return
        job = self.job
        with job.run(margins=[self.options["margin"], self.options["margin_nats"]]) as run:
            evaluations: dict[str, Evaluation] = {}
            losses: dict[str, dict[str, Any]] = {}
            for condition, edits in self.conditions.items():
                with all_edits(job.model, edits):
                    evaluations[condition] = self._scores(run, condition)
                    losses[condition] = self._losses()
            base = evaluations["unedited"]
            comparisons = {
                condition: compare(
                    base, other, margin=self.options["margin"] / 100, margin_nats=self.options["margin_nats"]
                )
                for condition, other in evaluations.items()
                if condition != "unedited" and self.names
            }
            changes = {
                condition: {kind: paired(losses["unedited"][kind].nll, one.nll) for kind, one in own.items()}
                for condition, own in losses.items()
                if condition != "unedited" and own
            }
            shown = self._tables(run, evaluations, losses, comparisons, changes)
            run.finish(
                results={
                    "tasks": {name: one.results for name, one in evaluations.items()},
                    "perplexity": {
                        name: {kind: one.results for kind, one in own.items()} for name, own in losses.items()
                    },
                    "comparison": {name: one.results for name, one in comparisons.items()},
                    "perplexity_change": {
                        name: {kind: one.results for kind, one in own.items()}
                        for name, own in changes.items()
                    },
                },
                conventions=self._conventions(),
                findings=self._findings(base, comparisons, changes),
                undefined={},
            )
        job.answer(run, *shown)

    def _scores(self, run: Any, condition: str) -> Evaluation:
        """One step a task (and length), so that an interrupted run goes on where it stopped."""
        from dataclasses import asdict

        from perpend.evaluation.options import task_options
        from perpend.evaluation.result import Evaluation, TaskScores
        from perpend.evaluation.ruler import names as generated
        from perpend.evaluation.suite import evaluate

        options = task_options(self.options)

        def steps() -> Iterator[TaskScores]:
            for name in self.names:
                for length in options["lengths"] if name in generated() else (None,):
                    own = {**options, "tasks": [name], **({"lengths": (length,)} if length else {})}
                    stored = run.step(
                        f"{condition}/{name}" + (f"@{length}" if length else ""),
                        lambda own=own: [
                            asdict(one)
                            for one in evaluate(
                                self.job.model, self.job.tokenizer, progress=self.job.progress, **own
                            ).tasks
                        ],
                    )
                    yield from (TaskScores(**one) for one in stored)

        return Evaluation(tuple(steps()), {key: options[key] for key in ("limit", "bos", "batch", "seed")})

    def _losses(self) -> dict[str, Any]:
        from perpend.evaluation import corpus

        options, job = self.options, self.job
        shared = {"batch": options["batch"], "progress": job.progress}
        made: dict[str, Any] = {}
        for kind in dict.fromkeys(options["perplexities"]):
            given = (job.model, job.tokenizer, job.sequences.text)
            if kind == "fixed":
                made[kind] = corpus.fixed_loss(
                    *given,
                    length=options["length"],
                    sequences=options["sequences"],
                    bos=options["bos"],
                    **shared,
                )
            elif kind == "token":
                made[kind] = corpus.token_perplexity(
                    *given, context=options["length"], stride=options["stride"], bos=options["bos"],
                    sequences=options["sequences"], **shared,
                )  # fmt: skip
            else:
                made[kind] = corpus.word_perplexity(*given, context=options["length"], **shared)
        return made

    def _tables(
        self, run: Any, evaluations: Any, losses: Any, comparisons: Any, changes: Any
    ) -> list[tuple[str, pd.DataFrame]]:
        import pandas as pd

        shown = []

        def stacked(parts: dict[str, pd.DataFrame]) -> pd.DataFrame:
            frames = [frame.assign(condition=name) for name, frame in parts.items() if len(frame)]
            table = pd.concat(frames, ignore_index=True)
            return table[["condition", *(column for column in table if column != "condition")]]

        if self.names:
            scores = stacked({name: one.table for name, one in evaluations.items()})
            run.table("scores", scores)
            run.table("items", stacked({name: one.items for name, one in evaluations.items()}))
            columns = [
                "condition",
                "task",
                "metric",
                "value",
                "low",
                "high",
                "n",
                "chance",
                "fewshot",
                "context",
            ]
            kept = scores[scores["headline"] | scores["metric"].eq("perplexity")][columns]
            shown.append(("Scores (fractions, 95 % intervals)", kept.round(4)))
        if comparisons:
            table = stacked({name: one.table for name, one in comparisons.items()})
            run.table("comparison", table)
            columns = ["condition", "task", "quantity", "difference", "low", "high", "verdict"]
            columns.append("items_for_equivalence")
            shown.append(("Edited against unedited, item by item", table[columns].round(4)))
        rows = [{"condition": c, **one.results} for c, own in losses.items() for one in own.values()]
        if rows:
            table = pd.DataFrame(rows)
            run.table("perplexity", table)
            columns = [
                "condition",
                "name",
                "unit",
                "loss",
                "perplexity",
                "tokens",
                "context",
                "stride",
                "bos",
            ]
            shown.append(("Losses (nats)", table[columns].round(4)))
        rows = [
            {"condition": c, "kind": kind, **one.results}
            for c, own in changes.items()
            for kind, one in own.items()
        ]
        if rows:
            table = pd.DataFrame(rows)
            run.table("perplexity_change", table)
            columns = ["condition", "kind", "difference", "low", "high", "ratio"]
            shown.append(("Change of loss, the same sequences (nats a token)", table[columns].round(4)))
        return shown

    def _conventions(self) -> dict[str, Any]:
        return {
            "scores": "fractions with Wilson 95 % intervals; acc_norm divides by characters, as the harness",
            "gold log-likelihood": "nats, of the right answer given the prompt",
            "equivalent": f"90 % interval of the paired difference within ±{self.options['margin']} points "
            f"(±{self.options['margin_nats']} nats)",
            "different": "95 % interval of the paired difference excludes 0, and not equivalent",
            "intervals of differences": "Newcombe's paired one for 0/1 scores, else bootstrap over items",
            "edits": {
                name: [one.to_json() for one in edits] for name, edits in self.conditions.items() if edits
            },
        }

    def _findings(self, base: Evaluation, comparisons: Any, changes: Any) -> list[str]:
        found = []
        if base.floor:
            found.append(
                f"The unedited model is not above guessing on {', '.join(base.floor)}: what an edit does "
                "there cannot be seen in the score."
            )
        for condition, one in comparisons.items():
            found += [f"{condition} · {sentence}." for sentence in one.findings]
        for condition, own in changes.items():
            for kind, one in own.items():
                interval = f" [{one.low:+.4f}, {one.high:+.4f}]" if one.sequences > 1 else ""
                found.append(
                    f"{condition} · {kind} loss: {one.difference:+.4f} nats a token{interval}, "
                    f"{one.ratio:.3f} times the perplexity."
                )
        return found

    def _plan(self) -> None:
        """Requests and tokens are known before anything runs; time is that of one batch measured."""
        import torch

        from perpend.evaluation import tasks as local
        from perpend.evaluation.options import task_options
        from perpend.evaluation.ruler import names as generated
        from perpend.evaluation.scoring import Encoder
        from perpend.evaluation.tasks._files import read

        options = task_options(self.options)
        encoder = Encoder(self.job.tokenizer, options["bos"])
        total, remarks = 0, []
        for name in self.names:
            if name in generated():
                total += sum(options["lengths"]) * (options["limit"] or 500)
            elif options["data"] and name in local.names():
                task = local.task(name)
                for one in read(options["data"], task, limit=options["limit"]).documents:
                    texts = [head + tail for head, tail in task.requests(one)]
                    total += sum(len(encoder(text)) for text in texts)
            else:
                remarks.append(f"{name} is the harness' and not counted")
        total += len(self.options["perplexities"]) * self.options["sequences"] * self.options["length"]
        width = min(512, max(2, total))
        rows = max(1, round(total * len(self.conditions) / width))
        tokens = torch.zeros(1, width, dtype=torch.long).expand(rows, width)
        remarks.append("worked examples and generated answers come on top; shared contexts make it less")
        self.job.planned(tokens, remarks=remarks)


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend evaluate`."""
    from perpend.report import charts
    from perpend.report.figure import Figure

    made = []
    if "scores" in run.tables:
        scores = run.tables["scores"]
        scores = scores[scores["headline"]]
        made.append(
            Figure(
                "Task scores",
                "What does the model score, as it is and edited?",
                charts.bars(
                    scores, "value", by="task", low="low", high="high", series="condition", percent=True
                ),
                scores,
                "Bars are the headline score of each task, lines its 95 % interval. A score at chance says "
                "nothing about an edit.",
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
                        "Does the edit change the answers to the same questions?",
                        charts.bars(
                            part, "difference", by="task", low="low", high="high", series="condition"
                        ),
                        part,
                        "Edited minus unedited, item by item, with 95 % intervals. Equivalent needs the "
                        "whole (90 %) interval within the margin; one that includes 0 decides nothing.",
                    )
                )
    return made
