"""`perpend scale`: several models in one study, sink and reversals against size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from perpend.options import (
    bootstrap_option,
    loading_options,
    row_options,
    run_options,
    seed_options,
    text_options,
    verb,
)

if TYPE_CHECKING:
    from perpend.report.figure import Figure


@verb(
    "perpend scale pythia-70m pythia-160m pythia-410m --text wikitext103",
    "perpend scale small/ medium/ large/ --sequences 256",
)
@click.argument("models", nargs=-1, required=True, metavar="MODEL MODEL...")
@loading_options
@click.option(
    "--families",
    metavar="A,B,…",
    help="The family of each MODEL, in order: sizes are compared within one.  [default: its architecture]",
)
@text_options(sequences=64, length=192, batch=8)
@row_options
@bootstrap_option(100)
@seed_options((0,))
@run_options
def command(**options: Any) -> None:
    """Survey each MODEL under one protocol: does the sink grow with size, and do reversals grow with it?

    One model is in memory at a time, each is stored as soon as it is measured, and --resume goes on with the
    first one missing. What the attention paper predicts is written into the run before the first model is
    measured, and scored at the end.
    """
    from dataclasses import replace

    from perpend.errors import InputError

    names = list(options.pop("models"))
    if len(names) < 2 or len(set(names)) != len(names):
        raise InputError("perpend scale compares models: name at least two, each once")
    if len(options["seeds"]) != 1:
        raise InputError("perpend scale takes one --seed: every model reads the same part of the text")

    from perpend.job import Job
    from perpend.models.load import check_place
    from perpend.studies import predictions
    from perpend.studies.scale import Model, distinct, scale_study
    from perpend.texts import read_text

    families = [part.strip() for part in (options["families"] or "").split(",") if part.strip()]
    if families and len(families) != len(names):
        raise InputError(f"--families names {len(families)} families for {len(names)} models; give one each")
    text = read_text(options["text"])
    without = [name for name in names if _lacks_tokenizer(name)]
    if without:  # before the first model is measured: a run cannot go on without one of its models
        raise InputError(f"{', '.join(without)}: no tokenizer in the folder, so the model cannot read text")
    for name in names:
        check_place(name)

    labels = short_names(names)

    def job_of(name: str) -> Job:
        return Job("scale", {**options, "model": name})

    if options["plan"]:
        return _plan([job_of(name) for name in names])
    told = {name: value for name, value in options.items() if name not in ("text", "sequences", "length")}
    whole = Job("scale", told)
    asked = {
        "models": names,
        "data": {
            "name": text.name,
            "sha256": text.sha256,
            "sequences": options["sequences"],
            "length": options["length"],
            "bos": options["bos"],
        },
    }
    with whole.run(**asked) as run:
        written = predictions.write(run.step, predictions.SCALE)
        measured: list[Model] = []
        for index, name in enumerate(names):
            found = _kept(
                run,
                f"model-{index}",
                lambda index=index, name=name: _measure(job_of(name), options, run, index),
            )
            measured.append(Model(**found))
            distinct(measured)  # now, not when the last of them has been measured
        measured = [replace(model, name=label) for model, label in zip(measured, labels)]
        if families:
            measured = [replace(model, family=family) for model, family in zip(measured, families)]
        study = scale_study(measured, written)
        for name, table in study.tables.items():
            run.table(name, table)
        run.finish(
            results=study.results,
            conventions={
                "sink": options["sink"],
                "support": {model.name: model.support for model in measured},
                "position_0": {model.name: model.position_0 for model in measured},
                "reversal": "exact, over all triples of heads; kept against dropped",
                "taxonomy": "adjusted Rand index, average linkage, mean over K of 4, 6 and 8",
                "interval": "95 %, blocks of sequences resampled; reflected, quantiles for the Rand index",
                "calibration": "peaked content (alpha 0.1); the curve's end value beyond its ends",
            },
            findings=study.findings,
            undefined={**study.undefined, **_without_intervals(measured, options["bootstrap"])},
        )
    shown = study.tables["models"][
        ["model", "parameters", "row_mass", "signature_mass", "cv", "reversal_jensen_shannon",
         "classical_ari", "regime"]
    ].round(3)  # fmt: skip
    shown["regime"] = shown["regime"].where(
        study.tables["models"]["regime_applies"], "does not apply: no sink"
    )
    whole.answer(run, ("Models under one protocol (shares; ARI of cosine, JS, Euclidean)", shown))


def _without_intervals(measured: Sequence[Any], bootstrap: int) -> dict[str, str]:
    """Why there are no intervals though they were asked for."""
    if not bootstrap or all(model.intervals for model in measured):
        return {}
    why = "all sequences are in one block, and blocks are what is resampled"
    return {"intervals": f"{why}; give more --sequences or a smaller --batch"}


def short_names(names: Sequence[str]) -> list[str]:
    """Folders by their last part, where that tells them apart; other names as they are."""
    from pathlib import Path

    short = [Path(name).name if Path(name).is_dir() else name for name in names]
    return short if len(set(short)) == len(short) else list(names)


def _lacks_tokenizer(name: str) -> bool:
    from pathlib import Path

    from perpend.models._source import TOKENIZER_FILES

    folder = Path(name)
    return (folder / "config.json").is_file() and not any((folder / f).is_file() for f in TOKENIZER_FILES)


def _kept(run: Any, name: str, compute: Any) -> dict[str, Any]:
    """A step, unless several processes share the survey inside it: a step must not communicate."""
    import gc

    from perpend import distributed

    found = run.step(name, compute) if distributed.world() == 1 else compute()
    gc.collect()  # one model in memory at a time: models hold references in circles
    return {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()}


def _measure(job: Any, options: dict[str, Any], run: Any, index: int) -> dict[str, Any]:
    from perpend.commands.attention import block_size
    from perpend.models.weights import weights_hash
    from perpend.studies.scale import measure
    from perpend.surveys.attention import survey_attention

    seed = options["seeds"][0]
    tokens = job.tokens(seed)
    survey = survey_attention(
        job.model,
        tokens,
        window=options["window"],
        sink=options["sink"],
        batch=options["batch"],
        block=block_size(len(tokens), options["batch"]),
        store=lambda part, work: run.step(f"model-{index}-{part}", work),
        progress=job.progress,
    )
    opening = " ".join(job.sequences.opening)
    found = measure(
        survey,
        name=job.model_name,
        parameters=job.model.num_parameters(),
        family=str(getattr(job.model.config, "model_type", "")),
        weights=weights_hash(job.model),
        position_0=opening or "an ordinary token",
        replicates=options["bootstrap"],
        seed=seed,
    )
    return vars(found)


def _plan(jobs: list[Any]) -> None:
    """The cost of all models, each measured on one batch, one in memory at a time."""
    import gc

    import pandas as pd

    from perpend import output
    from perpend.job import duration, probe

    rows = []
    for job in jobs:
        cost = probe(job.model, job.tokens(job.options["seeds"][0]), job.options["batch"])
        rows.append({"model": job.model_name, **cost})
        job.__dict__.pop("_loaded", None)
        gc.collect()
    total = sum(row["seconds"] for row in rows)
    shown = pd.DataFrame(rows)[["model", "forward_passes", "tokens", "seconds"]].round(2)
    said = f"{len(rows)} models, {duration(total)} in all"
    output.answer({"plan": {"seconds": total, "models": rows}, "command": "scale"}, ("Cost", shown), said)


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend scale`."""
    from perpend.commands._scale_figures import figures as made

    return made(run)
