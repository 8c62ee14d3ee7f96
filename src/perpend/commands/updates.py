"""`perpend updates`: what each layer adds to the stream, split along it and across it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perpend.options import (
    Near,
    image_options,
    model_options,
    run_options,
    seed_options,
    text_options,
    verb,
)

if TYPE_CHECKING:
    from perpend.report.figure import Figure

UNITS = ("block", "attn", "mlp", "module")
CRITERIA = ("cosine", "rotation", "influence")


class Counts(click.ParamType):
    """Whole numbers from `least` on, as 1,2,4."""

    name = "counts"

    def __init__(self, least: int = 1) -> None:
        self.least = least

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if not isinstance(value, str):
            return tuple(value)
        words = [word.strip() for word in value.split(",")]
        if not all(word.isdecimal() and int(word) >= self.least for word in words):
            self.fail(f"{value!r} is no list of numbers from {self.least} on; write 4 or 1,2,4", param, ctx)
        return tuple(sorted({int(word) for word in words}))


@verb(
    "perpend updates",
    "perpend updates pythia-160m --sequences 256 --generate 128",
    "perpend updates --evaluate --drop 1,2,4,8",
    "perpend updates --save smaller/ --drop 4 --by rotation",
    "perpend updates dinov2-small --images photographs/",
)
@model_options
@text_options(sequences=64, length=192, batch=8)
@image_options
@click.option(
    "--generate",
    type=click.IntRange(0),
    default=32,
    show_default=True,
    metavar="STEPS",
    help="Tokens to write while watching the ratio; 0 for none.",
)
@click.option(
    "--generate-layers",
    type=Counts(0),
    metavar="LAYER[,LAYER…]",
    help="Layers watched while it writes.  [default: three, spread over the depth]",
)
@click.option(
    "--evaluate",
    is_flag=True,
    help="Drop parts one after another and report perplexity, against random orders.",
)
@click.option("--drop", type=Counts(), metavar="N[,N…]", help="How many to drop.  [default: 1,2,4,8]")
@click.option("--unit", type=Near(UNITS), default="block", show_default=True, help="What is dropped.")
@click.option(
    "--by", type=Near(CRITERIA), default="cosine", show_default=True, help="The ranking --save follows."
)
@click.option(
    "--eval-sequences",
    type=click.IntRange(1),
    default=16,
    show_default=True,
    help="Sequences of the text, after those surveyed, that perplexity is taken on.",
)
@click.option(
    "--save",
    "save_to",
    metavar="DIR",
    help="Write the model without the first --drop parts (the most, of several) there.",
)
@seed_options((0, 1, 2))
@run_options
def command(**options: Any) -> None:
    """How much of what each layer adds lies along the stream it is added to, and how much across it.

    Attention, MLP and block of every layer of MODEL (a language model, an encoder, or with --images an image
    model): the signed α, the ratio of the part along the stream to the part across it beside that of a random
    direction, norms, and the exact cosine with the gap to its second-order form; with and without position 0
    and the largest tokens. Then the ratio while the model writes, and which layers turn the stream so little
    that they can be dropped.
    """
    from dataclasses import asdict

    from perpend.distributed import map_blocks
    from perpend.errors import InputError
    from perpend.job import Job
    from perpend.models.layout import blocks, how_to_add, parts_of
    from perpend.models.smaller import check_free
    from perpend.studies.generation_profile import generation_profile
    from perpend.studies.layer_drop import evaluate, orders, rank
    from perpend.studies.updates import updates_study
    from perpend.surveys.updates import survey_updates

    job = Job("updates", options)
    if options["unit"] != "block" and parts_of(job.model) == ("block",):
        raise InputError(f"--unit {options['unit']}: {how_to_add(job.model)}")
    tokens = job.tokens(options["seeds"][0])
    depth = len(blocks(job.model))
    if max(options["generate_layers"] or (0,)) >= depth:
        raise InputError(f"--generate-layers: the model has layers 0 to {depth - 1}")
    most = depth * (2 if options["unit"] == "module" else 1)
    counts = options["drop"] or tuple(n for n in (1, 2, 4, 8) if n < most)
    if not counts or max(counts) >= most:
        raise InputError(
            f"--drop {max(counts, default=1)}: the model has {most} of that unit, one must be left"
        )
    writes = getattr(job.model, "can_generate", lambda: False)()
    if options["evaluate"] and not writes:
        raise InputError(f"--evaluate takes perplexity: {job.model_name} is no causal language model")
    if options["save_to"]:
        if not options["drop"]:
            raise InputError("--save needs --drop N: how many parts the smaller model is to do without")
        check_free(options["save_to"])
    held_out = _held_out(job, tokens) if options["evaluate"] else None
    ordered = len(CRITERIA) + 1 + len(options["seeds"])  # the orders that `orders` makes, at most
    sets = 1 + ordered * len(counts)  # and the model with nothing dropped
    share = len(held_out.tokens) / len(tokens) if held_out is not None else 0.0
    remarks = (
        [f"and {options['generate']} tokens written one at a time"] if options["generate"] and writes else []
    )
    if job.planned(tokens, passes=1 + sets * share, remarks=remarks):
        return
    with job.run() as run:
        survey = survey_updates(
            job.model, tokens, batch=options["batch"], store=run.step, progress=job.progress
        )
        generation = None
        if options["generate"] and writes:
            prompts = tokens[:2, : max(8, tokens.shape[1] // 3)]
            (step,) = map_blocks(
                1,
                lambda _: asdict(
                    generation_profile(
                        job.model, prompts, steps=options["generate"], layers=options["generate_layers"]
                    )
                ),
                store=run.step,
                name="generation",
            )
            generation = _profile(step)
        ranking = rank(survey)
        curve = None
        if held_out is not None:
            curve = evaluate(
                job.model,
                held_out,
                orders(ranking, options["unit"], options["seeds"]),
                counts=counts,
                batch=options["batch"],
                store=run.step,
                progress=job.progress,
            )
        study = updates_study(survey, generation, ranking, curve, options["unit"])
        results, findings = dict(study.results), list(study.findings)
        if options["save_to"]:
            saved = _save(
                job, ranking.order(options["unit"], options["by"])[: counts[-1]], options["save_to"]
            )
            results["saved"] = saved
            findings += [f"Saved to {options['save_to']}: {note}." for note in saved["notes"]]
        for name, table in study.tables.items():
            run.table(name, table)
        for name, array in study.arrays.items():
            run.array(name, array)
        run.finish(results, {**study.conventions, "bos": _first(job)}, findings, study.undefined)
    job.answer(run, *_shown(study))


def _first(job: Any) -> str:
    """What stands at position 0."""
    if job.images is not None:
        return "position 0 is the class token"
    return f"position 0 is {'a beginning-of-text token' if job.sequences.bos else 'an ordinary token'}"


def _held_out(job: Any, tokens: Any) -> Any:
    """Sequences of the text that the survey does not read."""
    from perpend.errors import InputError
    from perpend.evaluation.windows import as_windows

    wanted, held = job.options["eval_sequences"], len(job.sequences.tokens)
    if held < len(tokens) + wanted:
        raise InputError(
            f"the text holds {held} sequences: {len(tokens)} are surveyed and {wanted} others are needed for "
            "perplexity; lower --sequences or --eval-sequences"
        )
    rest = job.sequences.take(len(tokens) + wanted, job.options["seeds"][0])[len(tokens) :]
    return as_windows(rest, bos=job.sequences.bos, split=job.sequences.text.name)


def _profile(step: dict[str, Any]) -> Any:
    """The profile that a step of the run holds."""
    from perpend.studies.generation_profile import GenerationProfile

    return GenerationProfile(**{**step, "layers": tuple(step["layers"]), "parts": tuple(step["parts"])})


def _save(job: Any, drops: list[tuple[int, str]], folder: str) -> dict[str, Any]:
    """Write the model without `drops`, and its tokenizer; what was left out and how."""
    from perpend import distributed
    from perpend.models.smaller import without

    smaller, notes = without(job.model, drops)

    def write() -> None:
        smaller.save_pretrained(folder)
        if job.tokenizer is not None:
            job.tokenizer.save_pretrained(folder)

    distributed.main_first(write)
    return {"folder": folder, "dropped": [f"{layer}.{part}" for layer, part in drops], "notes": notes}


def _shown(study: Any) -> list[Any]:
    """The tables for the terminal."""
    import pandas as pd

    survey = study.survey
    layers: dict[str, Any] = {"layer": survey.layers}
    for j, part in enumerate(survey.parts):
        layers[f"{part} α"] = survey.mean("alpha")[:, j]
        layers[f"{part} ratio"] = survey.mean("ratio")[:, j]
        layers[f"{part} median"] = survey.quantile("ratio", 0.5)[:, j]
    if "block" in survey.parts:
        j = survey.parts.index("block")
        layers["cosine"] = survey.mean("cosine")[:, j]
        layers["median gap"] = survey.quantile("gap", 0.5)[:, j]
    null = survey.null
    title = (
        f"Updates: ratio along/across; a random direction has {null['ratio_mean']:.4f} "
        f"(1/√(d−1) = {null['ratio']:.4f})"
    )
    shown: list[Any] = [(title, pd.DataFrame(layers))]
    if study.curve is not None:
        wide = study.curve.pivot(index="order", columns="count", values="perplexity").reset_index()
        wide.columns = [str(name) for name in wide.columns]
        shown.append((f"Perplexity without so many {study.unit}s", wide))
    return shown


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend updates`."""
    from perpend.commands._updates_figures import figures as made

    return made(run)
