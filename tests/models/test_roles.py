"""Roles of an image model's tokens are found where a learned token's values reach, and nowhere assumed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import tiny
from perpend.errors import InputError
from perpend.models.roles import find_roles


@pytest.mark.parametrize(("name", "registers"), [("vit", ()), ("dinov2", ()), ("dinov2_registers", (1, 2))])
def test_class_token_and_registers(name: str, registers: tuple[int, ...]) -> None:
    model = tiny.tiny(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    roles = find_roles(model, tiny.pixels(2))
    assert roles.positions("cls") == (0,)
    assert roles.found["cls"].endswith("cls_token")
    assert len(roles.patches) == 16
    if registers:
        assert roles.positions("registers") == registers
        assert roles.positions("cls,registers") == (0, 1, 2)
        assert roles.patches[0] == 3
    else:
        with pytest.raises(InputError, match="no registers; found: cls at token 0"):
            roles.positions("registers")
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key])


def test_a_class_token_at_the_end_is_found_there() -> None:
    model = tiny.build("vit")
    embeddings = model.vit.embeddings
    plain = embeddings.forward

    def last(*args, **more):
        made = plain(*args, **more)
        return torch.cat([made[:, 1:], made[:, :1]], 1)

    embeddings.forward = last
    roles = find_roles(model, tiny.pixels(1))
    assert roles.positions("cls") == (16,)
    assert roles.patches == tuple(range(16))


def test_a_model_without_learned_tokens_has_patches_only() -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    torch.manual_seed(0)
    model = SiglipVisionModel(SiglipVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, image_size=28,
        patch_size=7,
    )).eval()  # fmt: skip
    roles = find_roles(model, tiny.pixels(1))
    assert roles.roles == {}
    assert len(roles.patches) == 16
    assert "16 patches" in roles.words
    with pytest.raises(InputError, match="has no cls"):
        roles.positions("cls")


def test_another_parameter_of_the_same_kind_changes_nothing() -> None:
    model = tiny.build("dinov2")
    model.extra = nn.ParameterDict({"register_tokens": nn.Parameter(torch.zeros(1, 2, 32))})  # never used
    assert "registers" not in find_roles(model, tiny.pixels(1)).roles
