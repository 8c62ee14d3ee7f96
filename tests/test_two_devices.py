"""Layers on two devices: nothing mixes tensors of both, and the numbers are those of one device."""

from __future__ import annotations

import copy

import pytest
import torch

import spread
import tiny
from perpend.models.placement import input_device
from perpend.surveys import rows
from test_spread import _read
from two_devices import DEVICES, HOST, TwoDevices


@pytest.fixture(autouse=True)
def one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a survey takes a device's layers together: other shapes, which a processor may round otherwise."""
    monkeypatch.setattr(rows, "CPU_LOGITS", 1)


@pytest.mark.parametrize("name", spread.OPERATIONS)
def test_what_perpend_does_is_the_same_on_two_devices(name: str) -> None:
    expected = spread.OPERATIONS[name](tiny.tiny("llama"))
    with TwoDevices() as devices:
        found = spread.OPERATIONS[name](devices.place(tiny.build("llama")))
    assert spread.differences(expected, found) == []
    assert devices.moves >= 5, "nothing went from one device to the other: nothing is tested"


@pytest.mark.parametrize(
    "name", ["gpt2", "bloom", "qwen3_moe", "gpt_oss", "opt_post_ln", "bert", "dinov2_registers"]
)
def test_families_on_two_devices(name: str) -> None:
    expected = _read(name, tiny.tiny(name))
    with TwoDevices() as devices:
        found = _read(name, devices.place(tiny.build(name)))
    assert spread.differences(expected, found) == []


def test_the_stand_in_refuses_what_two_devices_refuse() -> None:
    """Else the tests above would show nothing."""
    plain = torch.ones(3)
    with TwoDevices() as devices:
        one, two = (plain.to(device) for device in DEVICES)
        assert (one.device, two.device, plain.device, (two * 2).sum().device) == (*DEVICES, HOST, DEVICES[1])
        for mixed in (
            lambda: one + two,
            lambda: torch.stack([one, two]),
            lambda: one.add_(plain),
            lambda: torch.equal(one, two),
            lambda: one[torch.tensor([0]).to(DEVICES[1])],
            lambda: torch.zeros(3, device=one.device) * two,
        ):
            with pytest.raises(RuntimeError, match="on one device"):
                mixed()
        with pytest.raises(RuntimeError, match="numpy"):
            one.numpy()
        assert torch.equal(one + two.to(one.device), one * torch.tensor(2.0))
        assert torch.equal(one[torch.tensor([0, 2])].cpu(), torch.ones(2))
        model = devices.place(tiny.build("llama"))
        other = copy.deepcopy(model)
        for each in (model, other):
            assert input_device(each) == DEVICES[0]
            assert each.model.layers[1].mlp.up_proj.weight.device == DEVICES[1]
            assert each(tiny.tokens()).logits.device == HOST, "the output goes where the input was"
        with pytest.raises(RuntimeError, match="on one device"):
            model.model.layers[0].mlp.up_proj.weight + model.model.layers[1].mlp.up_proj.weight
    assert torch.nn.Parameter(plain).device == HOST
