"""`perpend compare`: any two checkpoints of one architecture, layer by layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from perpend.commands._pair_options import error_options
from perpend.evaluation.options import add_tasks
from perpend.options import loading_options, run_options, seed_options, text_options, verb

if TYPE_CHECKING:
    from perpend.report.figure import Figure


@verb(
    "perpend compare smollm2-135m-instruct model-Q4_K_M.gguf",
    "perpend compare base/ smaller/ --text book.txt --surgery 4",
)
@click.argument("base")
@click.argument("other")
@loading_options
@text_options(sequences=16, length=512, batch=4)
@error_options
@add_tasks
@seed_options((0,))
@run_options
def command(**options: Any) -> None:
    """Two checkpoints of one architecture: where their updates differ, and along or across.

    BASE and OTHER are short names, folders, hub names or .gguf files, so that a Q4 GGUF can be set against
    its fp16 original, or a fine-tuned model against its base. Both must have one architecture, one
    vocabulary, and layers of one number and one size. Reported too: both perplexities, KL divergence and
    how often the top token is the same.
    """
    from perpend.commands._compare import Compare

    Compare(options).run()


def figures(run: Any) -> list[Figure]:
    """The figures of a run of `perpend compare`."""
    from perpend.commands._compression_figures import figures as made

    return made(run)
