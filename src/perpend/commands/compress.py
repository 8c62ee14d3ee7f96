"""`perpend compress`: compress a model several ways and see the error along and across its updates."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perpend.commands._pair_options import error_options
from perpend.evaluation.options import add_tasks
from perpend.options import model_options, run_options, seed_options, text_options, verb

if TYPE_CHECKING:
    from perpend.report.figure import Figure

DEFAULT = ("awq", "wanda", "wanda:4:8", "wanda:2:4")


@verb(
    "perpend compress --method awq --method wanda:2:4 --method wanda:2:4+gain",
    "perpend compress --method awq:bits=3,clip=false --calibration book.txt --save smaller/",
    "perpend compress --method wanda --surgery 4 --map 2 --allocate sparsity=0.4,0.6",
)
@model_options
@text_options(sequences=16, length=512, batch=4)
@click.option(
    "--method",
    "methods",
    multiple=True,
    metavar="NAME[:SETTINGS][+REPAIR]",
    help="Repeatable. rtn, awq, wanda, magnitude; as rtn:3, awq:clip=false, wanda:2:4, wanda:sparsity=0.6, "
    "wanda:2:4+gain.  [default: awq, wanda, wanda:4:8, wanda:2:4]",
)
@click.option("--calibration", help="Calibration text, as --text.  [default: built-in English]")
@click.option(
    "--calibration-sequences",
    type=click.IntRange(1),
    help="How many calibration sequences.  [default: 32, or what the text holds]",
)
@click.option(
    "--calibration-length", type=click.IntRange(2), default=512, show_default=True, help="Tokens in one."
)
@click.option("--keep", multiple=True, metavar="PATTERN", help="Matrices to leave uncompressed. Repeatable.")
@error_options
@click.option(
    "--allocate",
    metavar="SETTING=V1,V2,...",
    help="Also a plan for one setting per layer and part, checked at equal bytes.",
)
@add_tasks
@click.option("--save", "save_to", metavar="DIR", help="Write the compressed model there (one --method).")
@seed_options((0,))
@run_options
def command(**options: Any) -> None:
    """Compress a model's layers, and split each layer's error along and across what it adds to the stream.

    Every method starts from MODEL, block by block on the calibration text. Reported beside perplexity: the
    error of each layer's attention, MLP and block across the uncompressed update (which rotates it) and along
    it (which scales it). With --save the model is written as plain transformers loads it: masks and rounded
    values in ordinary weights. Without --calibration, calibration and evaluation never share a sequence.
    """
    from perpend.commands._compress import Compress

    Compress(options).run()


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend compress`."""
    from perpend.commands._compression_figures import figures as made

    return made(run)
