"""How each claim is judged: functions of one stored run's results, by name.

    JUDGES["reversal"](summary, {"low": 0.17, "high": 0.47})     # an Outcome, or None: not in this run

A judge reads the fields that its claim names and nothing else. It returns None where the run does not hold
them, so that a claim stays "not run here yet" until a run does. Verdicts:

    reproduced            the number does what the claim says, with its interval where the run has one
    refuted               it does the opposite, or lies outside what the claim allows
    geometric artefact    it does what the claim says, and so does the null: a random direction, a split half
    underpowered          the interval holds both answers
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from perpend.papers.measures import at

REPRODUCED, REFUTED = "reproduced", "refuted"
ARTEFACT, UNDERPOWERED = "geometric artefact", "underpowered"
CLASSICAL = ("cosine", "jensen_shannon", "euclidean")
UNIFORM_SINK = 0.36  # CV of the sink share up to which the paper's strong-sink models go
NATS = 0.05


@dataclass(frozen=True)
class Summary:
    """A stored run: its file's name, verb, model, results and the command that makes it."""

    name: str
    verb: str
    model: str
    results: Mapping[str, Any]
    command: str


@dataclass(frozen=True)
class Outcome:
    """What one run says of one claim; `found` holds the numbers, with intervals, in words."""

    status: str
    found: str


Judge = Callable[[Summary, Mapping[str, Any]], "Outcome | None"]
JUDGES: dict[str, Judge] = {}


def judge(*verbs: str) -> Callable[[Judge], Judge]:
    """Registers a judge under its own name, for runs of these verbs."""

    def register(function: Judge) -> Judge:
        def guarded(summary: Summary, args: Mapping[str, Any]) -> Outcome | None:
            return function(summary, args) if not verbs or summary.verb in verbs else None

        JUDGES[function.__name__] = guarded
        return function

    return register


def either(holds: bool, found: str) -> Outcome:
    return Outcome(REPRODUCED if holds else REFUTED, found)


def path_of(results: Any, path: str) -> Any:
    return at(results, *path.split("."))


def sided(low: float | None, high: float | None, below: bool) -> str:
    """The status of "the difference is below (above) zero" from its interval."""
    if low is None or high is None:
        return UNDERPOWERED
    if low <= 0 <= high:
        return UNDERPOWERED
    return REPRODUCED if (high < 0) == below else REFUTED


def equal(value: float, low: float | None, high: float | None, margin: float) -> str:
    """A claim of equality: reproduced inside ±margin, refuted outside it, underpowered across it."""
    if low is None or high is None:
        return UNDERPOWERED
    if -margin < low and high < margin:
        return REPRODUCED
    return REFUTED if low >= margin or high <= -margin else UNDERPOWERED


def told_interval(value: float, low: float | None, high: float | None, form: str = "+.3f") -> str:
    ends = "" if low is None or high is None else f" [{low:{form}}, {high:{form}}]"
    return f"{value:{form}}{ends}"


def drawn(summary: Summary, key: str) -> tuple[float | None, float | None]:
    """The 95 % interval that an audit has of one of its rates (a path with slashes); None without one."""
    ends = at(summary.results, "intervals", key, default={})
    return ends.get("low"), ends.get("high")


def beyond(value: float, limit: float, low: float | None, high: float | None, *, above: bool) -> str:
    """The status of "at least (above) or at most the limit": underpowered where the interval holds it."""
    if low is not None and high is not None and low < limit < high:
        return UNDERPOWERED
    return REPRODUCED if (value >= limit if above else value <= limit) else REFUTED


def every(statuses: Sequence[str]) -> str:
    """The status of a claim about all of several: refuted by one, underpowered by one."""
    return next((s for s in (REFUTED, UNDERPOWERED, ARTEFACT, REPRODUCED) if s in statuses), UNDERPOWERED)


for _found in pkgutil.iter_modules(__path__):  # a module registers its judges as it is imported
    importlib.import_module(f"{__name__}.{_found.name}")
