"""`perpend simulate`: the attention-rows paper's numbers that need no model, computed beside the printed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perpend.options import run_options, verb

if TYPE_CHECKING:
    import pandas as pd

    from perpend.report.figure import Figure


@verb("perpend simulate", "perpend simulate --samples 100000 --out runs/simulate-large")
@click.option(
    "--samples",
    type=click.IntRange(200),
    default=20_000,
    show_default=True,
    help="Triples a point of the calibration curves; all other draws scale with it.",
)
@click.option("--seed", type=click.IntRange(0), default=7, show_default=True, help="Seed of all draws.")
@run_options
def command(**options: Any) -> None:
    """Recompute what the attention-rows paper states exactly or on synthetic rows.

    Witnesses, thresholds, bands, identities, the table of who keeps which law, the calibration curves with
    the paper's ten models on them, both collapse scenarios and the reversal wedge. Each printed number
    stands beside the computed one with its Monte Carlo interval; where they disagree the answer says by how
    much.
    """
    from perpend.job import Job
    from perpend.studies.simulation import Settings, simulate

    job = Job("simulate", options)
    settings = Settings(samples=options["samples"], seed=options["seed"])
    if options["plan"]:
        _plan(settings)
        return
    with job.run() as run:
        simulation = simulate(settings, store=run.step, progress=job.progress)
        run.table("comparison", simulation.checks)
        for name, table in simulation.tables.items():
            run.table(name, table)
        run.finish(
            results=simulation.results, conventions=simulation.conventions, findings=simulation.findings
        )
    job.answer(run, *_shown(simulation.checks, simulation.tables["laws"]))


def _plan(settings: Any) -> None:
    """The cost, from a calibration point of a tenth of the size, which is most of the work."""
    import time

    import pandas as pd

    from perpend import output
    from perpend.job import duration
    from perpend.studies.calibration import ALPHAS, GRID, reversal_rates

    few = max(200, settings.samples // 10)
    start = time.perf_counter()
    reversal_rates(GRID[0], triples=few)
    seconds = (time.perf_counter() - start) * len(GRID) * len(ALPHAS) * settings.samples / few + 20
    cost = {"samples": settings.samples, "seed": settings.seed, "seconds": seconds}
    shown = pd.DataFrame([("expected time", duration(seconds))], columns=["cost", "simulate"])
    output.answer({"plan": cost, "command": "simulate"}, shown)


def _shown(checks: pd.DataFrame, laws: pd.DataFrame) -> list[Any]:
    """Tables for the terminal: printed numbers, statements, laws."""
    shown = checks.copy()
    shown["reproduced"] = [
        "yes" if good else f"no, off by {off:.3g}" for good, off in zip(checks["reproduced"], checks["off"])
    ]
    shown["measured"] = [f"{value:.6g}" for value in checks["measured"]]
    sampled = checks["kind"] == "sampled"
    shown["interval"] = [
        f"{low:.4g} … {high:.4g}" if drawn else "exact"
        for low, high, drawn in zip(checks["low"], checks["high"], sampled)
    ]
    numbers = checks["kind"] != "statement"
    columns = ["item", "quantity", "paper", "measured"]
    kept = laws.copy()
    kept["kept"] = ["undefined" if k is None or k != k else "yes" if k else "no" for k in laws["kept"]]
    matrix = kept.pivot(index="title", columns="law", values="kept")
    matrix = matrix.loc[list(dict.fromkeys(laws["title"])), list(dict.fromkeys(laws["law"]))]
    return [
        ("Printed numbers", shown.loc[numbers, [*columns, "interval", "reproduced"]]),
        ("Statements", shown.loc[~numbers, [*columns, "reproduced"]]),
        ("Who keeps which law", matrix.rename_axis(columns=None).rename_axis("measure").reset_index()),
    ]


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend simulate`."""
    from perpend.commands._simulate_figures import figures as made

    return made(run)
