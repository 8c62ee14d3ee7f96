"""The chain rule to rounding, Proposition 1 and its sharpness, Corollary 1, the Schur remark."""

from __future__ import annotations

import math
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import entropy as scipy_entropy

import perpend.geometry as g
from geometry.strategies import rows
from perpend.errors import InputError


def exact_entropy(parts: list[Fraction]) -> float:
    with mpmath.workdps(40):
        values = [mpmath.mpf(x.numerator) / x.denominator for x in parts]
        return float(-sum(v * mpmath.log(v) for v in values))


@given(rows(1, least=3, spread=40))
def test_the_chain_rule_to_rounding(x):
    split = g.split_entropy(x)
    assert np.abs(split.total - split.binary - split.weighted_content).max() <= 1e-12 * max(
        1, split.total.max()
    )
    np.testing.assert_allclose(split.total, scipy_entropy(x, axis=-1), rtol=1e-10, atol=1e-14)
    in_logs = g.split_entropy(np.log(x), log=True)
    for name in split._fields:
        np.testing.assert_allclose(getattr(in_logs, name), getattr(split, name), rtol=1e-7, atol=1e-12)


@given(rows(1, least=4), st.integers(2, 3))
def test_a_sink_block_adds_its_own_entropy(x, size):
    block = list(range(size))
    split = g.split_entropy(x, block)
    inside = split.sink_mass * g.entropy(g.closure(x[:, block]))
    np.testing.assert_allclose(
        split.total, split.binary + inside + split.weighted_content, rtol=1e-12, atol=1e-13
    )


def test_at_a_sink_beyond_float_the_logs_still_tell_the_content():
    x = np.array([0.0, -800.0, -800.0, -803.0])
    split = g.split_entropy(x, log=True)
    assert split.sink_mass == 1
    assert split.total == 0
    assert split.binary == 0
    assert split.content == pytest.approx(g.entropy(g.closure(np.exp([0.0, 0.0, -3.0]))))
    near = np.array([1 - 3e-17, 1e-17, 1e-17, 1e-17])
    assert g.split_entropy(near).content == pytest.approx(math.log(3), rel=1e-14)


def test_zeros_add_nothing_and_the_uniform_row_has_log_d():
    assert g.entropy(np.array([1.0, 0.0, 0.0])) == 0
    assert g.entropy(np.array([0.5, 0.5, 0.0])) == pytest.approx(math.log(2), rel=1e-15)
    assert g.entropy(np.full(64, 1 / 64)) == pytest.approx(math.log(64), rel=1e-14)
    with pytest.raises(InputError, match="content of rows"):
        g.split_entropy(np.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))


def test_proposition_1_witness_digit_for_digit():
    p = [Fraction(19, 20), Fraction(1, 40), Fraction(1, 40)]
    q = [Fraction(1, 2), Fraction(999, 2000), Fraction(1, 2000)]
    assert sum(p) == sum(q) == 1
    for row in (p, q):
        assert g.entropy(np.array([float(v) for v in row])) == pytest.approx(exact_entropy(row), rel=1e-14)
    hp, hq = (g.split_entropy(np.array([float(v) for v in row])) for row in (p, q))
    assert f"{hp.total:.3f} {hq.total:.3f}" == "0.233 0.697"
    assert hp.content == pytest.approx(math.log(2), rel=1e-15)
    assert f"{hq.content:.4f}" == "0.0079"
    assert hp.total < hq.total
    assert hp.content > hq.content
    assert g.content_dispersion(np.array([0.95, 0.025, 0.025])) == 0
    assert f"{g.content_dispersion(np.array([0.5, 0.4995, 0.0005])):.2f}" == "4.88"


def test_the_schur_remark_digit_for_digit():
    p, q = np.array([0.800, 0.199, 0.001]), np.array([0.780, 0.219, 0.001])
    ordered = np.sort(p)[::-1].cumsum(), np.sort(q)[::-1].cumsum()
    assert (ordered[0] >= ordered[1] - 1e-15).all()  # p majorizes q
    norms = np.linalg.norm(g.clr(np.stack([p, q])), axis=-1)
    entropies = g.entropy(np.stack([p, q]))
    assert [f"{v:.3f}" for v in (*entropies, *norms)] == ["0.507", "0.533", "4.988", "5.000"]
    assert entropies[0] < entropies[1]
    assert norms[0] < norms[1]


@given(rows(1, least=3, spread=3))
def test_entropy_falls_with_the_sink_from_theta_on_while_the_dispersion_stays(x):
    """Corollary 1: the maximizer is θ = 1/(1 + e^{H(π)}) < ½, and C_A⊥ does not move."""
    pi = g.content(x[0])
    theta = 1 / (1 + math.exp(g.entropy(pi)))
    assert theta < 0.5
    masses = np.append(theta, np.linspace(0.5, 0.999, 60))
    family = np.concatenate([masses[:, None], (1 - masses)[:, None] * pi], -1)
    total = g.entropy(family)
    assert total[0] >= total.max() - 1e-15
    assert (np.diff(total[1:]) < 0).all()
    around = np.array([theta * (1 - 1e-3), theta, theta * (1 + 1e-3)])
    values = g.entropy(np.concatenate([around[:, None], (1 - around)[:, None] * pi], -1))
    assert values[1] >= values.max() - 1e-15
    np.testing.assert_allclose(
        g.content_dispersion(family), g.content_dispersion(x[0]), rtol=1e-9, atol=1e-12
    )


@pytest.mark.parametrize("parts", [3, 8, 64])
def test_the_collapse_can_approach_log_d_with_flat_content(parts):
    uniform = np.full(parts - 1, 1 / (parts - 1))
    start = np.append(1 / parts, (1 - 1 / parts) * uniform)
    end = np.append(1 - 1e-9, 1e-9 * uniform)
    assert g.entropy(start) == pytest.approx(math.log(parts), rel=1e-14)
    assert g.entropy(start) - g.entropy(end) > math.log(parts) - 1e-6
    assert g.content_dispersion(start) == 0
    assert g.content_dispersion(end) == pytest.approx(0, abs=1e-14)


@pytest.mark.parametrize("parts", range(3, 12))
def test_proposition_1_holds_at_every_number_of_parts_and_not_at_two(parts):
    """Appendix B's family: uniform content under a large sink against degenerate content under ½."""
    m, epsilon, s = parts - 1, 1e-4, 0.99
    p = np.append(s, np.full(m, (1 - s) / m))
    q = np.append(0.5, 0.5 * np.append(1 - (m - 1) * epsilon, np.full(m - 1, epsilon)))
    high, low = g.split_entropy(p), g.split_entropy(q)
    assert high.total < low.total
    assert high.content > low.content
    # Sharp: at equal sink mass, and at D = 2, no inversion: H(p) − H(q) = (1−s)(H(p′) − H(q′)).
    same = np.append(s, (1 - s) * g.content(q))
    gap = g.entropy(p) - g.entropy(same)
    assert gap == pytest.approx((1 - s) * (high.content - low.content), rel=1e-9)
    assert g.split_entropy(np.array([0.3, 0.7])).content == 0
