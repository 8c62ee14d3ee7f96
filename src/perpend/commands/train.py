"""`perpend train`: pretrain the decoder, plain or without the parallel part, and compare variants over
seeds."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from perpend.evaluation.options import add_tasks
from perpend.options import Number, run_options, verb

if TYPE_CHECKING:
    from perpend.report import Figure


def _names(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in value.split(",") if name.strip())
    if not names or len(set(names)) != len(names):
        raise click.BadParameter("name each variant once, separated by commas")
    return names


@verb(
    "perpend train --text corpus/ --size toy --steps 1000",
    "perpend train --text corpus/ --compare baseline,value-full,value-exclude-self --seeds 3",
    "torchrun --nproc-per-node 8 -m perpend train --size 1.4B --text fineweb --tokenizer gpt2",
    "perpend train --size 2.7B --plan --gpus 8xH100",
)
@click.option(
    "--text",
    help="A file, .jsonl or folder of text; openwebtext, fineweb or hub:OWNER/NAME[:CONFIG], streamed.",
)
@click.option(
    "--data", metavar="DIR", help="Where the tokens are, or will be kept.  [default: in the run folder]"
)
@click.option("--tokenizer", help="A folder or hub name.  [default: byte-level BPE trained on the text]")
@click.option(
    "--vocab",
    type=click.IntRange(257),
    default=4096,
    show_default=True,
    help="Size of a tokenizer trained here.",
)
@click.option(
    "--valid",
    type=Number(0, 0.5, min_open=True),
    default=0.01,
    show_default=True,
    help="Share of the documents kept for validation.",
)
@click.option("--limit", type=click.IntRange(1), help="Prepare no more than about this many training tokens.")
@click.option(
    "--size", default="toy", show_default=True, help="tiny, toy, mini, small, 296M, 436M, 528M, 1.4B or 2.7B."
)
@click.option(
    "--compare",
    "--variant",
    "variants",
    default="baseline",
    show_default=True,
    callback=_names,
    help="Variants by comma, the first is the reference: baseline, residual, value-full, value-exclude-self, "
    "value-gate[-head], value-full-gate[-head].",
)
@click.option(
    "--seeds", type=click.IntRange(1, 1000), default=1, show_default=True, help="How many paired seeds."
)
@click.option(
    "--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True, help="The first of them."
)
@click.option(
    "--steps", type=click.IntRange(1), help="Optimizer steps.  [default: the size's preset, else 1000]"
)
@click.option(
    "--batch", type=click.IntRange(1), help="Sequences a step, over all processes.  [preset, else 32]"
)
@click.option(
    "--micro", type=click.IntRange(1), help="Sequences a forward pass of one process; the rest accumulates."
)
@click.option("--context", type=click.IntRange(2), help="Tokens a sequence.  [preset, else the size's]")
@click.option("--lr", type=Number(0, min_open=True), help="Peak learning rate.  [preset, else 1e-3]")
@click.option(
    "--warmup", type=click.IntRange(0), help="Steps of warm-up.  [preset, else a tenth of the steps]"
)
@click.option(
    "--dtype",
    type=click.Choice(("float32", "bfloat16")),
    help="bfloat16 is autocast.  [preset, else float32]",
)
@click.option(
    "--compile/--no-compile", "compile_", default=None, help="Use torch.compile.  [preset, else not]"
)
@click.option(
    "--log-every", type=click.IntRange(1), default=10, show_default=True, help="Steps between log lines."
)
@click.option(
    "--eval-every", type=click.IntRange(1), default=100, show_default=True, help="Steps between evaluations."
)
@click.option(
    "--eval-sequences",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Sequences in an evaluation.",
)
@click.option(
    "--save-every", type=click.IntRange(1), default=200, show_default=True, help="Steps between checkpoints."
)
@click.option(
    "--snapshot-every",
    type=click.IntRange(0),
    default=0,
    help="Steps between models kept for `perpend checkpoints`.",
)
@click.option(
    "--strategy",
    type=click.Choice(("ddp", "fsdp")),
    help="Under torchrun.  [default: fsdp from 1.4B on, else ddp]",
)
@click.option("--tensorboard", is_flag=True, help="Curves for TensorBoard too, in each model's folder.")
@click.option("--gpus", metavar="NxNAME", help="With --plan: the devices to plan for, such as 8xH100.")
@click.option(
    "--mfu",
    type=Number(0, 1, min_open=True),
    default=0.4,
    show_default=True,
    help="With --plan: utilisation assumed of them.",
)
@add_tasks
@run_options
def command(**options: Any) -> None:
    """How pretraining goes with and without the part of updates or of attention that is along its reference.

    Every seed gives all variants the same initial weights and the same order of data, so differences are
    paired. A run that was interrupted goes on with --resume, each model from its last checkpoint. Sizes
    named by their parameters bring the paper's recipe; everything can be set.
    """
    from perpend import output
    from perpend.distributed import main_first
    from perpend.progress import progress
    from perpend.runs import Run
    from perpend.training.compare import compare
    from perpend.training.data import begun
    from perpend.training.trainer import Rhythm, train

    asked = Settings(options)
    if options["plan"]:
        output.answer(*plan(options, asked))
        return
    with Run.start(
        options["out"], command="train", request=request(options, asked), resume=options["resume"]
    ) as run:
        folder = Path(options["data"]) if options["data"] else run.folder / "data"
        try:
            data = tokens(options, folder)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt) or begun(folder):  # what is tokenized must not be lost
                main_first(lambda: run.step("began", lambda: {"data": str(folder)}))
            raise
        shape = asked.shape(data.vocab)
        identity = main_first(lambda: run.step("data", data.identity))
        rhythm = Rhythm(
            log=options["log_every"],
            evaluate=options["eval_every"],
            sequences=options["eval_sequences"],
            save=options["save_every"],
            snapshot=options["snapshot_every"],
        )
        done = {
            (variant, seed): train(
                shape,
                variant,
                data,
                replace(asked.recipe, seed=seed),
                run.folder / "models" / f"{variant}-{seed}",
                rhythm=rhythm,
                strategy=asked.strategy,
                tensorboard=options["tensorboard"],
                progress=progress,
            )
            for seed in asked.seeds  # seed by seed: whenever it is stopped, pairs are complete
            for variant in asked.variants
        }
        compared = compare({key: trained.log for key, trained in done.items()})
        for name, table in compared.tables.items():
            run.table(name, table)
        results, findings = compared.results, list(compared.findings)
        if options["tasks"]:
            scores = downstream({key: trained.model_folder for key, trained in done.items()}, options)
            run.table("scores", scores)
            results = results | {"scores": scores.to_dict("records")}
        run.finish(
            results | {"shape": asdict(shape), "parameters": shape.parameters(), "data": identity},
            conventions=CONVENTIONS,
            findings=findings,
            undefined={} if len(asked.seeds) > 1 else {"intervals": "one seed has no interval over seeds"},
        )
    parts = [("Validation loss, nats per token", run.tables["summary"])]
    if "paired" in run.tables:
        parts.append(("Differences within a seed, 95 % t interval over seeds", run.tables["paired"]))
    if "scores" in run.tables:
        parts.append(("Tasks", run.tables["scores"]))
    where = [f"models: {run.folder / 'models'}", f"report: {run.folder / 'report.html'}"]
    told = [output.lines("Findings", findings)]
    output.answer({**run.document, "folder": str(run.folder)}, *parts, *told, *where)


CONVENTIONS = {
    "loss": "mean over tokens, nats, on the first sequences of the validation stream",
    "difference": "variant minus reference within a seed: same initial weights, same order of data",
    "interval": "95 % t interval over seeds",
    "budgets": "equal tokens; equal wall clock and processor time: each pair at the quicker one's total",
    "clock": "training only; evaluations and checkpoints are not counted",
}


def tokens(options: dict[str, Any], folder: Path) -> Any:
    """The prepared data, prepared now if need be."""
    from perpend.distributed import main_first
    from perpend.progress import progress
    from perpend.training.data import open_data, prepare

    if options["text"] is None:
        return main_first(lambda: open_data(folder))
    chosen = {name: options[name] for name in ("tokenizer", "vocab", "valid", "limit")}
    return prepare(options["text"], folder, progress=progress, **chosen)


class Settings:
    """The options as shape, recipe, variants and seeds; checked before anything is loaded or written."""

    def __init__(self, options: dict[str, Any]) -> None:
        from perpend.distributed import world
        from perpend.errors import InputError, unknown_name
        from perpend.training import model
        from perpend.training.recipe import PRESETS, Recipe
        from perpend.training.variants import VARIANTS

        if options["text"] is None and not options["data"] and not options["plan"]:
            raise InputError("give the text to train on with --text, or a prepared folder with --data")
        if options["gpus"] and not options["plan"]:
            raise InputError("--gpus says what --plan plans for; a run takes the devices there are")
        self.size = options["size"]
        base = model.shape(self.size)
        for name in options["variants"]:
            if name not in VARIANTS:
                raise unknown_name("variant", name, VARIANTS)
        self.variants = options["variants"]
        self.seeds = list(range(options["seed"], options["seed"] + options["seeds"]))
        _, preset = PRESETS.get(self.size, (None, None))
        given = {
            name: options[name]
            for name in ("steps", "batch", "micro", "context", "lr", "warmup", "dtype")
            if options[name] is not None
        }
        if options["compile_"] is not None:
            given["compile"] = options["compile_"]
        if preset is None:
            steps = given.get("steps", 1000)
            given = {"context": base.context, "warmup": min(100, steps // 10), **given}
        self.recipe = replace(preset or Recipe(), **given) if preset else Recipe(**given)
        if not options["plan"]:
            self.recipe.accumulation(world())
        large = base.parameters() > 1e9
        self.strategy = options["strategy"] or ("fsdp" if large else "ddp")
        self._base = base

    def shape(self, vocab: int) -> Any:
        """The size for a tokenizer's vocabulary: toys take it as it is, the paper's sizes keep theirs."""
        from perpend.training.recipe import PRESETS

        wanted = max(vocab, self._base.vocab) if self.size in PRESETS else vocab
        return replace(self._base, vocab=wanted, context=self.recipe.context)


def request(options: dict[str, Any], asked: Settings) -> dict[str, Any]:
    """What decides the results."""
    names = ("tokenizer", "vocab", "valid", "limit", "eval_every", "eval_sequences")
    return {
        "model": {"name": asked.size},
        "data": {"name": options["text"] or options["data"]},
        "variants": list(asked.variants),
        "seeds": asked.seeds,
        "recipe": {k: v for k, v in asked.recipe.identity().items() if k != "seed"},
        **{name: options[name] for name in names},
        "tasks": scoring(options),
    }


def scoring(options: dict[str, Any]) -> dict[str, Any] | None:
    """What `perpend.evaluate` is asked for, or None where no tasks are."""
    from perpend.evaluation.options import task_options

    return task_options({**options, "seeds": None, "batch": None}) if options["tasks"] else None


def plan(options: dict[str, Any], asked: Settings) -> tuple[Any, ...]:
    """The cost: computed for --gpus, else measured here on two steps of each variant."""
    import re

    import pandas as pd

    from perpend.errors import InputError
    from perpend.job import duration
    from perpend.training.estimate import estimate, measure
    from perpend.training.recipe import PEAKS, PRESETS, peak_flops

    shape = asked.shape(50257 if asked.size in PRESETS else options["vocab"])
    rows, every = [], options["eval_every"]
    evaluations = -(-asked.recipe.steps // every) if every else 1  # one at the end in any case
    for variant in asked.variants:
        if options["gpus"]:
            parts = re.fullmatch(r"(\d+)[x×](.+)", options["gpus"])
            peak = peak_flops(parts[2]) if parts else None
            if not parts or peak is None or not int(parts[1]):
                raise InputError(f"--gpus {options['gpus']!r}: write NxNAME, NAME one of {', '.join(PEAKS)}")
            count = int(parts[1])
        else:
            count, peak = 1, None
        e = estimate(shape, variant, asked.recipe, processes=count, strategy=asked.strategy)
        seconds = (
            e.flops / (peak * count * options["mfu"])
            if peak
            else measure(shape, variant, asked.recipe, evaluations * options["eval_sequences"])
        )
        rows.append(
            {
                "variant": variant,
                "parameters": e.parameters,
                "states_GB": e.states / 1e9,
                "activations_GB": e.activations / 1e9,
                "logits_GB": e.logits / 1e9,
                "memory_GB": e.memory / 1e9,
                "tokens": e.tokens,
                "FLOP": e.flops,
                "hours_a_run": seconds / 3600,
            }
        )
    total = sum(row["hours_a_run"] for row in rows) * len(asked.seeds)
    counted = "steps" if options["gpus"] else "steps and evaluations, on this machine as busy as it is now"
    told = (
        f"{len(rows) * len(asked.seeds)} run(s), {duration(total * 3600)} in all; memory is of each process. "
        f"Counted: {counted}; "
        "tokenizing, snapshots, saving, --tasks and the report come on top"
    )
    where = (
        f"{options['gpus']} at {options['mfu']:.0%} of their bf16 peak" if options["gpus"] else "this machine"
    )
    document = {"command": "train", "plan": rows, "hours": total, "on": where}
    return document, (f"{asked.size} on {where}", pd.DataFrame(rows)), told


def downstream(folders: dict[tuple[str, int], Path], options: dict[str, Any]) -> Any:
    """Headline scores of every finished model, a row a model and task."""
    import pandas as pd

    from perpend.evaluation import evaluate
    from perpend.models.load import load

    rows = []
    for (variant, seed), folder in folders.items():
        model, tokenizer = load(str(folder))
        scored = evaluate(model, tokenizer, **scoring(options)).table
        kept = scored[scored["headline"]][["task", "metric", "value", "low", "high", "n", "chance"]]
        rows.append(kept.assign(variant=variant, seed=seed))
    return pd.concat(rows, ignore_index=True)[["variant", "seed", *kept.columns]]


def figures(run: Any) -> list[Figure]:
    """Curves with bands, at equal tokens and by time, and the paired differences."""
    from perpend.report import Figure, charts

    bands = run.tables["bands"]
    several = bool((bands["high"] > bands["low"]).any())  # one seed has no range
    style: dict[str, Any] = {
        "series": "variant",
        "label": "validation loss, nats",
        "points": False,
        **({"low": "low", "high": "high"} if several else {}),
    }
    told = (
        "Lines are means over seeds, bands their range. Variants whose bands overlap may still differ within "
        "every seed: see the paired differences."
        if several
        else "One seed, so there is no band: what another seed would give is not known."
    )
    if len(bands) == bands["variant"].nunique():
        told += (
            " Each variant was evaluated once and is a point: --eval-every with fewer steps draws a curve."
        )
    made = [
        Figure(
            "Loss at equal tokens",
            "Which variant is lower after the same number of tokens?",
            charts.profile(bands, "valid_loss", x="tokens", **style),
            bands,
            told,
        ),
        Figure(
            "Loss at equal time",
            "Is it still lower when its slower steps are charged?",
            {
                "wall clock": charts.profile(bands, "valid_loss", x="seconds", x_label="seconds", **style),
                "processor": charts.profile(
                    bands, "valid_loss", x="cpu_seconds", x_label="processor seconds", **style
                ),
            },
            bands,
            "The same losses over the mean time that training took, evaluations and checkpoints left out. "
            "On a machine that others use, wall clock is disturbed; processor time less.",
        ),
    ]
    if "paired" in run.tables and run.tables["paired"]["low"].notna().any():
        paired = run.tables["paired"]
        made.append(
            Figure(
                "Paired differences",
                f"How much better or worse than {paired['against'].iloc[0]} within a seed?",
                charts.bars(
                    paired,
                    "mean",
                    by="variant",
                    series="budget",
                    low="low",
                    high="high",
                    label="difference of validation loss, nats",
                    form="+.4f",
                ),
                paired,
                "Bars are means over seeds of the difference within a seed, rules their 95 % t intervals: "
                "a rule that crosses zero leaves the sign open. Below zero is better.",
            )
        )
    return made
