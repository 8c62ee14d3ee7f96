"""Predictions written down before anything is measured, and scored after.

    written = write(run.step, SCALE)           # into the run folder, with the time, before the first model
    ...
    results["predictions"] = told(written, [Score("sink-rises-with-size", "confirmed", {...})])

A prediction carries its rule: what must come out for it to count as confirmed. A resumed run keeps the
predictions, and the time, of its beginning.

Source: "Which Question Is Your Attention Metric Answering?", Section 5.3, Proposition 3, Theorem 3,
Corollary 1. The thresholds are stated here, where the paper says "materially" and "approximately flat".
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from perpend.errors import PerpendError

OUTCOMES = ("confirmed", "mixed", "refuted", "undecided", "undefined")
MATERIAL = 0.9  # an adjusted Rand index at most this is materially below 1
FLAT = 0.2  # the paper calls a change of C_A⊥ by 16 % approximately flat, and by 42 % not


@dataclass(frozen=True)
class Prediction:
    """`statement`: the claim; `rule`: when it counts as confirmed; `source`: where it was made."""

    name: str
    statement: str
    rule: str
    source: str


@dataclass(frozen=True)
class Score:
    """One outcome of OUTCOMES, the numbers it rests on, and for `undefined` the reason, in words."""

    name: str
    outcome: str
    numbers: Mapping[str, Any] = field(default_factory=dict)
    why: str = ""


ARI_BELOW_ONE = Prediction(
    "ari-below-one",
    "Clusters of heads differ between keeping and dropping the sink under every classical metric; under the "
    "content distance they are the same.",
    f"mean ARI over K (average linkage) at most {MATERIAL} for cosine, JS and Euclidean, and exactly 1 for "
    "the content distance",
    "attention paper, Proposition 3, Section 5.3 (1)",
)
ARI_FALLS = Prediction(
    "ari-falls-with-sink",
    "The more a model's heads attend to the sink, the less their clusters agree between conventions.",
    "over models, Kendall's tau of signature sink mass and the ARI (mean of cosine, JS and Euclidean): -1 "
    "confirmed, below 0 mixed, else refuted; three models at least",
    "attention paper, Proposition 3, Section 5.3 (1)",
)
SINK_RISES = Prediction(
    "sink-rises-with-size",
    "The mean sink mass of rows rises with the number of parameters.",
    "over pairs of models of one family, Kendall's tau of parameters and row sink mass: 1 confirmed, above "
    "0 mixed, else refuted; without a pair in any family, over all models; undecided where pairs whose "
    "difference lies within its 95 % interval could change the outcome; one pair can refute, not confirm",
    "attention paper, Theorem 3, Section 5.3 (2)",
)
REVERSAL_RISES = Prediction(
    "reversal-rises-with-size",
    "The share of closer-head verdicts that reverse (JS, exact) rises with the number of parameters.",
    "as sink-rises-with-size, with the reversal rate",
    "attention paper, Theorem 3, Section 5.3 (2)",
)
ENTROPY_FALLS = Prediction(
    "entropy-falls-content-flat",
    "While the sink emerges in training, the row entropy H falls and the content's dispersion C_A⊥ stays "
    "approximately flat.",
    f"from the first checkpoint to the minimum of H, the sink mass rises and C_A⊥ changes by {FLAT:.0%} at "
    "most; undefined where the sink mass does not rise",
    "attention paper, Corollary 1, Section 5.3 (3)",
)

TAXONOMY = (ARI_BELOW_ONE,)
SCALE = (ARI_BELOW_ONE, ARI_FALLS, SINK_RISES, REVERSAL_RISES)
CHECKPOINTS = (ENTROPY_FALLS,)


def write(step: Callable[[str, Callable[[], Any]], Any], predictions: Sequence[Prediction]) -> dict[str, Any]:
    """Keeps the predictions under `predictions` of a run, before anything else; returns what is kept.

    `step` is `run.step`. The record: `written` (UTC) and `predictions`, a mapping each.
    """
    return step(
        "predictions",
        lambda: {
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "predictions": [asdict(prediction) for prediction in predictions],
        },
    )


def told(written: Mapping[str, Any], scores: Sequence[Score]) -> dict[str, Any]:
    """The predictions as they were written, each with its `outcome`, `numbers` and `why`.

    Raises PerpendError where one has no score, or a score no prediction: none is dropped after the fact.
    """
    by_name = {score.name: score for score in scores}
    names = [str(prediction["name"]) for prediction in written["predictions"]]
    if set(names) != set(by_name):
        raise PerpendError(f"the predictions {names} were scored as {sorted(by_name)}: please report this")
    return {
        "written": str(written["written"]),
        "scored": [
            {
                **{key: str(value) for key, value in prediction.items()},
                "outcome": by_name[name].outcome,
                "numbers": dict(by_name[name].numbers),
                "why": by_name[name].why,
            }
            for name, prediction in zip(names, written["predictions"])
        ],
    }


def sentences(scored: Mapping[str, Any]) -> list[str]:
    """One finding a prediction: what was predicted, and what came of it."""
    found = []
    for one in scored["scored"]:
        numbers = ", ".join(f"{key} {_number(value)}" for key, value in one["numbers"].items())
        because = f": {one['why']}" if one["why"] else ""
        if numbers and (not one["why"] or one["outcome"] == "undecided"):
            because += f" ({numbers})"
        found.append(f"Predicted before measuring: {one['statement']} Outcome: {one['outcome']}{because}.")
    return found


def _number(value: Any) -> str:
    if isinstance(value, (list, tuple)):  # a value and its 95 % interval
        return f"{value[0]:.3g} (95 % {value[1]:.3g} to {value[2]:.3g})"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    return f"{value:.3g}"


def with_interval(value: float, interval: Sequence[float] | None) -> Any:
    """A number for `Score.numbers`, with its interval where there is one."""
    return float(value) if interval is None else [float(value), *map(float, interval)]


def clusters_differ(
    aris: Mapping[str, float],
    metrics: Sequence[str],
    intervals: Mapping[str, Sequence[float]] | None = None,
) -> Score:
    """Scores ARI_BELOW_ONE from metric → mean ARI of one model, or of the model where it is highest."""
    numbers = {
        f"ARI {metric}": with_interval(aris[metric], (intervals or {}).get(metric))
        for metric in (*metrics, "content")
    }
    good = all(aris[metric] <= MATERIAL for metric in metrics) and aris["content"] == 1.0
    return Score(ARI_BELOW_ONE.name, "confirmed" if good else "refuted", numbers)


def by_order(name: str, tau: float | None, direction: int, numbers: Mapping[str, Any], why: str) -> Score:
    """A score from a rank correlation: 1 in the predicted direction, above 0, or not."""
    if tau is None:
        return Score(name, "undefined", numbers, why)
    along = direction * tau
    outcome = "confirmed" if along >= 1 else "mixed" if along > 0 else "refuted"
    return Score(name, outcome, numbers)


def by_pairs(
    name: str, signs: Sequence[int | None], numbers: Mapping[str, Any], unequal: str, unresolved: str
) -> Score:
    """A score from the directions of pairs: +1 as predicted, −1 against, None not told from noise.

    Kendall's τ is their mean. It is taken once with every None against the prediction and once with it; where
    the two do not have the same outcome, it is undecided. One pair alone can refute an order, and cannot
    confirm it: it falls as predicted by chance every second time. `unequal` and `unresolved`: the reasons
    given where there is no pair, and where a None decides.
    """
    if not signs:
        return Score(name, "undefined", numbers, unequal)
    outcomes = {
        by_order(name, sum(open_ if s is None else s for s in signs) / len(signs), 1, {}, "").outcome
        for open_ in (-1, 1)
    }
    if len(outcomes) > 1:
        return Score(name, "undecided", numbers, unresolved)
    (outcome,) = outcomes
    if outcome == "confirmed" and len(signs) == 1:
        why = "two models make one pair, whose tau is 1 or -1 whatever the cause; a trend needs three"
        return Score(name, "undecided", numbers, why)
    return Score(name, outcome, numbers)


def falls_flat(
    total: float,
    sink: float,
    dispersion: float,
    intervals: Mapping[str, Sequence[float]] | None = None,
) -> Score:
    """Scores ENTROPY_FALLS: ΔH (nats), Δs, relative change of C_A⊥, from first checkpoint to minimum.

    `intervals`: `total`, `sink_mass`, `dispersion_change` → (low, high).
    """
    known = intervals or {}
    numbers = {
        "change of H": with_interval(total, known.get("total")),
        "change of sink mass": with_interval(sink, known.get("sink_mass")),
        "relative change of C_A⊥": with_interval(dispersion, known.get("dispersion_change")),
    }
    if sink <= 0:
        why = "the sink mass did not rise while the entropy fell, so there is no emergence to speak of"
        return Score(ENTROPY_FALLS.name, "undefined", numbers, why)
    good = total < 0 and abs(dispersion) <= FLAT
    return Score(ENTROPY_FALLS.name, "confirmed" if good else "refuted", numbers)


def never_fell(sink: float) -> Score:
    """Scores ENTROPY_FALLS where H is lowest at the first checkpoint; `sink`: Δs from first to last."""
    numbers = {"change of sink mass": float(sink)}
    if sink > 0:
        return Score(ENTROPY_FALLS.name, "refuted", numbers)
    why = "neither did the sink emerge nor the entropy fall"
    return Score(ENTROPY_FALLS.name, "undefined", numbers, why)
