"""All rows against all: symmetric to the bit, ties and digits kept, however it is computed."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch

import perpend.geometry as g
from geometry.strategies import METRICS, POLICIES, options, softmax
from perpend.geometry.metrics import _distances


@pytest.fixture(scope="module")
def heads() -> np.ndarray:
    """150 rows of 33 keys with strong sinks, one row twice, one row nearly twice."""
    generator = np.random.default_rng(0)
    logits = generator.normal(0, 2, (150, 33))
    logits[:, 0] += 5
    logits[7] = logits[101]
    logits[40] = logits[41] + 1e-9 * generator.normal(size=33)
    return logits


@pytest.mark.parametrize(("name", "policy"), [*product(METRICS, POLICIES)])
def test_the_matrix_is_the_pairs_symmetric_to_the_bit_and_ties_equal_rows(heads, name, policy):
    x = softmax(heads)
    matrix = g.pairwise(x, **options(name, policy))
    assert matrix.dtype == np.float64
    assert matrix.shape == (150, 150)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_array_equal(np.diag(matrix), 0)
    assert (matrix >= 0).all()
    assert matrix[7, 101] == 0
    others = np.delete(np.arange(150), [7, 101])
    np.testing.assert_array_equal(matrix[7, others], matrix[101, others])
    apart = g.dissimilarity(x[:, None], x[None], **options(name, policy))
    np.testing.assert_allclose(matrix, apart, rtol=1e-10, atol=1e-18)
    in_logs = g.pairwise(heads, **options(name, policy), log=True)
    np.testing.assert_allclose(in_logs, matrix, rtol=1e-5, atol=1e-14)
    assert 0 < matrix[40, 41] < matrix[40, 42]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("few", [0, 1], ids=["by differences", "by products"])
@pytest.mark.parametrize("name", METRICS)
def test_the_matrix_is_the_same_in_strips_on_threads_and_with_gradients(
    heads, name, few, threads, monkeypatch
):
    x = softmax(heads)
    whole = g.pairwise(x, **options(name, "keep"))
    before = torch.get_num_threads()
    monkeypatch.setattr("perpend.geometry.metrics.FEW", few)
    monkeypatch.setattr("perpend.geometry.metrics.BAND", 16)
    try:
        torch.set_num_threads(threads)
        in_strips = g.pairwise(x, **options(name, "keep"))
        by_torch = g.pairwise(torch.from_numpy(x).requires_grad_(), **options(name, "keep"))
    finally:
        torch.set_num_threads(before)
    np.testing.assert_allclose(in_strips, whole, rtol=1e-13, atol=1e-18)
    np.testing.assert_array_equal(in_strips, in_strips.T)
    assert by_torch.requires_grad
    np.testing.assert_allclose(by_torch.detach().numpy(), whole, rtol=1e-12, atol=1e-18)


@pytest.mark.parametrize("spread", [1.0, 1e-3, 1e-7, 1e-12])
def test_euclidean_distances_keep_their_digits_however_near(spread):
    """Five close groups far from one another and from 0, against 80-bit arithmetic."""
    generator = np.random.default_rng(1)
    points = 100 + generator.normal(size=(5, 1, 20)) + spread * generator.normal(size=(5, 40, 20))
    points = points.reshape(200, 20)[generator.permutation(200)]
    wide = points.astype(np.longdouble)
    expected = np.sqrt(np.square(wide[:, None] - wide).sum(-1))
    found = _distances(torch.from_numpy(points)).numpy()
    np.testing.assert_array_equal(found == 0, np.eye(200, dtype=bool))
    pairs = np.triu_indices(200, 1)
    np.testing.assert_allclose(found[pairs], expected[pairs].astype(float), rtol=3e-15)


def test_many_equal_rows_are_compared_once_and_equally_far_to_the_bit():
    generator = np.random.default_rng(2)
    points = generator.normal(size=(70, 9))[generator.integers(0, 70, 300)]
    found = _distances(torch.from_numpy(points)).numpy()
    equal = (points[:, None] == points).all(-1)
    np.testing.assert_array_equal(found == 0, equal)
    for row in range(300):
        assert (found[equal[row]] == found[row]).all()


@pytest.mark.parametrize("name", METRICS)
@pytest.mark.parametrize("shape", [(150, 64), (203, 30)])
def test_equal_rows_are_equally_far_wherever_they_lie_in_memory(name, shape):
    generator = torch.Generator().manual_seed(3)
    logits = 2 * torch.randn(*shape, generator=generator, dtype=torch.float64)
    logits[-1] = logits[0]
    columns = torch.softmax(logits, -1).T.contiguous()
    matrix = g.pairwise(columns.T, **options(name, "keep"))  # a view whose rows are strided
    assert matrix[0, -1] == 0
    assert torch.equal(matrix[0, 1:-1], matrix[-1, 1:-1])


@pytest.mark.parametrize("name", METRICS)
def test_equal_rows_among_near_ones_are_equally_far_wherever_they_stand(name):
    for seed in range(8):
        generator = np.random.default_rng(seed)
        logits = generator.normal(0, 0.02, (30, 3))[generator.integers(0, 30, 95)]
        matrix = g.pairwise(logits, **options(name, "keep"), log=True)
        equal = (logits[:, None] == logits).all(-1)
        first = equal.argmax(1)  # the first row equal to each
        np.testing.assert_array_equal(matrix[first], matrix)
        np.testing.assert_array_equal(matrix[equal], 0)


def test_squares_that_overflow_leave_infinite_distances_and_no_nan():
    points = torch.zeros(100, 2, dtype=torch.float64)
    points[:, 1] = torch.arange(100)
    points[:2, 0] = torch.tensor([1e200, -1e200])
    found = _distances(points)
    assert torch.isinf(found[0, 1:]).all()
    assert found[2, 3] == 1
    assert found[0, 0] == 0


@pytest.mark.parametrize(("name", "policy"), [*product(METRICS, POLICIES)])
def test_batches_and_torch(heads, name, policy):
    x = torch.from_numpy(softmax(heads[:24])).reshape(2, 12, 33)
    matrix = g.pairwise(x, **options(name, policy))
    assert isinstance(matrix, torch.Tensor)
    for index in range(2):
        assert torch.equal(matrix[index], g.pairwise(x[index], **options(name, policy)))
    single = g.pairwise(x.float(), **options(name, policy))
    assert single.dtype == torch.float64
    torch.testing.assert_close(single, matrix, rtol=1e-4, atol=1e-6)
