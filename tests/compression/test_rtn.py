"""Rounding: the grid, the groups, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perpend.compression.blockwise import compress
from perpend.compression.rtn import group_of, quantize
from perpend.errors import InputError
from tiny import build


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 9999),
    bits=st.integers(1, 8),
    group=st.sampled_from([4, 8, 16]),
    sign=st.integers(-1, 1),
)
def test_a_group_lies_on_one_grid_that_holds_zero(seed, bits, group, sign):
    weight = (
        torch.randn(3, 16, generator=torch.Generator().manual_seed(seed)) + 3 * sign
    )  # also one-sided groups
    weight[0, :group] = 0
    rounded = quantize(weight, bits, group)
    for row, was in zip(rounded.reshape(-1, group), weight.reshape(-1, group)):
        step = (was.max().clamp(min=0) - was.min().clamp(max=0)) / (2**bits - 1)
        assert len(torch.unique(row)) <= 2**bits
        if step == 0:
            assert torch.equal(row, was)
            continue
        codes = row / step
        assert torch.allclose(codes, codes.round(), atol=1e-3), "0 is a grid point, so values are whole steps"
        assert float((row - was).abs().max()) <= float(step) * 1.0001
        inside = (was / step - (was / step).round()).abs() * step
        assert float(inside.max()) <= float(step) / 2 * 1.0001
    assert torch.equal(quantize(torch.zeros(2, 16), bits, group), torch.zeros(2, 16))


def test_scaling_a_row_scales_its_rounding():
    """Why a scale can move from o_proj into v_proj's rows before v_proj is rounded."""
    weight = torch.randn(4, 32)
    scale = torch.tensor([0.5, 2.0, 4.0, 0.25])[:, None]  # powers of two: exact in floats
    assert torch.equal(quantize(weight * scale, 4, 8), quantize(weight, 4, 8) * scale)


def test_more_bits_never_hurt_much_and_sixteen_change_little():
    weight = torch.randn(8, 64)
    errors = [float((quantize(weight, b, 32) - weight).norm()) for b in (2, 3, 4, 8, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-3


def test_the_group_is_128_or_the_largest_that_divides():
    assert group_of("w", 256, 128) == 128
    assert group_of("w", 576, 128) == 64
    assert group_of("w", 96, 128) == 32
    assert group_of("w", 30, 0) == 30
    assert group_of("w", 48, 16) == 16
    with pytest.raises(InputError, match=r"model\.w has 172 input features"):
        group_of("model.w", 172, 128)


def test_refusal_names_the_matrix_and_leaves_the_model_alone():
    model = build("llama")  # its down_proj reads 48 features
    before = copy.deepcopy(model.state_dict())
    for spec, named in (("rtn", "down_proj"), ("wanda:7:9", "q_proj"), ("rtn:bits=0,group=16", "bits")):
        with pytest.raises(InputError, match=named):
            compress(model, torch.ones(1, 8, dtype=torch.long), spec)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_rtn_reads_no_text_and_says_what_it_did():
    model = build("llama")
    weight = model.model.layers[0].mlp.down_proj.weight.detach().clone()
    done = compress(model, None, "rtn:group=16")
    assert torch.equal(model.model.layers[0].mlp.down_proj.weight, quantize(weight, 4, 16))
    assert done.calibration is None
    assert done.facts["model.layers.0.mlp.down_proj"] == {"bits": 4, "group": 16}
    assert done.results["propagation"].startswith("none")
    # 4 bits a weight, and 20 bits a group of 16
    assert done.bytes / done.dense_bytes == pytest.approx((4 + 20 / 16) / 16)
