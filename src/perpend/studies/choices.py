"""Which convention decides a statistic of attention? A user's own function, run over all of them.

    def concentration(rows):                             # (heads, keys), probabilities
        return float((rows**2).sum(-1).mean())           # a number; or a score a head, or a label a head

    found = perpend.audit(model, concentration, tokens=tokens, windows=(32, 64))
    found.decides, found.tables["shares"], found.figures

The statistic is taken at every combination of sink set, keep or drop, BOS, window, kind of mean and content
temperature. Its outcomes are compared as vectors: a number as it is, a ranking by its ranks, a partition by
which pairs it puts together. Their variance over the whole grid is split as in an analysis of variance with
equal weights: `alone` is the share of a choice by itself, `involved` that of everything in which it takes
part (Sobol's first-order and total indices). The choice with the largest `involved` decides.

Source: the convention layers of "Which Question Is Your Attention Metric Answering?", Section 5, E.1 to E.3.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import stats
from scipy.special import logsumexp

from perpend.errors import InputError, unknown_name
from perpend.report.notebook import Rich
from perpend.studies.choice_sources import read_source
from perpend.studies.taxonomy import adjusted_rand
from perpend.surveys.supports import sink_positions

if TYPE_CHECKING:
    import pandas as pd

    from perpend.report.figure import Figure

KINDS = ("number", "ranking", "partition")
CHOICES = ("sink", "policy", "bos", "window", "mean", "temperature")
POLICIES = ("keep", "drop")
MEANS = ("aitchison", "arithmetic")
REPLICATES = 20


@dataclass(frozen=True)
class Setting:
    """One combination of conventions. `columns`: where the sink is in the rows given, () once dropped."""

    sink: str
    policy: str
    bos: str
    window: int
    mean: str
    temperature: float
    columns: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]  # (layer, head) of each entry of the first axis

    @property
    def words(self) -> str:
        """The setting in a line."""
        return ", ".join(f"{name} {getattr(self, name)}" for name in CHOICES)


@dataclass(frozen=True, repr=False)
class Choices(Rich):
    """What each choice does to a statistic: `results`, `tables` (`shares`, `cells`, `levels`), `findings`.

    `decides` is the choice with the largest share, None where no choice changes anything.
    """

    results: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    findings: list[str]
    undefined: dict[str, str] = field(default_factory=dict)

    @property
    def decides(self) -> str | None:
        return self.results["decides"]

    @cached_property
    def figures(self) -> list[Figure]:
        """Shares by choice, and what each level of each choice gives."""
        from perpend.studies.choice_figures import figures

        return figures(self)


def audit(
    source: Any,
    statistic: Callable[..., Any],
    *,
    tokens: Any = None,
    of: str = "signatures",
    kind: str | None = None,
    sinks: Sequence[Any] = ("first", "first:4"),
    policies: Sequence[str] = POLICIES,
    windows: Sequence[int] | None = None,
    means: Sequence[str] | None = None,
    temperatures: Sequence[float] = (0.5, 1.0, 2.0),
    replicates: int = REPLICATES,
    batch: int = 8,
    seed: int = 0,
) -> Choices:
    """Runs `statistic` over every combination of conventions, and says which one decides it.

    source: a model with `tokens`; the folder of a finished `perpend attention`, or its `Run`; an attention
    survey; or a mapping from a BOS policy to one of these. tokens: ids [n, T], or a mapping from a BOS policy
    to ids: `{"auto": with_bos, "never": without}`.
    statistic: a function of rows (heads, keys), probabilities that sum to one; with of="rows" of (heads,
    rows, keys), single rows of a model. It may take a second argument, the `Setting`. kind: what it returns,
    a number, a ranking (one score a head or item) or a partition (one label each). None tells by itself:
    whole numbers and strings are labels, fractions scores.
    sinks: sink rules or positions. windows: keys kept, each with its own queries (None: the source's, or 64).
    A run is narrowed for Aitchison means only, whose content is a subcomposition. temperatures: powers of
    the content, the sink's share kept. replicates: resamples of the text for the intervals (surveys and
    models; 0 for none).

    Costs one survey a BOS policy and window, and one call of the statistic a setting and replicate. Raises
    InputError for a choice that the source does not have, and where the statistic has no value.
    """
    if of not in ("signatures", "rows"):
        raise unknown_name("input of the statistic", of, ("signatures", "rows"))
    for name in policies:
        if name not in POLICIES:
            raise unknown_name("policy", name, POLICIES)
    means = tuple(means if means is not None else MEANS) if of == "signatures" else ("none",)
    for name in means:
        if of == "signatures" and name not in MEANS:
            raise unknown_name("mean", name, MEANS)
    if any(not t > 0 for t in temperatures):
        raise InputError(f"temperatures are positive powers of the content, not {list(temperatures)}")
    levels: dict[str, list[Any]] = {
        "sink": [_rule(sink) for sink in sinks],
        "policy": list(policies),
        "mean": list(means),
        "temperature": [float(t) for t in temperatures],
    }
    inputs, read = read_source(source, tokens, of, windows, means, batch)
    levels["bos"] = list(read)
    levels["window"] = list(next(iter(read.values())))
    empty = [name for name in CHOICES if not levels[name]]
    if empty:
        raise InputError(f"no {empty[0]} is given; name at least one")
    for name in CHOICES:
        if len({str(level) for level in levels[name]}) != len(levels[name]):
            raise InputError(f"a {name} is named twice: {levels[name]}")
    rules = dict(zip(levels["sink"], sinks))
    takes_setting = _takes_two(statistic)

    def outcomes(draw: int | None) -> tuple[list[dict[str, Any]], list[Any]]:
        cells, values = [], []
        held = {
            (bos, window, mean): read[bos][window](mean, draw)
            for bos, window, mean in itertools.product(levels["bos"], levels["window"], levels["mean"])
        }
        for combination in itertools.product(*(levels[name] for name in CHOICES)):
            cell = dict(zip(CHOICES, combination))
            rows, heads = held[cell["bos"], cell["window"], cell["mean"]]
            columns = _columns(rules[cell["sink"]], cell["window"])
            given, left = conventional(rows, columns, cell["policy"], cell["temperature"])
            setting = Setting(**cell, columns=left, heads=heads)
            try:
                values.append(statistic(given, setting) if takes_setting else statistic(given))
            except Exception as error:
                error.add_note(f"the statistic was asked for {setting.words}")
                raise
            cells.append(cell)
        return cells, values

    cells, values = outcomes(None)
    kind = kind or kind_of(values[0])
    if kind not in KINDS:
        raise unknown_name("kind of statistic", kind, KINDS)
    shape = tuple(len(levels[name]) for name in CHOICES)
    table = vectors(values, kind, cells).reshape(*shape, -1)
    found = shares(table)
    drawn = []
    many = replicates if inputs["resamples"] else 0
    for draw in range(many):
        made = vectors(outcomes(seed * 100_000 + draw)[1], kind, cells).reshape(*shape, -1)
        drawn.append(shares(made))
    return _told(cells, values, kind, levels, found, drawn, of, inputs["words"], table)


def conventional(
    log_rows: np.ndarray, sink: Sequence[int], policy: str, temperature: float
) -> tuple[np.ndarray, tuple[int, ...]]:
    """Rows (..., keys), log-probabilities, under one convention; and where the sink is in them.

    The content is raised to `temperature` and re-closed, the sink's share kept; `drop` then leaves the
    content alone. Returns probabilities.
    """
    keys = log_rows.shape[-1]
    content = [key for key in range(keys) if key not in set(sink)]
    logs = log_rows[..., content]
    rest = logsumexp(logs, axis=-1, keepdims=True)
    pure = logs - rest
    if temperature != 1:
        pure = temperature * pure
        pure = pure - logsumexp(pure, axis=-1, keepdims=True)
    if policy == "drop":
        return np.exp(pure), ()
    whole = log_rows.copy()
    whole[..., content] = pure + rest
    return np.exp(whole), tuple(sink)


def kind_of(value: Any) -> str:
    """number, ranking or partition, by what a statistic returned: one value, fractions, or labels."""
    array = np.asarray(value)
    if array.ndim == 0:
        return "number"
    return "ranking" if array.dtype.kind == "f" else "partition"


def vectors(values: Sequence[Any], kind: str, cells: Sequence[Mapping[str, Any]]) -> np.ndarray:
    """Outcomes as vectors (settings, entries), whose squared distance is what differs between two of them.

    A number is itself; a ranking its ranks (equal scores share one), scaled so that opposite rankings of any
    length are a distance of 2 apart; a partition one entry a pair, 1 where it is together.
    """
    found = []
    sizes = {np.asarray(value).size for value in values}
    if len(sizes) > 1:
        raise InputError(
            f"the statistic returned {', '.join(map(str, sorted(sizes)))} values in different settings; it "
            "must return one for each head (or other item that no convention removes)"
        )
    for value, cell in zip(values, cells):
        array = np.asarray(value)
        if kind == "number":
            if array.size != 1:
                raise InputError(f"a number was expected and {array.size} values came; give kind='ranking'")
            array = array.reshape(1)
        elif array.ndim != 1 or array.size < 2:
            raise InputError(f"a {kind} is a list of at least two values, not of shape {array.shape}")
        if array.dtype.kind in "fc" and not np.isfinite(array).all():
            told = ", ".join(f"{name} {level}" for name, level in cell.items())
            raise InputError(f"the statistic has no finite value for {told}; leave that choice out")
        if kind == "number":
            found.append(array.astype(np.float64))
        elif kind == "ranking":
            ranks = stats.rankdata(array)
            ranks = ranks - ranks.mean()
            size = np.linalg.norm(np.arange(len(ranks)) - (len(ranks) - 1) / 2)
            found.append(ranks / size)
        else:
            labels = np.unique(array, return_inverse=True)[1]
            together = (labels[:, None] == labels)[np.triu_indices(len(labels), 1)]
            found.append(together.astype(np.float64))
    return np.stack(found)


def shares(table: np.ndarray) -> dict[str, dict[str, float]]:
    """Share of the variance over a full grid (levels…, entries) by choice: `alone` and `involved`.

    `total` → `variance`: the mean squared distance of outcomes from their mean. All shares are 0 without any.
    """
    choices = range(table.ndim - 1)
    mean = table.mean(tuple(choices))
    total = float(np.square(table - mean).sum(-1).mean())
    scale = float(np.square(table).sum(-1).mean())
    found: dict[str, dict[str, float]] = {}
    for axis, name in zip(choices, CHOICES):
        others = tuple(other for other in choices if other != axis)
        alone = float(np.square(table.mean(others) - mean).sum(-1).mean())
        involved = float(np.square(table - table.mean(axis, keepdims=True)).sum(-1).mean())
        if total <= 1e-24 * scale:
            alone = involved = 0.0
        else:
            alone, involved = alone / total, involved / total
        found[name] = {"alone": alone, "involved": involved}
    found["total"] = {"variance": 0.0 if total <= 1e-24 * scale else total}
    return found


def _agreement(values: Sequence[Any], kind: str, shape: tuple[int, ...], axis: int) -> tuple[float, float]:
    """Mean and least agreement (numbers: mean and largest distance) of settings that differ in one choice."""
    index = np.arange(len(values)).reshape(shape)
    lines = np.moveaxis(index, axis, -1).reshape(-1, shape[axis])
    found = []
    for line in lines:
        for i, j in itertools.combinations(line, 2):
            a, b = np.asarray(values[i]), np.asarray(values[j])
            if kind == "number":
                found.append(abs(float(a.reshape(())) - float(b.reshape(()))))
            elif kind == "ranking":
                tau = stats.kendalltau(a, b).statistic
                found.append(
                    1.0 if np.isnan(tau) and np.array_equal(stats.rankdata(a), stats.rankdata(b)) else tau
                )
            else:
                found.append(adjusted_rand(a, b))
    if not found:
        return float("nan"), float("nan")
    worst = max(found) if kind == "number" else float(np.nanmin(found))
    return float(np.nanmean(found)), float(worst)


def _told(
    cells: list[dict[str, Any]],
    values: list[Any],
    kind: str,
    levels: Mapping[str, list[Any]],
    found: Mapping[str, Mapping[str, float]],
    drawn: list[dict[str, dict[str, float]]],
    of: str,
    words: str,
    table: np.ndarray,
) -> Choices:
    import pandas as pd

    shape = table.shape[:-1]
    open_choices = [name for name in CHOICES if len(levels[name]) > 1]
    rows = []
    for name in open_choices:
        agreement, worst = _agreement(values, kind, shape, CHOICES.index(name))
        row = {"choice": name, "levels": len(levels[name]), **found[name]}
        row |= {"agreement": agreement, "worst": worst}
        if len(drawn) > 1:
            low, high = np.quantile([one[name]["involved"] for one in drawn], [0.025, 0.975])
            row |= {"low": float(low), "high": float(high)}
        rows.append(row)
    rows.sort(key=lambda row: -row["involved"])
    changed = found["total"]["variance"] > 0 and rows
    decides = rows[0]["choice"] if changed else None
    cell_table = pd.DataFrame(cells)
    numbers = None
    if kind == "number":
        numbers = np.asarray([float(np.asarray(value).reshape(())) for value in values])
        cell_table["value"] = numbers
    level_rows = []
    for name in open_choices:
        for level in levels[name]:
            own = [i for i, cell in enumerate(cells) if cell[name] == level]
            record: dict[str, Any] = {"choice": name, "level": str(level), "settings": len(own)}
            if numbers is not None:
                part = numbers[own]
                record |= {"mean": part.mean(), "least": part.min(), "most": part.max()}
            level_rows.append(record)
    results: dict[str, Any] = {
        "kind": kind,
        "of": of,
        "settings": len(cells),
        "levels": {name: [str(level) for level in levels[name]] for name in CHOICES},
        "decides": decides,
        "shares": {row["choice"]: {k: v for k, v in row.items() if k != "choice"} for row in rows},
        "interactions": 1 - sum(row["alone"] for row in rows) if changed else 0.0,
    }
    if drawn:
        first = [max(open_choices, key=lambda name: one[name]["involved"]) for one in drawn if open_choices]
        results["replicates"] = len(drawn)
        results["same_decision"] = float(np.mean([name == decides for name in first])) if first else None
    if numbers is not None:
        results["range"] = [float(numbers.min()), float(numbers.max())]
    columns = ["choice", "levels", "alone", "involved", "agreement", "worst"]
    columns += ["low", "high"] if len(drawn) > 1 else []
    return Choices(
        results,
        {
            "shares": pd.DataFrame(rows, columns=columns),
            "levels": pd.DataFrame(level_rows),
            "cells": cell_table,
        },
        _findings(results, rows, kind, words),
        {} if changed else {"decides": "no choice changes the statistic"},
    )


def _findings(
    results: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], kind: str, words: str
) -> list[str]:
    count = results["settings"]
    if results["decides"] is None:
        return [f"Over {count} settings ({words}) the {kind} is the same: no choice changes it."]
    first = rows[0]
    ends = f", 95 % {first['low']:.0%} to {first['high']:.0%} over resampled text" if "low" in first else ""
    lines = [
        f"Over {count} settings ({words}) the choice of {first['choice']} decides the {kind}: "
        f"{first['involved']:.0%} of its variance involves it{ends}, {first['alone']:.0%} by itself."
    ]
    if kind == "number":
        low, high = results["range"]
        lines[0] = lines[0][:-1] + f". The number runs from {low:.4g} to {high:.4g}."
    else:
        name = {"ranking": "Kendall's τ", "partition": "adjusted Rand index"}[kind]
        lines.append(
            f"Outcomes that differ in {first['choice']} alone agree with a mean {name} of "
            f"{first['agreement']:.2f} (least {first['worst']:.2f})."
        )
    rest = [f"{row['choice']} {row['involved']:.0%}" for row in rows[1:]]
    if rest:
        lines.append(f"Share of the variance that involves the other choices: {', '.join(rest)}.")
    if results.get("same_decision") is not None:
        lines.append(
            f"In {results['same_decision']:.0%} of {results['replicates']} resamples of the text the same "
            "choice decides."
        )
    return lines


def _rule(sink: Any) -> str:
    return sink if isinstance(sink, str) else ",".join(map(str, [sink] if isinstance(sink, int) else sink))


def _columns(sink: Any, window: int) -> tuple[int, ...]:
    columns = sink_positions(sink, window)
    if not columns:
        raise InputError(f"the sink {sink!r} names no key; give positions, first, or first:N")
    if columns[-1] >= window or len(columns) > window - 2:
        raise InputError(f"the sink {_rule(sink)} leaves no content among keys 0 to {window - 1}")
    return columns


def _takes_two(statistic: Callable[..., Any]) -> bool:
    try:
        parameters = inspect.signature(statistic).parameters.values()
    except (TypeError, ValueError):  # a built-in: it is given the rows alone
        return False
    places = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = [p for p in places if p.default is p.empty]
    return len(required) >= 2 or any(p.name == "setting" for p in places)
