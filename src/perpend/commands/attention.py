"""`perpend attention`: the attention survey of a model, from its rows to the verdicts they support."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perpend.commands._reading_options import asked, reading_options
from perpend.options import (
    bootstrap_option,
    image_options,
    model_options,
    row_options,
    run_options,
    seed_options,
    text_options,
    verb,
)

if TYPE_CHECKING:
    from perpend.report.figure import Figure

CALIBRATED = ("cosine", "jensen_shannon", "euclidean")
CURVE_TRIPLES = 5_000  # a point's 99 % interval is then about 1.8 points wide on either side
EPSILON_SEQUENCES = 2  # the ε sweep shows a principle; it needs rows, not many texts


@verb(
    "perpend attention",
    "perpend attention path/to/model --text book.txt --sequences 256",
    "perpend attention gpt2 --sink first:4 --bos always --seed 0,1,2",
    "perpend attention --windows 32,64,128 --value-weights value --whole-rows log --row-audit 256",
)
@model_options
@text_options(sequences=64, length=192, batch=8)
@image_options
@row_options
@click.option(
    "--triples",
    type=click.IntRange(1),
    default=50_000,
    show_default=True,
    help="Closer-head questions sampled a seed.",
)
@bootstrap_option(200)
@reading_options
@seed_options((0, 1, 2))
@run_options
def command(**options: Any) -> None:
    """Survey the attention rows of MODEL: sink and content, kept apart.

    Reported: how much of a row the sink takes, how the entropy splits into sink and content by layer, how
    often "which of two heads is more similar" depends on keeping or dropping the sink, whether that is more
    than noise, and which pruning regime the spread of the sink over heads suggests. The model keeps its own
    fast attention; rows are read from queries and keys, and nothing underflows. In the first seed's pass, if
    asked: further windows, value-weighted rows, whole rows of every length, single rows, a third convention.
    """
    from perpend.job import Job
    from perpend.studies.attention import attention_study
    from perpend.studies.epsilon import epsilon_sweep
    from perpend.surveys.attention import survey_attention

    if options["images"]:
        from perpend.commands._attention_images import survey_images

        return survey_images(options)
    job = Job("attention", options)
    seeds = options["seeds"]
    tokens = {seed: job.tokens(seed) for seed in seeds}
    first = tokens[seeds[0]]
    swept = min(EPSILON_SEQUENCES, len(first)) / len(first)
    if job.planned(first, passes=len(_distinct(job, tokens)) + swept):
        return
    with job.run() as run:
        surveys: dict[int, Any] = {}
        for seed, chosen in tokens.items():
            same = next((s for s in surveys if _is_all(job, chosen) and _is_all(job, tokens[s])), None)
            surveys[seed] = (
                surveys[same]
                if same is not None
                else survey_attention(
                    job.model,
                    chosen,
                    window=options["window"],
                    sink=options["sink"],
                    batch=options["batch"],
                    block=block_size(len(chosen), options["batch"]),
                    store=lambda name, compute, seed=seed: run.step(f"seed-{seed}-{name}", compute),
                    progress=job.progress,
                    **(asked(options, seed) if seed == seeds[0] else {}),
                )
            )
        study = attention_study(surveys, triples=options["triples"], replicates=options["bootstrap"])
        results = dict(study.results)
        sweep = epsilon_sweep(
            job.model,
            first[:EPSILON_SEQUENCES],
            window=surveys[seeds[0]].support.window,
            sink=surveys[seeds[0]].support.columns.sink,
        )
        results["epsilon"] = {
            "log_space": "inactive: rows come from logits, no zero arises and none is replaced",
            "fp16_probabilities": [
                {"epsilon": s.epsilon, "zeros": s.zeros, "empty": s.empty, "reversal": s.exact} for s in sweep
            ],
        }
        results["calibration"], calibration = calibrated(job.model_name, results)
        for name, table in {**study.tables, **calibration}.items():
            run.table(name, table)
        for name, array in study.arrays.items():
            run.array(name, array)
        run.finish(
            results=results,
            conventions={**study.conventions, "opening": list(job.sequences.opening)},
            findings=study.findings,
            undefined=study.undefined,
        )
    job.answer(run, *_shown(study))


def calibrated(model: str, results: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """This model's point on the curve that no model enters, beside the published ones: results, tables."""
    import pandas as pd

    from perpend.studies import calibration

    sink = results["sink"]["signature_mass"]
    rates = {metric: results["reversal"][metric]["exact"] for metric in CALIBRATED}
    curve = calibration.calibration_curve(triples=CURVE_TRIPLES, metrics=CALIBRATED)
    placed = calibration.place(curve, sink, rates)
    published = calibration.published_models()
    published = published[published["metric"].isin(CALIBRATED)]
    own = placed.assign(model=model, source="this model")
    others = published.rename(columns={"sink_signature": "sink"}).assign(source="published")
    columns = ["model", "source", "metric", "sink", "rate"]
    points = pd.concat([own, others])[columns].rename(columns={"sink": "sink_mass"})
    return (
        {
            "alpha": 0.1,
            "triples": CURVE_TRIPLES,
            "by_metric": {
                row.metric: {"expected": row.expected, "deviation": row.deviation}
                for row in placed.itertuples()
            },
        },
        {"calibration": points, "calibration_curve": curve.rename(columns={"sink": "sink_mass"})},
    )


def block_size(sequences: int, batch: int) -> int:
    """Sequences a block: whole batches, about 32 blocks of at most 32 sequences where there are enough."""
    return max(batch, min(32, -(-sequences // 32)))


def _is_all(job: Any, tokens: Any) -> bool:
    """Whether a seed reads every sequence there is: two such seeds read the same text."""
    return len(tokens) == len(job.sequences.tokens)


def _distinct(job: Any, tokens: dict[int, Any]) -> list[int]:
    whole = [seed for seed, chosen in tokens.items() if _is_all(job, chosen)]
    return [seed for seed in tokens if seed not in whole[1:]]


def _shown(study: Any) -> list[Any]:
    """The tables for the terminal."""
    layers = study.tables["layers"]
    shown = layers[
        ["layer", "row_sink_mass", "signature_sink_mass", "total", "binary", "weighted_content", "content"]
    ].round(3)
    rates = study.tables["reversal"].copy()
    percent = [name for name in ("exact", "mean", "sd", "low", "high", "noise_floor_keep") if name in rates]
    rates[percent] = (100 * rates[percent]).round(1)
    kept = ["metric", *percent]
    return [
        ("Entropy (nats) and sink mass (fractions) by layer", shown),
        ("Closer-head verdicts that reverse when the sink is dropped (%)", rates[kept]),
    ]


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend attention`."""
    from perpend.commands._attention_figures import figures as made
    from perpend.commands._reading_figures import figures as of_readings

    found = [*made(run), *of_readings(run)]
    if "norms" in run.tables:
        from perpend.commands._attention_images import figures as of_images

        found += of_images(run)
    return found
