"""Along and across: exact parts, safe at zero, and the cosine identity."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import perpend.geometry as g
from geometry.strategies import SEEDS
from perpend.errors import InputError


@given(SEEDS, st.integers(1, 40), st.floats(-12, 12))
def test_the_parts_add_up_and_are_orthogonal(seed, dim, magnitude):
    generator = np.random.default_rng(seed)
    update, reference = generator.normal(size=(2, 3, dim)) * [[[10.0**magnitude]], [[10.0**-magnitude]]]
    split = g.decompose(update, reference)
    np.testing.assert_allclose(
        split.parallel + split.perpendicular, update, rtol=1e-12, atol=1e-14 * 10.0**magnitude
    )
    np.testing.assert_allclose(split.alpha[:, None] * reference, split.parallel, rtol=1e-12)
    norms = [np.linalg.norm(v, axis=-1) for v in (update, reference)]
    inner = (split.perpendicular * reference).sum(-1)
    assert (np.abs(inner) <= 1e-13 * norms[0] * norms[1]).all()
    pythagoras = (split.parallel**2).sum(-1) + (split.perpendicular**2).sum(-1)
    np.testing.assert_allclose(pythagoras, norms[0] ** 2, rtol=1e-12)


def test_zeros_are_defined_or_marked():
    update, reference = (
        np.array([[1.0, 2.0], [2.0, 4.0], [0.0, 0.0], [3.0, -1.0]]),
        np.array([[0.0, 0.0], [1.0, 2.0], [1.0, 0.0], [1.0, 3.0]]),
    )
    split = g.decompose(update, reference)
    np.testing.assert_array_equal(split.parallel[0], [0, 0])
    np.testing.assert_array_equal(split.perpendicular[0], update[0])
    assert split.alpha[0] == 0
    assert split.ratio[0] == 0
    assert split.alpha[1] == 2
    assert np.isinf(split.ratio[1])
    assert np.isnan(split.ratio[2])
    assert split.alpha[3] == 0
    assert split.ratio[3] == 0


def test_huge_and_tiny_references_stay_in_range():
    for scale in (1e-200, 1e200):
        split = g.decompose(np.array([3.0, 4.0]), np.array([scale, 0.0]))
        np.testing.assert_array_equal(split.parallel, [3, 0])
        assert split.alpha == pytest.approx(3 / scale)
    split = g.decompose(torch.tensor([3.0, 4.0]), torch.tensor([1e-30, 0.0]))
    assert split.parallel.tolist() == [3, 0]


@given(SEEDS, st.integers(2, 30), st.floats(-3, 3))
def test_the_cosine_identity_is_exact(seed, dim, alpha):
    generator = np.random.default_rng(seed)
    x = generator.normal(size=(4, dim))
    update = alpha * x + generator.normal(size=(4, dim)) * 10.0 ** generator.integers(-3, 2)
    result = g.cosine_identity(update, x)
    direct = (x * (x + update)).sum(-1) / np.linalg.norm(x, axis=-1) / np.linalg.norm(x + update, axis=-1)
    np.testing.assert_allclose(result.cosine, direct, atol=1e-12)
    np.testing.assert_allclose(result.exact, direct, atol=1e-11)
    np.testing.assert_allclose(result.gap, result.exact - (1 - result.rho**2 / 2), atol=1e-14)


def test_the_second_order_form_is_of_fourth_order_for_small_updates_and_fails_for_large():
    x, across = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    small = [abs(g.cosine_identity(step * across, x).gap) for step in (1e-1, 1e-2)]
    assert small[0] / small[1] == pytest.approx(1e4, rel=0.05)
    large = g.cosine_identity(3 * across, x)
    assert large.exact == pytest.approx(1 / np.sqrt(10))
    assert large.second_order == -3.5
    reversed_ = g.cosine_identity(-3 * x + across, x)
    assert reversed_.exact == pytest.approx(-2 / np.sqrt(5)) == reversed_.cosine
    turned = g.cosine_identity(-x + across, x)
    assert turned.exact == 0
    assert np.isinf(turned.rho)
    assert np.isnan(g.cosine_identity(across, 0 * x).exact)


def test_half_precision_is_computed_in_single():
    update, reference = torch.randn(2, 5, 64).bfloat16()
    split = g.decompose(update, reference)
    assert split.parallel.dtype == torch.float32
    expected = g.decompose(update.double(), reference.double())
    torch.testing.assert_close(split.alpha.double(), expected.alpha, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_split_is_refused():
    with pytest.raises(InputError, match="must agree"):
        g.decompose(np.ones(3), np.ones(4))
    with pytest.raises(InputError, match=r"update: 1 NaN or infinite value \(first at index \(1, 0\)\)"):
        g.decompose(np.array([[1.0, 2.0], [np.nan, 1.0]]), np.ones(2))


@pytest.mark.parametrize("size", [1e-250, 1e-160, 1e160, 1e250])
def test_ratio_and_cosine_do_not_depend_on_the_common_size(size):
    rng = np.random.default_rng(0)
    update, reference = rng.normal(size=(4, 6)), rng.normal(size=(4, 6))
    np.testing.assert_allclose(
        g.decompose(size * update, size * reference).ratio, g.decompose(update, reference).ratio, rtol=1e-12
    )
    for name in ("cosine", "exact", "rho", "alpha"):
        scaled, plain = (g.cosine_identity(s * update, s * reference) for s in (size, 1.0))
        np.testing.assert_allclose(getattr(scaled, name), getattr(plain, name), rtol=1e-12)
