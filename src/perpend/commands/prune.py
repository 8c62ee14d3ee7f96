"""`perpend prune`: remove redundant heads by nine criteria, and see which channel carries the function."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perpend.evaluation.options import add_tasks
from perpend.options import (
    Number,
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

CONTEXT = 512


@verb(
    "perpend prune",
    "perpend prune path/to/model --text train.txt --held-out test.txt --tokens 100000",
    "perpend prune --sparsity 0.2 --criterion content_l1 --criterion js --save smaller/",
    "perpend prune --heads runs/prune-model-1/masks/js_l1-20-seed0.json --save smaller/",
    "perpend prune dinov2-small --images photographs/",
)
@model_options
@text_options(sequences=64, length=192, batch=4)
@image_options
@row_options
@click.option(
    "--held-out",
    metavar="TEXT|DIR",
    help="Text, or a folder of images, to judge by.  [default: the last two fifths of --text or --images]",
)
@click.option(
    "--tokens",
    "token_count",
    type=click.IntRange(2),
    default=20_000,
    show_default=True,
    help="Tokens of held-out text, in windows of --context; the paper uses 100000.",
)
@click.option(
    "--context",
    type=click.IntRange(2),
    default=CONTEXT,
    show_default=True,
    help="Tokens in a held-out window.",
)
@click.option(
    "--sparsity",
    "sparsities",
    multiple=True,
    type=Number(0, 1, min_open=True, max_open=True),
    help="Share of heads removed. Repeatable.  [default: 0.1, 0.2, 0.3]",
)
@click.option(
    "--criterion",
    "criteria",
    multiple=True,
    help="js, js_drop, content, aitchison, js_l1, js_drop_l1, content_l1, random_a, random_b, weighted:λ, "
    "weighted_l1:λ. Repeatable.  [default: the first nine, or none with --heads]",
)
@click.option(
    "--heads",
    "heads_files",
    multiple=True,
    metavar="FILE",
    help="A set of heads to remove, as masks/*.json of an earlier run holds it. Repeatable.",
)
@click.option(
    "--weights/--no-weights", default=True, help="Also fit the weighted family d_λ at one sparsity."
)
@add_tasks
@click.option("--save", "save_to", metavar="DIR", help="Write the model without the best set's heads there.")
@seed_options((0, 1, 2))
@run_options
def command(**options: Any) -> None:
    """Prune redundant heads of MODEL by each criterion and measure perplexity, KL and top-1 agreement.

    Heads are chosen on signatures of --text and judged on other text, paired with the unpruned model on the
    same tokens. What the regime rule predicts is written to the run before anything is evaluated. Layers
    that two sets share are run once. Image models (--images) and encoders have no perplexity: they are held
    against the unpruned model by top-1 agreement, or by their embedding where they have no head. --tasks
    scores the unpruned model and the best set of each sparsity, and pairs them item by item. With --save
    the heads of the best set at the highest sparsity are removed and the model is written as plain
    transformers loads it, with the perplexity after loading in the result.
    """
    from perpend.commands._prune import Prune

    Prune(options).run()


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend prune`."""
    from perpend.commands._prune_figures import figures as made
    from perpend.commands._tasks import figures as scored

    return [*made(run), *scored(run)]
