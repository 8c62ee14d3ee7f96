"""Lemma 1, Proposition 2 (iii), Lemma 2, Corollary 2: the sink and the content part exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import minimize_scalar

import perpend.geometry as g
from geometry.strategies import SEEDS, rows
from perpend.errors import InputError


def with_sink(mass: float, content: np.ndarray) -> np.ndarray:
    return np.concatenate([[mass], (1 - mass) * content])


@given(rows(2, least=3), SEEDS)
def test_the_distance_splits_orthogonally_for_any_sink_and_any_block(x, seed):
    p, q = x
    parts = len(p)
    tolerance = 1e-12 * ((g.clr(p) ** 2).sum() + (g.clr(q) ** 2).sum()) + 1e-40
    generator = np.random.default_rng(seed)
    one = int(generator.integers(parts))
    total = g.aitchison_distance(p, q) ** 2
    split = g.content_distance(p, q, one) ** 2 + (g.sink_balance(p, one) - g.sink_balance(q, one)) ** 2
    assert abs(total - split) <= tolerance
    block = generator.permutation(parts)[: generator.integers(1, parts)].tolist()
    inside = g.aitchison_distance(p[block], q[block]) if len(block) > 1 else 0.0
    split = g.content_distance(p, q, block) ** 2 + (g.sink_balance(p, block) - g.sink_balance(q, block)) ** 2
    assert abs(total - split - inside**2) <= tolerance


@given(rows(1, least=3))
def test_ilr_is_balance_first_and_the_rest_has_the_norm_of_the_content(x):
    scale = 1 + np.abs(g.clr(x)).max()
    coordinates = g.ilr(x)
    np.testing.assert_allclose(coordinates[:, 0], g.sink_balance(x), rtol=1e-10, atol=1e-13 * scale)
    np.testing.assert_allclose(
        np.linalg.norm(coordinates[:, 1:], axis=-1), g.content_dispersion(x), rtol=1e-10, atol=1e-13 * scale
    )


@given(rows(2, least=3, spread=4), st.floats(0.001, 0.999), st.floats(0.001, 0.999))
def test_content_does_not_see_the_sinks_masses(x, s, t):
    pi, eta = g.content(x)
    p, q = with_sink(s, pi), with_sink(t, eta)
    scale = 1 + np.abs(g.clr(x)).max()
    close = {"rtol": 1e-9, "atol": 1e-12 * scale}
    np.testing.assert_allclose(g.content_distance(p, q), g.aitchison_distance(pi, eta), **close)
    np.testing.assert_allclose(g.content_distance(p, q), g.content_distance(*x), **close)
    np.testing.assert_allclose(g.content_dispersion(p), np.linalg.norm(g.clr(pi)), **close)
    assert g.sink_mass(p) == pytest.approx(s, rel=1e-12)
    moved = abs(g.sink_balance(with_sink(t, pi)) - g.sink_balance(p))
    assert moved == pytest.approx(g.aitchison_distance(with_sink(t, pi), p), rel=1e-9, abs=1e-12 * scale)


@given(rows(2, least=3, spread=2))
def test_the_quotient_minimum_is_the_content_distance_and_is_attained(x):
    """Lemma 2: min of d_A over rows with these contents, found by a search over the sinks' logits."""
    pi, eta = np.log(g.content(x))

    def distance(first: float, second: float) -> float:
        return g.aitchison_distance(np.append(first, pi), np.append(second, eta), log=True)

    # Shifting both balances alike changes nothing, so the search is along their difference.
    found = minimize_scalar(lambda logit: distance(0.0, logit) ** 2, bracket=(-1.0, 1.0))
    floor = g.content_distance(*x)
    assert found.fun**0.5 >= floor * (1 - 1e-12) - 1e-14
    assert found.fun**0.5 == pytest.approx(floor, rel=1e-6, abs=1e-6)
    # Attained exactly where the balances agree.
    at = distance(pi.mean(), eta.mean())
    assert at == pytest.approx(floor, rel=1e-10, abs=1e-13)


@given(rows(2, least=4), SEEDS)
def test_a_larger_sink_leaves_a_smaller_content_distance(x, seed):
    """Nested projections: the content of a larger sink block never lies farther apart."""
    block = np.random.default_rng(seed).permutation(x.shape[-1])[:-2].tolist()
    nested = [g.content_distance(x[0], x[1], block[: k + 1]) for k in range(len(block))]
    assert all(b <= a + 1e-12 * (1 + np.abs(g.clr(x)).max()) for a, b in itertools.pairwise(nested))


def test_dominance_needs_one_constant_for_all_numbers_of_parts():
    """Corollary 2: κ_D d_A with a larger κ for fewer parts is dominated by κ_m/κ_D only."""
    p, q = np.array([0.98, 0.01, 0.01]), np.array([0.98, 0.018, 0.002])
    whole, part = g.aitchison_distance(p, q), g.aitchison_distance(g.content(p), g.content(q))
    assert part <= whole
    kappa = {3: 1.0, 2: 3.0}
    assert kappa[2] * part > kappa[3] * whole
    assert kappa[2] * part <= kappa[2] / kappa[3] * whole * kappa[3] + 1e-15


def test_the_content_dispersion_moves_with_a_shared_bias_except_at_two_parts_of_one():
    p, c = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.5, 0.3])
    assert abs(g.content_dispersion(g.perturb(p, c)) - g.content_dispersion(p)) > 0.1
    for two in ([0.3, 0.7], [1e-12, 1 - 1e-12]):
        assert g.content_dispersion(np.array(two)) == 0


def test_the_witness_in_closed_form():
    """Table 1's row d_A with sympy: L_s = log(27/7), B = √2 log 4."""
    p, q, r = np.array([0.9, 0.08, 0.02]), np.array([0.7, 0.24, 0.06]), np.array([0.9, 0.02, 0.08])
    balance = sympy.sqrt(sympy.Rational(2, 3)) * sympy.log(sympy.Rational(27, 7))
    distance = sympy.sqrt(2) * sympy.log(4)
    assert g.aitchison_distance(p, q) == pytest.approx(float(balance.evalf(30)), rel=1e-14)
    assert g.aitchison_distance(p, r) == pytest.approx(float(distance.evalf(30)), rel=1e-14)
    assert g.content_distance(p, r) == pytest.approx(float(distance.evalf(30)), rel=1e-14)
    assert g.content_distance(p, q) == pytest.approx(0, abs=1e-15)
    assert f"{g.aitchison_distance(p, q):.4f} {g.aitchison_distance(p, r):.4f}" == "1.1022 1.9605"


def test_log_rows_that_probabilities_cannot_hold():
    x = np.array([[0.0, -2000.0, -2001.0], [0.0, -1500.0, -1503.0]])
    assert g.content_distance(x[0], x[1], log=True) == pytest.approx(2 / np.sqrt(2))
    np.testing.assert_allclose(np.exp(g.content(x, log=True)).sum(-1), 1)
    assert (g.sink_mass(x, log=True) == 1).all()
    assert g.sink_balance(x, log=True)[0] == pytest.approx(np.sqrt(2 / 3) * 2000.5)
    with pytest.raises(InputError, match="content of rows"):
        g.content(np.exp(x))


@pytest.mark.parametrize("sink", [3, -4, [0, 0], [0, 3], [], [0, 1, 2], "first", None, True])
def test_a_sink_that_is_not_there_is_refused(sink):
    for function in (g.sink_mass, g.sink_balance, g.content, g.content_dispersion, g.split_entropy, g.ilr):
        with pytest.raises(InputError, match="sink"):
            function(np.array([0.5, 0.3, 0.2]), sink)


def test_a_sink_index_counts_from_the_end_and_in_any_order():
    x = np.array([0.5, 0.3, 0.2])
    np.testing.assert_array_equal(g.content(x, -1), g.content(x, 2))
    np.testing.assert_array_equal(g.content(x, [2, 1]), [1.0])
    assert g.sink_balance(x, [2, 0]) == g.sink_balance(x, [0, 2])
