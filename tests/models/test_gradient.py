"""The gradient map against finite edits in float64, site by site, layer, head and token."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import perpend
import tiny
from perpend.errors import InputError
from perpend.models.edit import RESIDUAL_SITES, SITES
from perpend.models.gradient import gradient_map

STEP = 1e-4


def as_double(name: str) -> torch.nn.Module:
    """A model wholly in float64: RMSNorm computes in fp32 whatever its dtype, which drowns a small step."""
    model = tiny.build(name).double()
    for parent in model.modules():
        for child, module in parent.named_children():
            if type(module).__name__.endswith("RMSNorm"):
                norm = torch.nn.RMSNorm(module.weight.shape, eps=module.variance_epsilon).double()
                norm.weight = module.weight
                setattr(parent, child, norm)
    return model.eval()


def losses(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        logits = model(ids[:, :-1])[0].double()
    return F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").mean(1)


def finite(
    model: torch.nn.Module, ids: torch.Tensor, site: str, scale: str, **chosen: object
) -> torch.Tensor:
    """Central difference of each sequence's loss."""
    ends = []
    for step in (1 + STEP, 1 - STEP):
        with perpend.edit(model, site, **{scale: step}, **chosen):
            ends.append(losses(model, ids))
    return (ends[0] - ends[1]) / (2 * STEP)


@pytest.mark.parametrize("reference", ["head", "token"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "llama"])
def test_slopes_are_those_of_finite_edits(name: str, reference: str) -> None:
    model, ids = as_double(name), tiny.tokens(2, 10)
    base, slopes = gradient_map(model, ids, reference=reference)
    torch.testing.assert_close(base, losses(model, ids))
    assert set(slopes) == set(SITES)
    for site, slope in slopes.items():
        given = {} if site in RESIDUAL_SITES else {"reference": reference}
        for index, scale in enumerate(("parallel", "perpendicular")):
            expected = finite(model, ids, site, scale, **given)
            found = slope[index].sum((1, 2, 3))
            torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
            expected = finite(model, ids, site, scale, layers=[1], **given)
            torch.testing.assert_close(slope[index][:, 1].sum((1, 2)), expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("site", SITES)
def test_slopes_by_head_and_token(site: str) -> None:
    model, ids = as_double("llama"), tiny.tokens(2, 10)
    _, slopes = gradient_map(model, ids, sites=[site])
    tokens = torch.zeros(2, 9, dtype=torch.bool)
    tokens[:, 4] = True
    chosen = {} if site in RESIDUAL_SITES else {"heads": [2]}
    expected = finite(model, ids, site, "parallel", layers=[1], tokens=tokens, **chosen)
    found = slopes[site][0][:, 1, 2 if chosen else 0, 4]
    torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)
    assert slopes[site].shape == (2, 2, 3, 4 if chosen else 1, 9)


def test_weights_get_no_gradient_and_need_none() -> None:
    model, ids = tiny.build("llama"), tiny.tokens(1, 8)
    _, one = gradient_map(model, ids)
    assert all(parameter.grad is None for parameter in model.parameters())
    model.requires_grad_(False)
    with torch.no_grad():
        _, other = gradient_map(model, ids)
    for site in SITES:
        torch.testing.assert_close(one[site], other[site])


def test_unknown_sites_are_refused() -> None:
    with pytest.raises(InputError, match=r"did you mean 'value\.full'"):
        gradient_map(tiny.tiny("llama"), tiny.tokens(1, 6), sites=["value.ful"])


@pytest.mark.parametrize("learned", ["parallel", "perpendicular"])
def test_a_scale_learns_where_nothing_else_does(learned: str) -> None:
    from perpend.models.edit_arithmetic import scale_parts

    generator = torch.Generator().manual_seed(0)
    y, z = torch.randn(2, 3, 5, 8, generator=generator, dtype=torch.float64)
    scales = {"parallel": 0.5, "perpendicular": 0.7}
    scale = torch.full((3, 5, 1), scales[learned], dtype=torch.float64, requires_grad=True)
    scale_parts(y, z, **{**scales, learned: scale}).square().sum().backward()
    along = (y * z).sum(-1, keepdim=True) / (z * z).sum(-1, keepdim=True) * z
    part = along if learned == "parallel" else y - along
    torch.testing.assert_close(scale.grad, 2 * scales[learned] * part.square().sum(-1, keepdim=True))
