"""`perpend checkpoints`: the entropy of attention along a training run, sink and content apart."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perpend.options import loading_options, row_options, run_options, seed_options, text_options, verb

if TYPE_CHECKING:
    from perpend.report.figure import Figure

DEFAULT = "pythia-160m"


ALONE = "all sequences are in one block, so none to resample; give more --sequences or a smaller --batch"


@verb(
    "perpend checkpoints run/checkpoint-100 run/checkpoint-200 run/checkpoint-400",
    "perpend checkpoints run/ --length 64 --window 32",
    "perpend checkpoints pythia-160m --revisions step512,step4000,step143000",
)
@click.argument("models", nargs=-1, metavar="[MODEL]...")
@click.option(
    "--revisions",
    metavar="A,B,…",
    help="Branches of one hub MODEL, in training order.  [default: those of the paper, where MODEL has them]",
)
@loading_options
@text_options(sequences=256, length=128, batch=8)
@row_options
@click.option(
    "--queries",
    metavar="A:B",
    help="Queries A to B−1.  [default: all after the window; 64:128 as the lengths stand]",
)
@click.option(
    "--one-on-disk",
    is_flag=True,
    help="Delete each revision's files once it is measured; what was there before stays.",
)
@click.option("--sort", is_flag=True, help="Put the checkpoints in order of the steps their names tell.")
@seed_options((0,))
@run_options
def command(**options: Any) -> None:
    """Follow attention entropy and the sink through training, and split the entropy's fall between them.

    MODEL is several checkpoints' folders in training order, one folder that holds checkpoint-* or step*
    folders, or one hub model with --revisions. A row's entropy is H = H_b(s) + (1−s)H(π), with s the sink's
    share and π the rest re-closed; from the first checkpoint to the lowest H, ΔH is split in these two
    exactly, and the second again into sink growth, content and covariance. Checkpoints are loaded one at a
    time; their weights are hashed, and those that repeat others or come out of order are named before
    anything is drawn.
    """
    import gc

    from perpend import distributed
    from perpend.errors import InputError
    from perpend.job import Job
    from perpend.models.hub_cache import cached, forget
    from perpend.models.load import check_place
    from perpend.progress import note
    from perpend.studies import checkpoints as study_of
    from perpend.studies import predictions

    places = choose(options.pop("models"), options.pop("revisions"))
    steps = [step_in(model, revision, name) for model, revision, name in places]
    if options.pop("sort"):
        if None in steps:
            raise InputError(
                f"--sort needs a step in every name, and {places[steps.index(None)][2]} has none"
            )
        order = sorted(range(len(places)), key=lambda i: steps[i])
        places, steps = [places[i] for i in order], [steps[i] for i in order]
    said, _ = study_of.inspect([(name, step, None) for (_, _, name), step in zip(places, steps)])
    for line in said:
        note(f"{line} (--sort puts them in order)")
    if len(options["seeds"]) != 1:
        raise InputError("training curves take one --seed: every checkpoint reads the same text")
    queries = span(options["queries"])
    one_on_disk = options.pop("one_on_disk")
    before: set[str] = set()
    if one_on_disk:
        if any(revision is None for _, revision, _ in places):
            raise InputError(
                "--one-on-disk is for the revisions of a hub model; folders are left as they are"
            )
        before = cached(places[0][0])

    for model, revision, _ in places:  # before the first one is measured: all are needed
        if revision is None:
            check_place(model)

    def job_of(place: tuple[str, str | None, str]) -> Job:
        return Job("checkpoints", {**options, "model": place[0], "revision": place[1]})

    first = job_of(places[0])
    tokens = first.tokens(options["seeds"][0])
    if first.planned(tokens, passes=len(places), remarks=[f"{len(places)} checkpoints"]):
        return
    names = [name for _, _, name in places]
    with first.run(checkpoints=names) as run:
        written = predictions.write(run.step, predictions.CHECKPOINTS)
        if one_on_disk:  # as it was before the first start: a resumed run finds what the first one fetched
            before = set(run.step("on-disk-before", lambda: sorted(before)))
        words = vocabulary(first.tokenizer)
        measured, support = [], None
        for index, (place, step) in enumerate(zip(places, steps)):

            def compute(index: int = index, place: Any = place, step: Any = step) -> dict[str, Any]:
                job = first if index == 0 else job_of(place)
                if job.tokenizer is not None and vocabulary(job.tokenizer) != words:
                    raise InputError(
                        f"{place[2]} has another vocabulary than {names[0]}: they are no checkpoints of one "
                        "training"
                    )
                return _measure(job, tokens, place[2], step, options, queries, run, index)

            # A step must not communicate, and with several processes the survey inside it does.
            alone = distributed.world() == 1
            found = run.step(f"checkpoint-{index}", compute) if alone else compute()
            first.__dict__.pop("_loaded", None)  # one checkpoint in memory at a time
            gc.collect()  # models hold references in circles
            if one_on_disk and distributed.is_main():
                freed = forget(place[0], place[1], keep=before)
                note(f"{place[2]}: {freed / 2**20:.0f} MiB of its files are off the disk")
            measured.append(study_of.Checkpoint(**found["measured"]))
            support = support or found["support"]
        study = study_of.checkpoint_study(measured, written)
        for name, table in study.tables.items():
            run.table(name, table)
        run.finish(
            results=study.results,
            conventions={
                "sink": support["rule"],
                "support": support["words"],
                "notes": list(support["notes"]),
                "opening": list(first.sequences.opening),
                "means": "over rows, heads and layers; entropies in nats",
                "interval": "95 %, sequences resampled, the same ones at every checkpoint",
            },
            findings=study.findings,
            undefined={**study.undefined, **({} if len(measured[0].replicates) else {"intervals": ALONE})},
        )
    kept = ["checkpoint", "step", "total", "binary", "weighted_content", "content", "sink_mass", "dispersion"]
    first.answer(
        run,
        ("Means over layers: H, H_b, (1−s)H(π), H(π) in nats; s; C_A⊥", study.tables["checkpoints"][kept]),
    )


def _measure(
    job: Any, tokens: Any, name: str, step: int | None, options: Any, queries: Any, run: Any, index: int
) -> dict[str, Any]:
    from perpend.commands.attention import block_size
    from perpend.models.weights import weights_hash
    from perpend.studies.checkpoints import measure
    from perpend.surveys.attention import survey_attention

    survey = survey_attention(
        job.model,
        tokens,
        window=options["window"],
        sink=options["sink"],
        queries=queries,
        batch=options["batch"],
        block=block_size(len(tokens), options["batch"]),
        store=lambda part, work: run.step(f"checkpoint-{index}-{part}", work),
        progress=job.progress,
    )
    measured = measure(survey, name=name, weights=weights_hash(job.model), step=step)
    support = {"rule": survey.support.rule, "words": survey.support.words, "notes": list(survey.notes)}
    return {"measured": vars(measured), "support": support}


def choose(models: Sequence[str], revisions: str | None) -> list[tuple[str, str | None, str]]:
    """(model, revision, name to show) of every checkpoint that the words on the command line mean."""
    from perpend.errors import InputError
    from perpend.models.catalog import find
    from perpend.studies.checkpoints import step_of

    models = list(models) or [DEFAULT]
    if len(models) > 1:
        if revisions:
            raise InputError("--revisions goes with one MODEL; give either revisions or several folders")
        short = [Path(model).name for model in models]
        clear = len(set(short)) == len(short)
        return [(model, None, name if clear else model) for model, name in zip(models, short)]
    folder = Path(models[0])
    if folder.is_dir() and not revisions:
        inside = [path for path in folder.iterdir() if (path / "config.json").is_file()]
        inside = sorted(
            inside, key=lambda path: (step_of(path.name) is None, step_of(path.name) or 0, path.name)
        )
        if len(inside) < 2:
            raise InputError(
                f"{folder} holds {len(inside)} checkpoint folders (with a config.json); give several folders"
            )
        return [(str(path), None, path.name) for path in inside]
    entry = find(models[0])
    chosen = [name.strip() for name in (revisions or "").split(",") if name.strip()]
    chosen = chosen or list(entry.revisions if entry else ())
    if len(chosen) < 2:
        raise InputError(
            f"{models[0]} alone is no training run; name its checkpoints with --revisions A,B,… or give "
            "several folders"
        )
    return [(models[0], name, name) for name in chosen]


def step_in(model: str, revision: str | None, name: str) -> int | None:
    """The step that the name tells, checked against what a trainer wrote into the folder.

    A folder whose trainer_state.json tells another step goes by that: the name is what a user may change.
    """
    import json

    from perpend.progress import note
    from perpend.studies.checkpoints import step_of

    told = step_of(name)
    state = Path(model) / "trainer_state.json"
    if revision is not None or not state.is_file():
        return told
    try:
        written = json.loads(state.read_text(encoding="utf-8")).get("global_step")
    except (ValueError, AttributeError):
        note(f"{state} cannot be read; the step of {name} is taken from its name")
        return told
    if isinstance(written, int) and written != told:
        note(f"{name} was saved at step {written}, as its trainer_state.json says")
        return written
    return told


def span(queries: str | None) -> tuple[int, int] | None:
    """`64:128` as (64, 128)."""
    from perpend.errors import InputError

    if queries is None:
        return None
    start, colon, stop = queries.partition(":")
    if not (colon and start.isdecimal() and stop.isdecimal() and int(start) < int(stop)):
        raise InputError(f"--queries {queries!r}: write the first and one past the last query, as 64:128")
    return int(start), int(stop)


def vocabulary(tokenizer: Any) -> str:
    """A hash of the words of a tokenizer and their numbers."""
    import hashlib
    import json

    return hashlib.sha256(json.dumps(sorted(tokenizer.get_vocab().items())).encode()).hexdigest()


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend checkpoints`."""
    from perpend.commands._checkpoints_figures import figures as made

    return made(run)
