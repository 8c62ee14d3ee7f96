"""`perpend verify`: the proof that a model is read and edited rightly, one row a check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perpend.options import model_options, run_options, verb

if TYPE_CHECKING:
    from perpend.report.figure import Figure


@verb("perpend verify", "perpend verify path/to/model --dtype float32", "perpend verify gpt2 --json")
@model_options
@click.option(
    "--only",
    multiple=True,
    metavar="CHECK",
    help="A check, as the table names it. Repeatable.  [default: all]",
)
@run_options
def command(**options: Any) -> int:
    """Whether what perpend reads and edits is what the model computes, on every layer.

    Two ways to the same number are compared: contributions against the stream, the value aggregate through
    W_O against what attention adds, the self message against the aggregate, rows against one; then that
    observing and a no-op edit change no bit, that cached decoding, padding and batching change nothing beyond
    rounding, and that an error restores the model. The exit status is 1 if a check fails.
    """
    from dataclasses import asdict

    from perpend.distributed import map_blocks
    from perpend.job import Job
    from perpend.models.verify import Check, Verification, verify

    job = Job("verify", options)
    if options["plan"]:
        from perpend import output

        passes = 150
        output.answer({"plan": {"passes": passes}}, f"about {passes} passes of a few hundred tokens")
        return 0
    with job.run() as run:
        only = options["only"] or None
        (rows,) = map_blocks(
            1,
            lambda _: [asdict(row) for row in verify(job.model, _text_tokenizer(job), only=only).rows],
            store=run.step,
            name="checks",
        )
        result = Verification(job.model_name, tuple(Check(**row) for row in rows))
        run.table("checks", result.table)
        failed = [f"{row.name}: {row.detail or row.question} ({row.seen})" for row in result.failures]
        skipped = [f"{row.name}: {row.detail}" for row in result.rows if row.status == "skipped"]
        passed = f"{sum(row.status == 'ok' for row in result.rows)} checks passed"
        findings = [f"failed: {line}" for line in failed] or [f"{passed}, none failed."]
        run.finish(
            result.results,
            {"error": "relative, per token or row, the worst over tokens, layers and heads"},
            findings + [f"Skipped: {line}" for line in skipped],
            skipped,
        )
    shown = result.table.assign(worst=[_error(row.worst) for row in result.rows])
    shown["tolerance"] = [_error(row.tolerance) for row in result.rows]
    job.answer(run, (f"{job.model_name}: {'passed' if result.passed else 'FAILED'}", shown))
    return 0 if result.passed else 1


def _text_tokenizer(job: Any) -> Any:
    """The tokenizer, where it is one for text: an image processor is none."""
    return job.tokenizer if hasattr(job.tokenizer, "encode") else None


def _error(value: float | None) -> str:
    return "" if value is None else "exact" if value == 0 else f"{value:.1e}"


def figures(run: Any) -> list[Figure]:
    """How far below its tolerance each check stayed."""
    import pandas as pd

    from perpend.report import charts
    from perpend.report.figure import Figure

    table = run.tables["checks"]
    kept = table[(table["tolerance"] > 0) & table["worst"].notna()].copy()
    if not len(kept):
        return []
    kept["share"] = (kept["worst"] / kept["tolerance"]).clip(lower=1e-12)
    return [
        Figure(
            "Errors against tolerance",
            "How far from failing is each check?",
            charts.bars(kept, "share", by="check", label="worst error / tolerance", reference={"fails": 1.0}),
            pd.DataFrame(kept[["check", "status", "worst", "tolerance", "seen"]]),
            "Bars that end left of the line passed. Checks that must be exact are in the table alone.",
        )
    ]
