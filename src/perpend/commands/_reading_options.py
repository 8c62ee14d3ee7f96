"""The options of `perpend attention` that read more in the same pass, and what they ask of the survey."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

BINNINGS = ("log", "linear")


class Parts(click.ParamType):
    """Words or whole numbers separated by commas, as a tuple; `known` words are checked."""

    name = "list"

    def __init__(self, known: tuple[str, ...] | None = None) -> None:
        self.known = known

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if not isinstance(value, str):
            return tuple(value)
        parts = [part.strip() for part in value.split(",") if part.strip()]
        if not parts:
            self.fail(f"{value!r} names nothing", param, ctx)
        if self.known is None:
            if not all(part.isdecimal() and int(part) > 0 for part in parts):
                self.fail(f"{value!r} is no list of numbers; write 32,64,128", param, ctx)
            return tuple(int(part) for part in parts)
        unknown = [part for part in parts if part not in self.known]
        if unknown:
            self.fail(f"unknown {unknown[0]!r}; known: {', '.join(self.known)}", param, ctx)
        return tuple(parts)


def reading_options(function: F) -> F:
    """Further readings of the first seed's pass; none of them costs a pass of its own."""
    for decorate in reversed(
        (
            click.option(
                "--windows",
                type=Parts(),
                help="Further windows, as 32,64,128: reversals and d_A⊥ on each, and the mass it retains.",
            ),
            click.option(
                "--value-weights",
                type=Parts(("value", "output")),
                help="Also rows weighted by ‖v_j‖ (value) or ‖W_O v_j‖ (output) before closure: one or both.",
            ),
            click.option(
                "--whole-rows",
                type=click.Choice(BINNINGS),
                help="Also rows on every key a query sees, by position in log or linear bins.",
            ),
            click.option(
                "--row-audit",
                type=click.IntRange(0),
                default=0,
                show_default=True,
                help="Also verdicts on so many single rows of each head, at the same places for all.",
            ),
            click.option(
                "--drop-both",
                is_flag=True,
                help="Also a third convention for encoders: the sink leaves as a query row too.",
            ),
        )
    ):
        function = decorate(function)
    return function


def asked(options: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The arguments of `survey_attention` that these options are; all off where none was given."""
    return {
        "windows": tuple(options.get("windows") or ()),
        "value_weights": tuple(options.get("value_weights") or ()),
        "whole_rows": options.get("whole_rows"),
        "row_sample": int(options.get("row_audit") or 0),
        "drop_both": bool(options.get("drop_both")),
        "seed": seed,
    }
