"""The border: kinds, precisions, batch axes, gradients, unmodified input, and what each error says."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import perpend.geometry as g
from geometry.strategies import softmax
from perpend.errors import InputError

# Every function of rows, as a function of one array (..., parts); two-row ones compare with a fixed row.
OTHER = softmax(np.array([0.3, -1.0, 0.5, 0.0]))
UNARY = {
    "closure": g.closure,
    "clr": g.clr,
    "ilr": g.ilr,
    "aitchison_mean": g.aitchison_mean,
    "aitchison_variance": g.aitchison_variance,
    "power": lambda x, **k: g.power(x, 0.7, **k),
    "sink_mass": g.sink_mass,
    "sink_balance": g.sink_balance,
    "content": g.content,
    "content_dispersion": g.content_dispersion,
    "entropy": g.entropy,
    "split_entropy": lambda x, **k: g.split_entropy(x, **k).content,
}
BINARY = {
    "perturb": g.perturb,
    "aitchison_distance": g.aitchison_distance,
    "content_distance": g.content_distance,
    "ilr_cosine": g.ilr_cosine,
}
NO_LOG_RATIO = {"closure", "sink_mass", "content", "entropy", "split_entropy"}


def call(name, x, log=False):
    if name in UNARY:
        return UNARY[name](x, log=log)
    other = torch.from_numpy(OTHER).to(x) if isinstance(x, torch.Tensor) else OTHER.astype(x.dtype)
    return BINARY[name](
        x,
        np.log(other) if log and not isinstance(x, torch.Tensor) else other.log() if log else other,
        log=log,
    )


@pytest.fixture
def x() -> np.ndarray:
    return softmax(np.random.default_rng(2).normal(size=(2, 3, 4)))


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_the_same_kind_out_with_batch_axes_and_the_input_as_it_was(name, x):
    before = x.copy()
    value = call(name, x)
    assert isinstance(value, np.ndarray)
    assert value.dtype == np.float64
    tensor = call(name, torch.from_numpy(x))
    assert isinstance(tensor, torch.Tensor)
    np.testing.assert_array_equal(tensor.numpy(), value)
    reduces = name in ("aitchison_mean", "aitchison_variance")
    for i in range(2):
        np.testing.assert_allclose(call(name, x[i]), value[i], rtol=1e-14, atol=1e-15)
    one = x[:1] if reduces else x[:1, :1]
    assert call(name, one).shape == (value[:1] if reduces else value[:1, :1]).shape  # a batch of one is kept
    np.testing.assert_array_equal(x, before)
    assert call(name, x.astype(np.float32)).dtype == np.float32
    assert call(name, torch.from_numpy(x).bfloat16()).dtype == torch.float32
    x.flags.writeable = False
    np.testing.assert_array_equal(call(name, x), value)
    np.testing.assert_array_equal(call(name, x[:, ::-1]), call(name, x[:, ::-1].copy()))


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_logs_in_give_the_same_and_logs_out_where_the_result_is_a_composition(name, x):
    value, in_logs = call(name, x), call(name, np.log(x) + 3.0, log=True)
    if name in ("closure", "content", "power", "perturb", "aitchison_mean"):
        in_logs = np.exp(in_logs)
    np.testing.assert_allclose(in_logs, value, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", [*UNARY, *BINARY])
def test_gradients_agree_with_differences(name, x):
    logits = torch.from_numpy(np.log(x)).requires_grad_()
    assert torch.autograd.gradcheck(lambda v: call(name, torch.softmax(v, -1)), logits)
    assert torch.autograd.gradcheck(lambda v: call(name, v, log=True), logits)


def test_gradients_at_the_corners_are_finite():
    x = torch.tensor([[0.5, 0.5, 0.0], [0.25, 0.5, 0.25]], dtype=torch.float64, requires_grad=True)
    total = g.entropy(x).sum() + sum(
        g.dissimilarity(x[0], x[1], name).sum() + g.dissimilarity(x[0], x[0], name).sum()
        for name in ("cosine", "jensen_shannon", "euclidean", "hellinger", "fisher_rao")
    )
    (gradient,) = torch.autograd.grad(total, x)
    assert torch.isfinite(gradient).all()
    same = x[1].detach().requires_grad_()
    (gradient,) = torch.autograd.grad(g.aitchison_distance(same, same), same)
    assert gradient.tolist() == [0, 0, 0]
    zero = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    (gradient,) = torch.autograd.grad(g.decompose(torch.ones(3).double(), zero).parallel.sum(), zero)
    assert torch.isfinite(gradient).all()


def test_single_rows_come_back_as_numbers_and_mixed_kinds_as_torch(x):
    assert isinstance(g.entropy(x[0, 0]), np.float64)
    assert g.entropy([0.5, 0.5]) == pytest.approx(np.log(2))
    assert g.sink_mass([1, 0, 0]) == 1
    mixed = g.aitchison_distance(x, torch.from_numpy(OTHER))
    assert isinstance(mixed, torch.Tensor)
    assert isinstance(g.split_entropy(x), g.SplitEntropy)
    assert g.aitchison_distance(x[:, None], x[None]).shape == (2, 2, 3)


BAD = {
    "nan": (np.array([[0.5, 0.5], [np.nan, 0.5]]), "1 NaN or infinite value (first at index (1, 0))"),
    "infinite": (np.array([[np.inf, 0.5]]), "1 NaN or infinite"),
    "negative": (
        np.array([[1.5, -0.5], [1.25, -0.25]]),
        "2 negative parts (first at index (0, 1)); a composition has none",
    ),
    "empty": (np.array([[0.0, 0.0], [1.0, 0.0]]), "1 row with no mass"),
}


@pytest.mark.parametrize("name", ["closure", "entropy", "sink_mass", "content", "split_entropy"])
@pytest.mark.parametrize("bad", BAD)
def test_functions_of_shares_refuse_what_is_no_composition(name, bad):
    rows, message = BAD[bad]
    with pytest.raises(InputError) as caught:
        UNARY[name](rows)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", [n for n in [*UNARY, *BINARY] if n not in NO_LOG_RATIO])
def test_functions_of_log_ratios_refuse_zeros_and_say_what_to_do(name):
    x = softmax(np.arange(12.0).reshape(3, 4) % 5)
    x[1, 2] = x[2, 3] = 0
    with pytest.raises(InputError, match=r"2 zeros \(first at index \(1, 2\)\).*log=True.*replace_zeros"):
        call(name, x)
    with pytest.raises(InputError, match=r"2 zeros \(log = -inf\)"), np.errstate(divide="ignore"):
        call(name, np.log(x), log=True)
    for wrong, message in ((-x, "negative"), (x * np.nan, "NaN or infinite")):
        with pytest.raises(InputError, match=message):
            call(name, wrong)
    replaced = g.replace_zeros(x)
    assert replaced.count == 2
    assert np.isfinite(call(name, replaced.rows)).all()


def test_a_sum_that_is_not_one_is_refused_with_room_for_rounding():
    x = softmax(np.zeros((2, 5)))
    for function in (g.entropy, g.split_entropy, g.sink_mass):
        with pytest.raises(
            InputError, match=r"2 rows that do not sum to one.*closure.*largest deviation 0\.01"
        ):
            function(1.01 * x)
        function((1 + 1e-8) * x)
        function(torch.from_numpy(x).half())
        function(torch.from_numpy(x).float() * (1 + 1e-5))
    # Within the room a row is re-closed, so identities hold to rounding all the same.
    split = g.split_entropy((1 + 5e-7) * softmax(np.random.default_rng(0).normal(size=(50, 9))))
    np.testing.assert_allclose(split.total, split.binary + split.weighted_content, rtol=1e-13)


def test_log_rows_are_checked_too():
    with pytest.raises(InputError, match="NaN or \\+inf"):
        g.entropy(np.array([0.0, np.nan]), log=True)
    with pytest.raises(InputError, match="no mass"):
        g.entropy(np.array([-np.inf, -np.inf]), log=True)
    assert g.entropy(np.array([0.0, -np.inf]), log=True) == 0
    for wrong in (np.array(["a"]), np.array([1j]), torch.tensor([1j]), [[1, 2], [3]]):
        with pytest.raises(InputError, match="real numbers"):
            g.closure(wrong)
    with pytest.raises(InputError, match="at least 1 part"):
        g.closure(np.float64(3))


def test_half_precision_rows_are_summed_in_single():
    x = torch.softmax(torch.randn(100, 64, generator=torch.Generator().manual_seed(0)), -1)
    for dtype, tolerance in ((torch.float16, 2e-3), (torch.bfloat16, 2e-2)):
        low = g.entropy(x.to(dtype))
        assert low.dtype == torch.float32
        torch.testing.assert_close(low, g.entropy(x), rtol=tolerance, atol=tolerance)


def test_arrays_of_either_byte_order_are_read():
    np.testing.assert_array_equal(g.closure(np.array([1.0, 3.0], dtype=">f8")), [0.25, 0.75])
    np.testing.assert_array_equal(g.closure(np.array([1.0, 3.0], dtype="<f4")), [0.25, 0.75])


@pytest.mark.parametrize("count", [0, 1, 3])
def test_arrays_that_run_backwards_are_read(x, count):
    rows = x[0, :count]
    np.testing.assert_array_equal(g.clr(rows[::-1]), g.clr(rows)[::-1])
    np.testing.assert_array_equal(g.clr(rows[..., ::-1]), g.clr(rows[..., ::-1].copy()))


@pytest.mark.parametrize("sink", [1.5, [1.5], [0, 1.0], np.array([0.5])])
def test_a_sink_that_is_no_index_is_refused_and_not_rounded(sink):
    with pytest.raises(InputError, match="index or a list of indices"):
        g.sink_mass(np.array([0.2, 0.3, 0.5]), sink)


@pytest.mark.parametrize("sink", [1, -2, np.int64(1), [1], (1,), np.array([1]), torch.tensor([1])])
def test_a_sink_in_every_spelling_of_an_index(sink):
    assert g.sink_mass(np.array([0.2, 0.3, 0.5]), sink) == 0.3
