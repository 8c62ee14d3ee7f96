"""The pruning criteria by name. Importing this module imports nothing heavy: a slip is told at once."""

from __future__ import annotations

from collections.abc import Sequence

from perpend.errors import InputError, unknown_name

DISTANCES: dict[str, tuple[str, str]] = {
    "js": ("jensen_shannon", "keep"),
    "js_drop": ("jensen_shannon", "drop"),
    "content": ("content", "keep"),
    "aitchison": ("aitchison", "keep"),
}
GLOBAL = tuple(DISTANCES)
LAYERWISE = ("js_l1", "js_drop_l1", "content_l1")
RANDOM = {"random_a": 101, "random_b": 202}
CRITERIA = (*GLOBAL, *LAYERWISE, *RANDOM)


def check_criteria(criteria: Sequence[str]) -> None:
    """InputError for a name that is no criterion, with those there are."""
    for criterion in criteria:
        _check(criterion)


def _check(criterion: str) -> None:
    name, _, weight = criterion.partition(":")
    if name in ("weighted", "weighted_l1"):
        try:
            valid = float(weight) >= 0
        except ValueError:
            valid = False
        if not valid:
            raise InputError(
                f"{criterion!r}: write weighted:λ with λ ≥ 0, as weighted:0.3 or weighted_l1:inf"
            )
    elif criterion not in CRITERIA:
        raise unknown_name("pruning criterion", criterion, (*CRITERIA, "weighted:λ", "weighted_l1:λ"))
