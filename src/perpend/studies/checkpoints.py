"""A training run's row entropy falls: is it the sink that grows, or the content that narrows?

    measured = [measure(survey, name="step512", weights="3f…"), measure(other, name="step1000", ...)]
    study = checkpoint_study(measured)
    study.results["collapse"]["total"], study.results["collapse"]["share"]

From the first checkpoint to the entropy minimum, with means over rows, heads and layers,

    ΔH = ΔH_b + Δ[(1−s)H(π)]                                                                   (exact)
    Δ[(1−s)H(π)] = Δ(1−s)·mean H(π) + mean(1−s)·ΔH(π) + Δcov                                   (exact)

`mean` being that of the two ends and cov = mean[(1−s)H(π)] − (1−s̄)·H̄(π), what rows with a small sink have
above the product of the means. The paper's share 1 − ΔH(π)/ΔH leaves ΔH(π) unweighted; the second line
weights it. A sink block of several keys adds Δ of the entropy within the block.

Source: "Which Question Is Your Attention Metric Answering?", Corollary 1, Section 5.3 (3), Appendix E.2, E.6.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.errors import InputError
from perpend.studies import predictions
from perpend.studies.collapse import dispersion_disagreement
from perpend.studies.result import Study

if TYPE_CHECKING:
    import pandas as pd

    from perpend.surveys.attention import AttentionSurvey

FIELDS = ("total", "binary", "content", "weighted_content", "within_sink", "sink_mass", "dispersion")
"""Means over rows, heads and layers: H, H_b(s), H(π), (1−s)H(π), s·H(sink), s, C_A⊥."""

TERMS = ("total", "binary", "weighted_content", "within_sink", "sink_growth", "content_change", "covariance")
REPLICATES = 200


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, measured: `layers` a row a layer, `replicates` (n, FIELDS) over resampled text.

    `step` is the training step (None where the name tells none); `weights` its hash.
    """

    name: str
    step: int | None
    weights: str
    layers: pd.DataFrame
    replicates: np.ndarray

    @property
    def means(self) -> np.ndarray:
        """FIELDS, means over the layers that have a value."""
        return np.nanmean(self.layers[list(FIELDS)].to_numpy(np.float64), axis=0)


def step_of(name: str) -> int | None:
    """The training step that a revision or folder name tells: step512, checkpoint-500, step1000-tokens4B."""
    found = re.search(r"step[-_]?(\d+)", name) or re.search(r"checkpoint[-_]?(\d+)", name)
    found = found or re.search(r"(\d+)$", name)
    return int(found[1]) if found else None


def measure(
    survey: AttentionSurvey,
    *,
    name: str,
    weights: str,
    step: int | None = None,
    replicates: int = REPLICATES,
) -> Checkpoint:
    """What a survey says of one checkpoint.

    Replicates of two checkpoints on the same text resample the same sequences, so that differences between
    checkpoints have intervals of their own. Raises InputError where no layer has a row.
    """
    table = survey.per_layer().rename(columns={"row_mass": "sink_mass"})
    if not np.isfinite(table["total"]).any():
        raise InputError(f"{name}: no layer has a row on the support, so there is no entropy to follow")
    drawn = [
        [np.nanmean(means[field_]) for field_ in FIELDS]
        for means in (survey.statistic_replicates(replicates) if len(survey.blocks) > 1 else ())
    ]
    rows = np.asarray(drawn, np.float64).reshape(-1, len(FIELDS))
    kept = table[["layer", *FIELDS]]
    return Checkpoint(name, step_of(name) if step is None else step, weights, kept, rows)


def inspect(checkpoints: Sequence[tuple[str, int | None, str | None]]) -> tuple[list[str], list[int]]:
    """What is wrong with a list of (name, step, weights hash or None), in words, before anything is drawn.

    Returns the complaints and the indices of checkpoints whose weights are those of an earlier one. Steps
    that do not rise, and steps named twice, are complaints.
    """
    said: list[str] = []
    seen: dict[str, str] = {}
    doubles = []
    for index, (name, _, weights) in enumerate(checkpoints):
        if weights is None:
            continue
        if weights in seen:
            doubles.append(index)
            said.append(f"{name} has the very weights of {seen[weights]}: it is no checkpoint of its own")
        else:
            seen[weights] = name
    for (before, first, _), (after, second, _) in itertools.pairwise(checkpoints):
        if first is not None and second is not None and second <= first:
            said.append(f"{after} (step {second}) comes after {before} (step {first}): out of order")
    return said, doubles


def split(first: np.ndarray, last: np.ndarray) -> dict[str, np.ndarray]:
    """ΔH and its parts between two points (..., FIELDS), nats, by TERMS, with `content` = ΔH(π), `share`.

    `residual` is ΔH less its parts; `residual_split` is Δ[(1−s)H(π)] less its three.
    """
    a, b = ({name: end[..., i] for i, name in enumerate(FIELDS)} for end in (first, last))
    found = {
        name: b[name] - a[name] for name in ("total", "binary", "weighted_content", "within_sink", "content")
    }
    rest = {"a": 1 - a["sink_mass"], "b": 1 - b["sink_mass"]}
    found["sink_growth"] = (rest["b"] - rest["a"]) * (a["content"] + b["content"]) / 2
    found["content_change"] = (rest["a"] + rest["b"]) / 2 * found["content"]
    found["covariance"] = (b["weighted_content"] - rest["b"] * b["content"]) - (
        a["weighted_content"] - rest["a"] * a["content"]
    )
    found["residual"] = found["total"] - found["binary"] - found["weighted_content"] - found["within_sink"]
    found["residual_split"] = (
        found["weighted_content"] - found["sink_growth"] - found["content_change"] - found["covariance"]
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        found["share"] = np.where(found["total"] != 0, 1 - found["content"] / found["total"], np.nan)
        found["dispersion_change"] = b["dispersion"] / a["dispersion"] - 1
    return found


def sentence(parts: Mapping[str, float]) -> str:
    """One line: whether a change of the entropy is the sink or the content. `parts` as `split` returns them.

    A falling entropy is the sink's where the terms of s (ΔH_b and the weight (1−s)) fall by more than the
    term of H(π), the content's otherwise.
    """
    total = float(parts["total"])
    sink = float(parts["binary"] + parts["sink_growth"] + parts["within_sink"])
    content = float(parts["content_change"])
    by = (
        f"(sink terms {sink:+.3f}, content {content:+.3f}, covariance {float(parts['covariance']):+.3f} nats)"
    )
    if total >= 0:
        return f"entropy is not falling: ΔH = {total:+.3f} nats {by}"
    if min(sink, content) >= 0:
        return f"entropy fell by {-total:.3f} nats through the covariance of sink and content alone {by}"
    return f"entropy fell by {-total:.3f} nats: {'sink' if sink < content else 'content'} {by}"


class CheckpointStudy(Study):
    """The checkpoints of one training run."""


def checkpoint_study(
    measured: Sequence[Checkpoint], written: Mapping[str, Any] | None = None
) -> CheckpointStudy:
    """The curves of a training run, and the exact split of its entropy's fall.

    Checkpoints are taken in the order given; one that repeats earlier weights stays in the table and out of
    the curves. Intervals are 95 %, over resampled text. written: what `predictions.write` kept before the
    first was measured (None: nothing is scored). Raises InputError with fewer than two of them.
    """
    import pandas as pd

    complaints, doubles = inspect([(c.name, c.step, c.weights) for c in measured])
    used = [c for i, c in enumerate(measured) if i not in doubles]
    if len(used) < 2:
        raise InputError(
            f"a training curve needs at least two different checkpoints, and there are {len(used)}"
        )
    table = pd.DataFrame([_row(c, i in doubles) for i, c in enumerate(measured)])
    means = np.stack([c.means for c in used])
    total, dispersion = means[:, FIELDS.index("total")], means[:, FIELDS.index("dispersion")]
    steps = dispersion_disagreement(total, dispersion)
    at = set(steps.where)
    names = [c.name for c in used]
    table["disagrees_with_next"] = [
        bool(c.name in names and names.index(c.name) in at and not double)
        for c, double in zip(measured, table["duplicate"])
    ]
    low = int(np.argmin(total))
    undefined: dict[str, str] = {}
    collapse: dict[str, Any] = {"from": names[0], "to": names[low]}
    if low == 0:
        undefined["collapse"] = f"the entropy is lowest at the first checkpoint, {names[0]}: it never fell"
        collapse |= dict.fromkeys((*TERMS, "content", "residual", "share", "dispersion_change"))
    else:
        parts = split(means[0], means[low])
        collapse |= {name: float(value) for name, value in parts.items()}
        collapse["intervals"] = _intervals(used[0], used[low])
    results = {
        "checkpoints": [
            {k: (None if v != v else v) for k, v in row.items()} for row in table.to_dict("records")
        ],
        "flags": complaints,
        "collapse": collapse,
        "disagreement": {
            "rate": steps.rate,
            "steps": steps.steps,
            "where": [[names[i], names[i + 1]] for i in steps.where],
        },
    }
    layers = pd.concat([c.layers.assign(checkpoint=c.name, step=c.step) for c in used], ignore_index=True)[
        ["checkpoint", "step", "layer", *FIELDS]
    ]
    changes = pd.DataFrame(
        [{"term": name, "nats": collapse[name]} for name in TERMS] if low else [], columns=["term", "nats"]
    )
    tables = {"checkpoints": table, "layers": layers, "split": changes}
    findings = _findings(results, undefined)
    if written is not None:
        scored = predictions.told(written, [_score(used, low, collapse)])
        results["predictions"] = scored
        findings += predictions.sentences(scored)
        undefined |= {s["name"]: s["why"] for s in scored["scored"] if s["outcome"] == "undefined"}
    return CheckpointStudy(results, tables, findings=findings, undefined=undefined)


def _score(used: Sequence[Checkpoint], low: int, collapse: Mapping[str, Any]) -> predictions.Score:
    """Whether H fell with C_A⊥ flat while the sink emerged."""
    at = FIELDS.index("sink_mass")
    first = used[0].means[at]
    if low == 0:
        return predictions.never_fell(float(used[-1].means[at] - first))
    intervals = dict(collapse.get("intervals") or {})
    ends = used[0].replicates, used[low].replicates
    if len(ends[0]) and len(ends[0]) == len(ends[1]):
        change = ends[1][:, at] - ends[0][:, at]
        intervals["sink_mass"] = [float(v) for v in np.quantile(change, [0.025, 0.975])]
    return predictions.falls_flat(
        collapse["total"],
        float(used[low].means[at] - first),
        collapse["dispersion_change"],
        intervals,
    )


def _row(checkpoint: Checkpoint, double: bool) -> dict[str, Any]:
    row: dict[str, Any] = {"checkpoint": checkpoint.name, "step": checkpoint.step, "duplicate": double}
    for i, name in enumerate(FIELDS):
        row[name] = float(checkpoint.means[i])
        if len(checkpoint.replicates):
            low, high = np.quantile(checkpoint.replicates[:, i], [0.025, 0.975])
            row |= {f"{name}_low": float(low), f"{name}_high": float(high)}
    return {**row, "weights_sha256": checkpoint.weights}


def _intervals(first: Checkpoint, last: Checkpoint) -> dict[str, list[float]]:
    """95 % intervals of `split` over resampled text, the same sequences at both ends."""
    if not len(first.replicates) or len(first.replicates) != len(last.replicates):
        return {}
    parts = split(first.replicates, last.replicates)
    wanted = [*TERMS, "content", "share", "dispersion_change"]
    return {name: [float(v) for v in np.quantile(parts[name], [0.025, 0.975])] for name in wanted}


def _findings(results: Mapping[str, Any], undefined: Mapping[str, str]) -> list[str]:
    lines = [f"Check the checkpoints: {said}." for said in results["flags"]]
    collapse, steps = results["collapse"], results["disagreement"]
    if "collapse" in undefined:
        lines.append(f"{undefined['collapse'][0].upper()}{undefined['collapse'][1:]}.")
    else:
        lines.append(f"From {collapse['from']} to {collapse['to']}, {sentence(collapse)}.")
        lines.append(
            f"ΔH_b = {collapse['binary']:+.3f} and Δ[(1−s)H(π)] = {collapse['weighted_content']:+.3f} nats, "
            f"residual {collapse['residual']:.1e}. H(π) itself moves {collapse['content']:+.3f} nats: the "
            f"share of the fall that is not a fall of H(π) is {collapse['share']:.1%}."
        )
        lines.append(f"Over the same stretch C_A⊥ changes by {collapse['dispersion_change']:+.1%}.")
    if steps["steps"]:
        lines.append(
            f"H and −C_A⊥ move in opposite directions on {steps['rate']:.1%} of {steps['steps']} steps "
            "between checkpoints."
        )
    return lines
