"""What to measure of a model against its base: the options of compress and of compare.

Importing this module imports click and nothing heavy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from perpend.options import Near

F = TypeVar("F", bound=Callable[..., Any])

MODES = ("local", "propagated")
ALONG = ("update", "input", "output")

OPTIONS = (
    click.option(
        "--error-sequences",
        type=click.IntRange(1),
        metavar="N",
        help="Measure the error on the first N sequences only.  [default: on all]",
    ),
    click.option("--mode", "modes", multiple=True, type=Near(MODES), help="Error modes.  [default: both]"),
    click.option(
        "--along", multiple=True, type=Near(ALONG), help="Directions to split along, besides the update."
    ),
    click.option(
        "--layer-changes",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="Also the loss change of each layer of the other model alone in the base, on N sequences.",
    ),
    click.option(
        "--surgery",
        "surgery_sequences",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="Also run the base with only e⊥, only e∥, and each at matched norm, on N sequences.",
    ),
    click.option(
        "--map",
        "map_sequences",
        type=click.IntRange(0),
        default=0,
        metavar="N",
        help="Also the sensitivity map, one layer and part at a time, on N sequences.",
    ),
)


def error_options(function: F) -> F:
    """Gives a verb --error-sequences, --mode, --along, --layer-changes, --surgery and --map."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function
