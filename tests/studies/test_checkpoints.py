"""Training curves: exact splits, the sentence, and checkpoints that are not what their names say."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from perpend.errors import InputError
from perpend.geometry import content_dispersion, split_entropy
from perpend.studies.checkpoints import (
    FIELDS,
    Checkpoint,
    checkpoint_study,
    inspect,
    sentence,
    split,
    step_of,
)


def rows_means(rows: np.ndarray) -> dict[str, float]:
    """FIELDS of a set of rows (n, parts), the sink at 0, from the definitions."""
    parts = split_entropy(rows, 0)
    return {
        "total": parts.total.mean(),
        "binary": parts.binary.mean(),
        "content": parts.content.mean(),
        "weighted_content": parts.weighted_content.mean(),
        "within_sink": 0.0,
        "sink_mass": parts.sink_mass.mean(),
        "dispersion": content_dispersion(rows, 0).mean(),
    }


def of_rows(name: str, *layers: np.ndarray, weights: str | None = None) -> Checkpoint:
    table = pd.DataFrame([{"layer": i, **rows_means(rows)} for i, rows in enumerate(layers)])
    return Checkpoint(name, step_of(name), weights or name, table, np.empty((0, len(FIELDS))))


def drawn(sink: float, spread: float, seed: int = 0, count: int = 200, keys: int = 12) -> np.ndarray:
    """Rows with a mean sink share near `sink` and contents of log-ratio spread `spread`."""
    generator = np.random.default_rng(seed)
    content = np.exp(spread * generator.normal(size=(count, keys - 1)))
    content /= content.sum(1, keepdims=True)
    share = 1 / (1 + np.exp(-np.log(sink / (1 - sink)) - 0.5 * generator.normal(size=(count, 1))))
    return np.concatenate([share, (1 - share) * content], 1)


def test_the_split_of_the_fall_is_exact() -> None:
    study = checkpoint_study([
        of_rows("step1", drawn(0.1, 0.5), drawn(0.2, 0.7, 1)),
        of_rows("step2", drawn(0.9, 0.5), drawn(0.7, 1.5, 1)),
    ])  # fmt: skip
    found = study.results["collapse"]
    assert found["total"] < -0.5
    assert abs(found["residual"]) < 1e-12
    assert abs(found["residual_split"]) < 1e-12
    parts = found["sink_growth"] + found["content_change"] + found["covariance"]
    assert parts == pytest.approx(found["weighted_content"], abs=1e-12)
    assert found["share"] == pytest.approx(1 - found["content"] / found["total"])
    assert abs(found["covariance"]) > 1e-4  # the term a split of the means would miss
    json.dumps(study.results, allow_nan=False)


def test_a_growing_sink_alone_is_named_and_leaves_content_alone() -> None:
    study = checkpoint_study([of_rows("step1", drawn(0.2, 1.0)), of_rows("step2", drawn(0.95, 1.0))])
    found = study.results["collapse"]
    assert found["content"] == pytest.approx(0, abs=1e-12)
    assert found["dispersion_change"] == pytest.approx(0, abs=1e-12)
    assert found["share"] == pytest.approx(1)
    assert ": sink (" in study.findings[0]


def test_content_that_narrows_is_named() -> None:
    study = checkpoint_study([of_rows("step1", drawn(0.3, 0.2)), of_rows("step2", drawn(0.3, 3.0))])
    assert study.results["collapse"]["content_change"] < -0.3
    assert ": content (" in study.findings[0]
    assert study.results["disagreement"]["rate"] == 0


def test_a_sinking_sink_reads_as_not_falling() -> None:
    a, b = (of_rows("x", drawn(s, 1.0)).means for s in (0.9, 0.2))
    assert "not falling" in sentence(split(a, b))


def test_disagreeing_steps_are_those_of_opposite_signs() -> None:
    # H falls through the sink while the content spreads less: C_A⊥ falls too
    study = checkpoint_study([
        of_rows("step1", drawn(0.1, 1.0)), of_rows("step2", drawn(0.9, 0.7)),
        of_rows("step3", drawn(0.95, 2.0)),
    ])  # fmt: skip
    assert study.results["disagreement"]["where"] == [["step1", "step2"]]
    assert list(study.tables["checkpoints"]["disagrees_with_next"]) == [True, False, False]


def test_an_entropy_that_never_falls_has_no_split() -> None:
    study = checkpoint_study([of_rows("step1", drawn(0.9, 1.0)), of_rows("step2", drawn(0.1, 1.0))])
    assert study.results["collapse"]["share"] is None
    assert "never fell" in study.undefined["collapse"]


def test_duplicates_and_disorder_are_flagged_and_kept_out_of_the_curve() -> None:
    said, doubles = inspect([("step2", 2, "a"), ("step1", 1, "b"), ("step9", 9, "a")])
    assert doubles == [2]
    assert len(said) == 2
    assert "very weights of step2" in said[0]
    assert "out of order" in said[1]
    assert inspect([("step1", 1, "a"), ("step2", 2, "b"), ("final", None, "c")]) == ([], [])
    study = checkpoint_study([
        of_rows("step1", drawn(0.1, 1.0), weights="w"),
        of_rows("step2", drawn(0.9, 1.0)),
        of_rows("step3", drawn(0.1, 1.0), weights="w"),
    ])  # fmt: skip
    assert list(study.tables["checkpoints"]["duplicate"]) == [False, False, True]
    assert study.results["disagreement"]["steps"] == 1
    assert "very weights" in study.findings[0]


def test_one_checkpoint_is_no_curve() -> None:
    with pytest.raises(InputError, match="at least two different"):
        checkpoint_study(
            [of_rows("step1", drawn(0.1, 1.0)), of_rows("step2", drawn(0.1, 1.0), weights="step1")]
        )


def test_steps_in_names() -> None:
    names = ("step512", "checkpoint-500", "stage1-step1000-tokens4B", "run/7", "main")
    assert [step_of(name) for name in names] == [512, 500, 1000, 7, None]
