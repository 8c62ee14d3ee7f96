"""`perpend evaluate`: standard tasks and perplexities of a model, and of the same model edited."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click

from perpend.evaluation.options import add_tasks
from perpend.options import Near, Number, model_options, run_options, seed_options, text_options, verb

if TYPE_CHECKING:
    import pandas as pd

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
    type=Number(0, 100, min_open=True),
    default=0.5,
    show_default=True,
    help="Points within which two scores count as equivalent.",
)
@click.option(
    "--margin-nats",
    type=Number(0, min_open=True),
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
    from perpend.errors import InputError

    if not any(name.strip() for name in (options["tasks"] or "").split(",")) and not options["perplexities"]:
        raise InputError("nothing to score: name --tasks (lambada, piqa, ruler ...) or --perplexity")
    Evaluate(options).run()


class Evaluate:
    """One invocation: conditions (the model as it is, then each edit) × tasks and losses."""

    def __init__(self, options: dict[str, Any]) -> None:
        from perpend.evaluation.options import parse_edits
        from perpend.evaluation.suite import expand
        from perpend.job import Job

        self.options = options
        self.job = Job("evaluate", options)
        self.conditions: dict[str, tuple[Any, ...]] = {"unedited": ()}
        self.conditions |= {text: parse_edits(text) for text in options["edits"]}
        self.names = expand(options["tasks"]) if options["tasks"] else []
        self.asked: dict[str, Any] = {"margins": [options["margin"], options["margin_nats"]]}
        if not options["perplexities"]:  # tasks bring their own text, and --text is none of this run's data
            del self.job.options["text"]
            self.asked["bos"] = options["bos"]

    def run(self) -> None:
        from perpend.commands._tasks import Tasks
        from perpend.evaluation.options import all_edits
        from perpend.evaluation.perplexity import paired

        if self.options["plan"]:
            self._plan()
            return
        job = self.job
        margins = {"margin": self.options["margin"] / 100, "margin_nats": self.options["margin_nats"]}
        with job.run(**self.asked) as run:
            tasks = Tasks(job, run, **margins)
            losses: dict[str, dict[str, Any]] = {}
            if tasks:
                tasks.each(
                    {name: partial(all_edits, job.model, one) for name, one in self.conditions.items()}
                )
            for condition, edits in self.conditions.items():
                with all_edits(job.model, edits):
                    losses[condition] = self._losses()
            changes = {
                condition: {kind: paired(losses["unedited"][kind].nll, one.nll) for kind, one in own.items()}
                for condition, own in losses.items()
                if condition != "unedited" and own
            }
            shown = [*tasks.tables(), *self._tables(run, losses, changes)]
            run.finish(
                results={
                    **tasks.results,
                    "perplexity": {
                        name: {kind: one.results for kind, one in own.items()} for name, own in losses.items()
                    },
                    "perplexity_change": {
                        name: {kind: one.results for kind, one in own.items()}
                        for name, own in changes.items()
                    },
                },
                conventions={**tasks.conventions, "edits": self._edits()},
                findings=[*tasks.findings, *_changed(changes)],
                undefined={},
            )
        job.answer(run, *shown)

    def _edits(self) -> dict[str, Any]:
        return {name: [one.to_json() for one in edits] for name, edits in self.conditions.items() if edits}

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

    def _tables(self, run: Any, losses: Any, changes: Any) -> list[tuple[str, pd.DataFrame]]:
        import pandas as pd

        shown = []
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
        total, requests, remarks = 0, 0, []
        for name in self.names:
            if name in generated():
                items = options["limit"] or 500
                total += sum(options["lengths"]) * items
                requests += len(options["lengths"]) * items
            elif options["data"] and name in local.names():
                task = local.task(name)
                for one in read(options["data"], task, limit=options["limit"]).documents:
                    texts = [head + tail for head, tail in task.requests(one)]
                    total += sum(len(encoder(text)) for text in texts)
                    requests += len(texts)
            else:
                remarks.append(f"{name} is the harness' and not counted")
        windows = len(self.options["perplexities"]) * self.options["sequences"]
        total, requests = total + windows * self.options["length"], requests + windows
        width = max(2, round(total / max(1, requests)))  # the mean of what is read at once
        rows = max(1, requests) * len(self.conditions)
        tokens = torch.zeros(1, width, dtype=torch.long).expand(rows, width)
        remarks.append(f"{len(self.conditions)} model(s): unedited, and each --edit")
        remarks.append(
            "answers of long-context tasks are written a token a step, slower than reading; worked examples "
            "come on top, shared contexts make it less"
        )
        self.job.planned(tokens, remarks=remarks)


def _changed(changes: Any) -> list[str]:
    found = []
    for condition, own in changes.items():
        for kind, one in own.items():
            interval = f" [{one.low:+.4f}, {one.high:+.4f}]" if one.sequences > 1 else ""
            found.append(
                f"{condition} · {kind} loss: {one.difference:+.4f} nats a token{interval}, "
                f"{one.ratio:.3f} times the perplexity."
            )
    return found


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend evaluate`."""
    from perpend.commands._tasks import figures as made

    return made(run)
