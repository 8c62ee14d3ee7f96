"""Which positions a sink rule names. Importing this module imports nothing heavy: a slip is told at once."""

from __future__ import annotations

from collections.abc import Sequence

from perpend.errors import InputError

SINK_RULES = ("first", "first:N", "cls", "sep", "virtual", "auto", "a list of positions")


def sink_positions(rule: str | int | Sequence[int], length: int) -> tuple[int, ...]:
    """Positions that a sink rule names in sequences of `length` tokens (`virtual` and `auto` name none)."""
    if isinstance(rule, int):
        rule = [rule]
    if not isinstance(rule, str):
        positions = tuple(sorted({int(p) + (length if int(p) < 0 else 0) for p in rule}))
    elif rule in ("first", "cls"):
        positions = (0,)
    elif rule.startswith("first:") and rule[6:].isdecimal() and int(rule[6:]) > 0:
        positions = tuple(range(min(int(rule[6:]), length + 1)))  # one too many is enough to be refused
    elif rule == "sep":
        positions = (length - 1,)
    elif rule in ("virtual", "auto"):
        return ()
    elif all(part.strip().isdecimal() for part in rule.split(",") if part.strip()):
        positions = tuple(sorted({int(p) for p in rule.split(",") if p.strip()}))
    else:
        raise InputError(f"unknown sink rule {rule!r}; known: {', '.join(SINK_RULES)}")
    if not positions:
        raise InputError("an empty list names no sink; give at least one position")
    return positions
