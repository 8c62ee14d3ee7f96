"""Controls move as far as the edit they stand beside, in the direction that they say."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor

import perpend
import tiny
from perpend.errors import InputError
from perpend.models.attention import attach
from perpend.models.attention.fused import self_weight
from perpend.models.controls import CONTROLS, control
from perpend.models.edit import SITES, Edit
from perpend.models.stream import contributions


def layer_of(change: Edit, kind: str | None) -> tuple[Tensor, Tensor, Tensor]:
    """y of layer 0 as the model has it, as the edit or control leaves it, and the reference; fp64."""
    model, ids, seen = tiny.build("llama").double(), tiny.tokens(2, 12), []
    references = []

    def look(call, output) -> None:
        value = call.value.repeat_interleave(call.groups, 1).transpose(1, 2)
        kept = self_weight(call).transpose(1, 2)[..., None] * value if "exclude" in change.site else 0.0
        seen.append(output - kept)
        references.append(value)

    def visit(c) -> None:
        seen.append(c.update.clone())
        references.append(c.reference)

    for context in (
        nullcontext(),
        perpend.edit(model, change) if kind is None else control(model, change, kind),
    ):
        with context, torch.no_grad():
            inner = (
                attach(model, look, layers=[0])
                if change.site.startswith("value.")
                else contributions(model, visit, parts=(change.site.split(".")[1],), layers=[0])
            )
            with inner:
                model(ids)
    return seen[0], seen[1], references[0]


def parts(y: Tensor, z: Tensor, over: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    along = (y * z).sum(over, keepdim=True) / (z * z).sum(over, keepdim=True) * z
    return along, y - along


@pytest.mark.parametrize("reference", ["head", "token"])
@pytest.mark.parametrize("site", SITES)
def test_controls_move_as_far_as_the_edit(site: str, reference: str) -> None:
    change = Edit(site, 0.25, layers=(0,), reference=reference)
    over = (-2, -1) if site.startswith("value.") and reference == "token" else (-1,)

    def norm(x: Tensor) -> Tensor:
        return x.square().sum(over).sqrt()

    plain, edited, z = layer_of(change, None)
    along, across = parts(plain, z, over)
    move = norm(edited - plain)
    torch.testing.assert_close(move, 0.75 * norm(along))
    _, found, _ = layer_of(change, "random")
    torch.testing.assert_close(norm(found - plain), move)
    aligned = (found - plain) * along
    assert aligned.sum(over).abs().mean() < 0.7 * (move * norm(along)).mean()
    _, found, _ = layer_of(change, "opposite")
    share = 1 - 0.75 * norm(along) / norm(across)
    expected = along + share.reshape(*share.shape, *(1,) * len(over)) * across
    real = norm(across) > 1e-9  # the first token of exclude-self has nothing across
    torch.testing.assert_close(found[real], expected[real], atol=1e-9, rtol=1e-7)
    _, found, _ = layer_of(change, "shuffled")
    gap = found - plain  # along another token's reference: parallel to it, so of rank one with some z_s
    first = gap[:, 0] - (edited - plain)[:, 0]  # token 0 has only its own
    assert first.abs().max() < 1e-9
    assert (gap - (edited - plain)).abs().max() > 1e-3


@pytest.mark.parametrize("kind", CONTROLS)
def test_controls_are_causal_seeded_and_leave_the_model(kind: str) -> None:
    model, ids = tiny.build("llama"), tiny.tokens(1, 12)
    other = ids.clone()
    other[:, -1] = (other[:, -1] + 1) % 90
    change = Edit("residual.attn", 0.0)
    with torch.no_grad():
        plain = model(ids)[0]
        with control(model, change, kind, seed=3):
            one, again, two = model(ids)[0], model(ids)[0], model(other)[0]
        assert torch.equal(one, again)
        torch.testing.assert_close(one[:, :-1], two[:, :-1])
        assert torch.equal(model(ids)[0], plain)
        assert not torch.equal(one, plain)
        if kind != "opposite":
            with control(model, change, kind, seed=4):
                assert not torch.equal(model(ids)[0], one)


def test_what_has_no_control_is_refused() -> None:
    model = tiny.tiny("llama")
    with pytest.raises(InputError, match="'random'"), control(model, Edit("value.full", 0.0), "randm"):
        pass
    with pytest.raises(InputError, match="s⊥ = 1"), control(model, Edit("value.full", 0.0, 0.5), "random"):
        pass
