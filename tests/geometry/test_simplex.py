"""The simplex is a vector space with an inner product; scikit-bio agrees; Proposition 2 (i, ii, iv)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from skbio.stats import composition as skbio

import perpend.geometry as g
from geometry.strategies import SEEDS, rows, softmax
from perpend.errors import InputError

CLOSE = {"rtol": 1e-11, "atol": 1e-11}
uniform = lambda parts: np.full(parts, 1 / parts)  # noqa: E731


@given(rows(3))
def test_perturbation_is_an_abelian_group(x):
    p, q, r = x
    np.testing.assert_allclose(g.perturb(p, q), g.perturb(q, p), rtol=1e-13)
    np.testing.assert_allclose(g.perturb(g.perturb(p, q), r), g.perturb(p, g.perturb(q, r)), rtol=1e-11)
    np.testing.assert_allclose(g.perturb(p, uniform(len(p))), p, rtol=1e-12)
    np.testing.assert_allclose(g.perturb(p, g.power(p, -1)), uniform(len(p)), rtol=1e-11)


@given(rows(2), st.floats(-3, 3), st.floats(-3, 3))
def test_powering_distributes(x, a, b):
    p, q = x
    np.testing.assert_allclose(
        g.clr(g.power(g.perturb(p, q), a, log=False)), a * (g.clr(p) + g.clr(q)), rtol=1e-9, atol=1e-9
    )
    np.testing.assert_allclose(
        g.power(np.log(p), a + b, log=True),
        g.perturb(g.power(np.log(p), a, log=True), g.power(np.log(p), b, log=True), log=True),
        rtol=1e-11,
        atol=1e-11,
    )


@given(rows(2))
def test_clr_and_ilr_are_isometries_with_inverses(x):
    scale = 1 + np.abs(g.clr(x)).max()
    np.testing.assert_allclose(g.clr(x).sum(-1), 0, atol=1e-13 * scale)
    np.testing.assert_allclose(g.clr_inv(g.clr(x)), x, rtol=1e-13 * scale)
    for sink in (0, x.shape[-1] - 1):
        np.testing.assert_allclose(g.ilr_inv(g.ilr(x, sink), sink), x, rtol=1e-12 * scale)
        distance = np.linalg.norm(g.ilr(x[0], sink) - g.ilr(x[1], sink))
        np.testing.assert_allclose(distance, g.aitchison_distance(*x), rtol=1e-9, atol=1e-14 * scale)


@given(rows(2, least=3), SEEDS)
def test_scikit_bio_agrees(x, seed):
    basis = g.sink_basis(x.shape[-1]).numpy()
    np.testing.assert_allclose(g.closure(7 * x), skbio.closure(7 * x), rtol=1e-15)
    np.testing.assert_allclose(g.clr(x), skbio.clr(x), **CLOSE)
    np.testing.assert_allclose(g.clr_inv(g.clr(x)), skbio.clr_inv(skbio.clr(x)), rtol=1e-10)
    np.testing.assert_allclose(g.ilr(x), skbio.ilr(x, basis=basis), **CLOSE)
    np.testing.assert_allclose(
        g.ilr_inv(g.ilr(x)), skbio.ilr_inv(skbio.ilr(x, basis=basis), basis=basis), **CLOSE
    )
    np.testing.assert_allclose(g.perturb(*x), skbio.perturb(*x), rtol=1e-11)
    np.testing.assert_allclose(g.power(x[0], 0.3), skbio.power(x[0], 0.3), rtol=1e-11)
    with_zero = x.copy()
    with_zero[0, np.random.default_rng(seed).integers(x.shape[-1])] = 0
    replaced = g.replace_zeros(with_zero, 1e-6)
    np.testing.assert_allclose(replaced.rows, skbio.multi_replace(with_zero, delta=1e-6), rtol=1e-12)
    assert replaced.count == 1


def test_the_sink_basis_is_scikit_bios_partition_of_sink_against_rest():
    # Its sequential binary partition, with one line a split: + numerator, − denominator.
    partition = np.array([[1, -1, -1, -1], [0, 1, -1, -1], [0, 0, 1, -1]])
    np.testing.assert_allclose(g.sink_basis(4).numpy(), skbio.sbp_basis(partition), rtol=1e-15)
    block = np.array([[1, 1, -1, -1, -1], [0, 0, 1, -1, -1], [0, 0, 0, 1, -1], [1, -1, 0, 0, 0]])
    np.testing.assert_allclose(
        g.sink_basis(5, [0, 1]).numpy(), skbio.sbp_basis(block), rtol=1e-15, atol=1e-16
    )


@given(rows(3))
def test_a_shared_logit_bias_is_a_perturbation_and_leaves_distances(x):
    p, q, c = x
    np.testing.assert_allclose(softmax(np.log(p) + np.log(c)), g.perturb(p, c), rtol=1e-11)
    scale = 1 + np.abs(g.clr(x)).max()
    moved = g.aitchison_distance(np.log(p) + np.log(c), np.log(q) + np.log(c), log=True)
    np.testing.assert_allclose(moved, g.aitchison_distance(p, q), rtol=1e-10, atol=1e-13 * scale)


@given(rows(4, spread=5), st.floats(0.1, 10))
def test_temperature_scales_distance_variance_and_mean(x, tau):
    logits = np.log(x)
    hot = softmax(logits / tau)
    np.testing.assert_allclose(hot, g.power(x, 1 / tau), rtol=1e-9)
    log_hot = g.power(logits, 1 / tau, log=True)
    np.testing.assert_allclose(
        g.aitchison_distance(log_hot[0], log_hot[1], log=True), g.aitchison_distance(*x[:2]) / tau, **CLOSE
    )
    variance = g.aitchison_variance(x)
    np.testing.assert_allclose(
        g.aitchison_variance(log_hot, log=True), variance / tau**2, rtol=1e-9, atol=1e-11
    )
    np.testing.assert_allclose(
        g.clr(g.aitchison_mean(log_hot, log=True), log=True), g.clr(g.aitchison_mean(x)) / tau, **CLOSE
    )


def test_ilr_cosine_survives_a_temperature_per_head_but_not_per_row():
    generator = np.random.default_rng(3)
    heads = softmax(3 * generator.normal(size=(2, 50, 8)))  # two heads of 50 rows
    means = g.aitchison_mean(heads)
    before = g.ilr_cosine(means[0], means[1])
    per_head = g.aitchison_mean(g.power(heads, np.array([[0.5], [3.0]]) * np.ones((2, 50))))
    np.testing.assert_allclose(g.ilr_cosine(per_head[0], per_head[1]), before, rtol=1e-12)
    per_row = g.aitchison_mean(g.power(heads, generator.uniform(0.2, 5, (2, 50))))
    assert abs(g.ilr_cosine(per_row[0], per_row[1]) - before) > 0.02


def test_ilr_cosine_is_not_invariant_under_a_shared_bias():
    # Proposition 2's own example: p = C(e^v), q = C(e^{-v}), c = C(e^{2v}) turns −1 into +1.
    v = np.array([1.0, -2.0, 0.5, 0.5])
    p, q, c = softmax(v), softmax(-v), softmax(2 * v)
    assert g.ilr_cosine(p, q) == pytest.approx(-1, abs=1e-15)
    assert g.ilr_cosine(g.perturb(c, p), g.perturb(c, q)) == pytest.approx(1, abs=1e-15)


def test_ilr_cosine_at_the_uniform_row_is_nan_by_definition():
    for parts in (2, 3, 7, 64):
        assert np.isnan(g.ilr_cosine(uniform(parts), softmax(np.arange(parts) * 1.0)))


@given(rows(2, least=3), SEEDS)
def test_a_subcomposition_is_an_orthogonal_projection(x, seed):
    parts = x.shape[-1]
    kept = np.sort(np.random.default_rng(seed).permutation(parts)[: max(2, parts // 2)])
    difference = g.clr(x[0]) - g.clr(x[1])
    projection = np.zeros((parts, parts))
    projection[np.ix_(kept, kept)] = np.eye(len(kept)) - 1 / len(kept)
    np.testing.assert_allclose(projection @ projection, projection, atol=1e-14)
    scale = 1 + np.abs(g.clr(x)).max()
    part = g.aitchison_distance(g.closure(x[0][kept]), g.closure(x[1][kept]))
    np.testing.assert_allclose(part, np.linalg.norm(projection @ difference), rtol=1e-9, atol=1e-13 * scale)
    assert part <= g.aitchison_distance(*x) + 1e-13 * scale


@given(rows(5, spread=3), SEEDS)
def test_the_mean_minimises_the_sum_of_squared_distances(x, seed):
    center = g.aitchison_mean(x)
    cost = lambda point: (g.aitchison_distance(x, point) ** 2).sum()  # noqa: E731
    step = np.random.default_rng(seed).normal(size=(20, x.shape[-1]))
    elsewhere = [cost(g.perturb(center, softmax(1e-2 * move))) for move in step]
    assert min(elsewhere) >= cost(center) * (1 - 1e-12)
    np.testing.assert_allclose(cost(center) / len(x), g.aitchison_variance(x), rtol=1e-10, atol=1e-20)


def test_the_mean_in_logs_is_the_softmax_of_the_mean_logit_and_takes_weights():
    logits = np.random.default_rng(0).normal(0, 500, (2, 6, 5))  # far beyond what exp can hold
    mean = g.aitchison_mean(logits, log=True)
    shifted = logits.mean(1) - logits.mean(1)[:, :1]
    np.testing.assert_allclose(mean - mean[:, :1], shifted, rtol=1e-12, atol=1e-9)
    weights = np.array([1.0, 0, 2, 0, 0, 3])
    weighted = g.aitchison_mean(logits, weights=weights, log=True)
    by_hand = (logits * weights[:, None]).sum(1) / 6
    np.testing.assert_allclose(weighted - weighted[:, :1], by_hand - by_hand[:, :1], rtol=1e-12, atol=1e-9)
    np.testing.assert_array_equal(
        g.aitchison_mean(logits, weights=np.broadcast_to(weights, (2, 6)), log=True), weighted
    )
    with pytest.raises(InputError, match="not all zero"):
        g.aitchison_mean(logits, weights=np.zeros(6), log=True)
    with pytest.raises(InputError, match="do not fit"):
        g.aitchison_mean(logits, weights=np.ones(5), log=True)
    with pytest.raises(InputError, match="no batch axis"):
        g.aitchison_mean(logits[0, 0], log=True)
    with pytest.raises(InputError, match="no mean of no rows"):
        g.aitchison_mean(logits[:, :0], log=True)


@settings(max_examples=50)
@given(rows(2), st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_log_ratio_functions_do_not_see_the_scale(x, a, b):
    scale = 1 + np.abs(g.clr(x)).max()
    np.testing.assert_allclose(
        g.aitchison_distance(a * x[0], b * x[1]), g.aitchison_distance(*x), rtol=1e-9, atol=1e-12 * scale
    )
    np.testing.assert_allclose(g.sink_balance(a * x), g.sink_balance(x), rtol=1e-9, atol=1e-12 * scale)
    np.testing.assert_allclose(g.clr(a * x), g.clr(x), rtol=1e-9, atol=1e-12 * scale)


def test_replacement_keeps_ratios_and_counts():
    replaced = g.replace_zeros(np.array([[0.5, 0.3, 0.0, 0.2], [0.25, 0.25, 0.25, 0.25], [0, 0, 0, 4.0]]))
    assert replaced.count == 4
    np.testing.assert_allclose(replaced.rows.sum(-1), 1, rtol=1e-15)
    assert replaced.rows[0, 0] / replaced.rows[0, 1] == pytest.approx(5 / 3, rel=1e-15)
    np.testing.assert_array_equal(replaced.rows[1], np.full(4, 0.25))
    assert replaced.rows[2, 3] == pytest.approx(1 - 3e-6, rel=1e-15)
    for epsilon in (0.5, 0.0, -1.0):
        with pytest.raises(InputError, match="epsilon"):
            g.replace_zeros(np.array([0.0, 0.0, 1.0]), epsilon)


def test_a_basis_that_is_not_orthonormal_is_refused():
    x = np.array([0.2, 0.3, 0.5])
    for wrong in (np.ones((2, 3)), np.eye(3)[:2], np.eye(3)):
        with pytest.raises(InputError, match="orthonormal"):
            g.ilr(x, basis=wrong)


def test_transforms_work_under_torch_func_and_in_half_precision() -> None:
    row = torch.rand(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) + 0.1
    free = row.clone().requires_grad_()
    g.clr(free)[..., 0].sum().backward()
    found = torch.func.grad(lambda x: g.clr(x)[..., 0].sum())(row)
    np.testing.assert_allclose(found.numpy(), free.grad.numpy(), rtol=1e-12)
    slopes = torch.func.jacrev(g.clr)(row[0])
    by_hand = (torch.eye(7, dtype=torch.float64) - 1 / 7) / row[0]
    np.testing.assert_allclose(slopes.numpy(), by_hand.numpy(), rtol=1e-10, atol=1e-14)
    half = g.clr(row.bfloat16())
    np.testing.assert_allclose(half.double().numpy(), g.clr(row).numpy(), atol=0.03)
