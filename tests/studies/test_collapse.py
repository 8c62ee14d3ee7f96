"""Collapse disagreement and the regime rule on hand-made curves."""

from __future__ import annotations

import math

import numpy as np
import pytest

from perpend.studies.collapse import disagreement, dispersion_disagreement, entropy_disagreement
from perpend.studies.regime import coefficient_of_variation, regime


def test_steps_in_opposite_directions_are_counted_and_named() -> None:
    found = entropy_disagreement([3.0, 2.0, 2.5, 2.5, 1.0], [1.0, 1.2, 1.3, 1.4, 1.1])
    assert found.steps == 4
    assert found.where == (0,)
    assert found.rate == 0.25


def test_a_flat_step_is_no_disagreement_and_an_undefined_layer_no_step() -> None:
    found = disagreement([1.0, 2.0, math.nan, 1.0, 2.0], [2.0, 1.0, 1.0, 1.0, 0.0])
    assert found.steps == 2
    assert found.where == (0, 3)


def test_dispersion_form_reads_a_rising_spread_as_falling_entropy() -> None:
    assert dispersion_disagreement([2.0, 1.0], [5.0, 6.0]).rate == 0
    assert dispersion_disagreement([2.0, 1.0], [5.0, 4.0]).rate == 1


def test_one_layer_has_no_steps() -> None:
    assert math.isnan(disagreement([1.0], [1.0]).rate)


def test_regime_thresholds() -> None:
    def with_cv(cv: float) -> np.ndarray:
        return np.array([1 - cv, 1 + cv]) / 2

    assert coefficient_of_variation(with_cv(0.3)) == pytest.approx(0.3)
    assert regime(with_cv(0.35)).verdict == "content"
    assert regime(with_cv(0.39)).verdict == "abstain"
    assert regime(with_cv(0.43)).verdict == "js"
    assert regime(np.array([np.nan])).verdict == "abstain"
    assert regime(np.array([0.2, np.nan, 0.2])).cv == 0


def test_without_a_sink_the_rule_is_said_not_to_apply() -> None:
    uniform = regime(np.full((2, 4), 1 / 64), 1 / 64)
    assert uniform.verdict == "content", "the published thresholds stay"
    assert not uniform.applies
    assert regime(np.full((2, 4), 0.3), 1 / 64).applies
    assert regime(np.full((2, 4), 1 / 64)).applies, "nothing is told without the uniform share"
