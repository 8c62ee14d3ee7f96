"""Surgery: the whole error makes the other model, its parts add up, and everything is put back."""

from __future__ import annotations

import copy

import pytest
import torch

from perpend.compression.blockwise import compress
from perpend.compression.surgery import component, injection, layer_changes, sensitivity
from perpend.errors import InputError, PerpendError
from tiny import CAUSAL, build, tokens


def made(family):
    base = build(family)
    other = copy.deepcopy(base)
    compress(other, tokens(4, 24), "wanda:2:4")
    return base, other


@pytest.fixture(scope="module")
def pair():
    return made("llama")


@pytest.mark.parametrize("family", CAUSAL)
def test_the_whole_error_everywhere_is_the_other_model(family):
    base, other = made(family)
    ids = tokens(2, 20, seed=3)
    with torch.no_grad():
        before, wanted = base(input_ids=ids).logits, other(input_ids=ids).logits
        with injection(base, other, "both"):
            parts = base(input_ids=ids).logits
        with injection(base, other, "both", sites=[(i, "block") for i in range(len(_blocks(base)))]):
            blocks = base(input_ids=ids).logits
        after = base(input_ids=ids).logits
    assert float((wanted - before).abs().max()) > 0.05
    scale = float(wanted.abs().max())
    assert torch.equal(parts, wanted)
    assert float((blocks - wanted).abs().max()) < 1e-4 * scale
    assert torch.equal(before, after)


def _blocks(model):
    from perpend.models.stream import blocks

    return blocks(model)


def test_components_split_and_match():
    e, u = torch.randn(6, 16), torch.randn(6, 16)
    u[0], e[1] = 0, 0
    across, along = component(e, u, "perpendicular"), component(e, u, "parallel")
    assert torch.allclose(across + along, e, atol=1e-6)
    assert float((across * u).sum(-1).abs().max()) < 1e-5
    assert torch.equal(along[0], torch.zeros(16)), "a zero update has no direction"
    for which in ("perpendicular", "parallel", "random"):
        part = component(e, u, which, "error", torch.Generator().manual_seed(0))
        assert torch.allclose(part[2:].norm(dim=-1), e[2:].norm(dim=-1), rtol=1e-5)
        assert torch.equal(part[1], torch.zeros(16)), "no error, nothing injected"
    small = component(e, u, "perpendicular", "parallel")
    assert torch.allclose(small[2:].norm(dim=-1), along[2:].norm(dim=-1), rtol=1e-4)
    assert torch.equal(component(e, u, "both"), e)
    with pytest.raises(InputError, match="did you mean 'parallel'"):
        component(e, u, "paralel")
    with pytest.raises(InputError, match="match"):
        component(e, u, "both", "norm")


def test_one_site_is_one_replaced_contribution(pair):
    """Only e⊥ at layer 1's MLP, against the same edit made by hand with a module hook."""
    base, other = pair
    ids = tokens(2, 20, seed=3)
    mine, theirs = base.model.layers[1].mlp, other.model.layers[1].mlp

    def edit(module, args, out):
        e = theirs(args[0]) - out
        return out + e - (e * out).sum(-1, keepdim=True) / out.square().sum(-1, keepdim=True) * out

    with torch.no_grad():
        handle = mine.register_forward_hook(edit)
        wanted = base(input_ids=ids).logits
        handle.remove()
        with injection(base, other, "perpendicular", sites=[(1, "mlp")]):
            got = base(input_ids=ids).logits
    assert torch.allclose(got, wanted, atol=1e-5)


def test_sites_are_checked(pair):
    base, other = pair
    for sites, message in (
        ([(7, "mlp")], "outside the model's 3 layers"),
        ([(0, "mpl")], "did you mean 'mlp'"),
        ([(0, "block"), (0, "attn")], "not at both"),
        ([], "no site"),
    ):
        with pytest.raises(InputError, match=message), injection(base, other, sites=sites):
            pass


def test_an_exception_inside_puts_both_models_back(pair):
    base, other = pair
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for model in pair for m in model.modules()]
    with pytest.raises(RuntimeError, match="boom"), injection(base, other, "both"):
        raise RuntimeError("boom")
    assert hooks == [
        len(m._forward_hooks) + len(m._forward_pre_hooks) for model in pair for m in model.modules()
    ]


def test_a_cache_with_a_past_is_refused_and_an_empty_one_is_fine(pair):
    base, other = pair
    ids = tokens(1, 12)
    with torch.no_grad(), injection(base, other, "both"):
        out = base(input_ids=ids, use_cache=True)
        assert out.past_key_values.get_seq_length() == 12
        with pytest.raises(PerpendError, match="use_cache=False"):
            base(input_ids=ids[:, :1], past_key_values=out.past_key_values)


def test_sensitivity_is_the_loss_change_of_whole_runs(pair):
    base, other = pair
    ids = tokens(3, 16, seed=5)
    table = sensitivity(base, other, ids, batch=2)
    assert len(table) == 3 * 2 * 3

    def loss():
        with torch.no_grad():
            logits = base(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
        return -logits.gather(-1, ids[:, 1:, None])[..., 0].mean(1)

    plain = loss()
    for row in table.itertuples():
        with injection(base, other, row.component, match=row.match, sites=[(row.layer, row.part)]):
            gap = loss() - plain
        assert row.change == pytest.approx(float(gap.mean()), abs=2e-5)
        assert row.se == pytest.approx(float(gap.std() / 3**0.5), abs=2e-5)


def test_layer_changes_are_swapped_blocks(pair):
    base, other = pair
    ids = tokens(2, 16, seed=5)
    table = layer_changes(base, other, ids)
    swapped = copy.deepcopy(base)
    swapped.model.layers[2] = other.model.layers[2]
    losses = []
    for model in (base, swapped):
        with torch.no_grad():
            logits = model(input_ids=ids).logits[:, :-1].double().log_softmax(-1)
        losses.append(-float(logits.gather(-1, ids[:, 1:, None]).mean()))
    row = table[table["layer"] == 2].iloc[0]
    assert row["change"] == pytest.approx(losses[1] - losses[0], abs=2e-5)
