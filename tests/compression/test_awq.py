"""AWQ: the search, what it can never lose, folding, and the objectives."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import transformers

from perpend.compression import awq
from perpend.compression.blockwise import Calibrated, compress
from perpend.compression.directional import directional_loss
from perpend.compression.method import regime
from perpend.compression.rtn import quantize
from perpend.compression.statistics import Moment
from perpend.errors import InputError
from perpend.models import families, layout
from perpend.models.families.llama import LLAMA
from perpend.models.stream import blocks
from tiny import CAUSAL, build, tokens

FAMILIES = ["llama", "qwen3", "gpt2", "gemma3", "olmo2", "cohere2", "phi", "qwen3_moe", "deepseek_v3", "opt"]


@pytest.fixture(autouse=True)
def _quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*saw no calibration token.*")
        yield


def spread(model, seed: int = 0):
    """Give activations the outlying channels that AWQ is for: norm weights of very different size."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 and "norm" in name and not name.endswith("bias"):
                parameter.mul_(torch.exp(torch.randn(parameter.shape, generator=generator)))
    return model


def output_error(dense, other, ids, name):
    """Σ ‖(W' − W) x‖² of one linear on the inputs of the dense model, by hooks and without perpend."""
    seen = []
    handle = dense.get_submodule(name).register_forward_pre_hook(lambda m, a: seen.append(a[0].detach()))
    with torch.no_grad():
        dense(input_ids=ids)
    handle.remove()
    rows = seen[0].reshape(-1, seen[0].shape[-1]).double()
    delta = other.double() - dense.get_submodule(name).weight.detach().double()
    return float((rows @ delta.T).square().sum())


def test_scales_are_one_at_alpha_zero_and_centred():
    mean = torch.rand(32).double() + 0.01
    assert torch.equal(awq.scales(mean, 0.0), torch.ones(32))
    s = awq.scales(mean, 0.7)
    assert float(s.max() * s.min()) == pytest.approx(1, rel=1e-5)
    assert torch.equal(torch.argsort(s), torch.argsort(mean))
    assert torch.isfinite(awq.scales(torch.zeros(4).double(), 0.5)).all(), "a channel that is always zero"


@pytest.mark.parametrize("family", FAMILIES)
def test_never_worse_than_rounding_on_its_calibration_loss(family):
    """q_norm and k_norm (qwen3), grouped queries (most), post-norm blocks, experts, shared norms."""
    spec = f"awq:3,group=8,grid=6,clip={'true' if family in ('qwen3', 'gpt2') else 'false'}"
    done = compress(spread(build(family)), tokens(4, 24), spec, layers=[0, 1])
    searched = [f for f in done.facts.values() if f["group_loss_rtn"] is not None]
    assert searched
    assert all(f["group_loss"] <= f["group_loss_rtn"] for f in searched)
    assert sum(f["group_loss"] for f in searched) < sum(f["group_loss_rtn"] for f in searched)


def test_the_stated_loss_is_that_of_the_weights_that_come_out():
    """o_proj under grouped queries keeps its scale at run time, so its weight can be checked as it is."""
    ids = tokens(4, 24)
    model = spread(build("qwen3"))
    dense = copy.deepcopy(model)
    done = compress(model, ids, "awq:3,group=8", layers=[0])
    name = "model.layers.0.self_attn.o_proj"
    facts = done.facts[name]
    assert "grouped queries" in facts["kept_at_run_time"]
    assert facts["alpha"] > 0
    found = output_error(dense, model.get_submodule(name).weight.detach(), ids, name)
    assert found == pytest.approx(facts["group_loss"], rel=1e-3)
    plain = output_error(dense, quantize(dense.get_submodule(name).weight.detach(), 3, 8), ids, name)
    assert plain == pytest.approx(facts["group_loss_rtn"], rel=1e-3)
    assert found < plain


def test_folded_weights_are_on_their_integer_grid_and_the_norm_carries_the_rest():
    ids = tokens(4, 24)
    model = spread(build("llama"))
    dense = copy.deepcopy(model)
    done = compress(model, ids, "awq:3,group=8,clip=false", layers=[0])
    name = "model.layers.0.self_attn.q_proj"
    assert done.facts[name]["folded"] == "model.layers.0.input_layernorm"
    layer, was = model.model.layers[0], dense.model.layers[0]
    scale = was.input_layernorm.weight / layer.input_layernorm.weight
    assert float((scale - 1).abs().max()) > 0.05
    expected = quantize(was.self_attn.q_proj.weight.detach() * scale.detach(), 3, 8)
    assert torch.allclose(layer.self_attn.q_proj.weight, expected, atol=1e-5)
    for row in layer.self_attn.q_proj.weight.detach().reshape(-1, 8):
        assert len(torch.unique((row * 1e5).round())) <= 8


@pytest.mark.parametrize("family", CAUSAL)
def test_folding_alone_changes_nothing(family):
    """At 16 bits rounding is nearly exact, so what is left of a difference would be a wrong fold."""
    ids = tokens(2, 24)
    model = spread(build(family))
    with torch.no_grad():
        before = model(input_ids=ids).logits
        done = compress(model, ids, "awq:bits=16,group=8,clip=false,grid=3", layers=[0, 1])
        after = model(input_ids=ids).logits
    assert any(f["alpha"] > 0 for f in done.facts.values())
    assert float((after - before).norm() / before.norm()) < 2e-3


def test_what_cannot_be_folded_is_named():
    reasons = {
        "gemma3": "multiplies by 1 + its weight",
        "llama": "grouped queries",
        "gpt2": "nothing it could be folded into",
    }
    for family, reason in reasons.items():
        done = compress(spread(build(family)), tokens(4, 24), "awq:3,group=8,grid=6,clip=false")
        kept = [f["kept_at_run_time"] for f in done.facts.values() if f["kept_at_run_time"]]
        assert any(reason in text for text in kept), family
        static = sum(m.weight.numel() for some in _matrices(family) for m in some) * (3 + (16 + 3) / 8) / 8
        assert done.bytes > static, "a scale kept at run time is stored, and counted"


def _matrices(family):
    from perpend.compression.blockwise import compressible

    return compressible(build(family)).values()


def test_a_source_that_does_not_pass_a_scale_on_is_caught(monkeypatch):
    """up_proj -> squared ReLU -> down_proj: dividing up_proj by s divides the activation by s², not s.

    A record that says otherwise (as that of a family added by a user may) does no harm.
    """
    import transformers as t

    wrong = replace(LLAMA, name="nemotron", model_types=("nemotron",), norm_offset=1.0)
    records = tuple(wrong if record.name == "nemotron" else record for record in families.known())
    monkeypatch.setattr(layout, "known", lambda: records)
    torch.manual_seed(0)
    config = t.NemotronConfig(
        vocab_size=97, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, hidden_act="relu2", pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = t.NemotronForCausalLM(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 2:
                p.normal_(0, 0.15)
    ids = tokens(2, 24)
    with torch.no_grad():
        before = model(input_ids=ids).logits
        done = compress(model, ids, "awq:bits=16,group=8,clip=false")
        after = model(input_ids=ids).logits
    facts = done.facts["model.layers.0.mlp.down_proj"]
    assert facts["alpha"] > 0
    assert "changes the block's output" in facts["kept_at_run_time"]
    assert float((after - before).norm() / before.norm()) < 2e-3


def test_half_precision_keeps_the_guarantee_and_the_norm():
    ids = tokens(4, 24)
    model = spread(build("llama")).to(torch.bfloat16)
    done = compress(model, ids, "awq:3,group=8")
    assert all(f["group_loss"] <= f["group_loss_rtn"] for f in done.facts.values())
    assert model.model.layers[0].input_layernorm.weight.dtype == torch.bfloat16


def test_the_directional_objective_lowers_what_it_weighs():
    """Searching with weights (1, 0) and (0, 1) finds less of the part each weighs, per search group."""
    ids = tokens(4, 24)
    losses = {}
    for weights in ("perpendicular=1,parallel=0", "perpendicular=0,parallel=1"):
        done = compress(
            spread(build("llama")),
            ids,
            f"awq:3,group=8,grid=5,clip=false,objective=update,{weights}",
            layers=[0],
        )
        for f in done.facts.values():
            assert f["group_loss"] <= f["group_loss_rtn"]
        losses[weights] = done.facts["model.layers.0.mlp.down_proj"]
    # the two parts of one and the same rounding error add up to the isotropic objective
    both = compress(
        spread(build("llama")), ids, "awq:3,group=8,grid=5,clip=false,objective=update", layers=[0]
    ).facts["model.layers.0.mlp.down_proj"]
    total = sum(f["group_loss_rtn"] for f in losses.values())
    assert both["group_loss_rtn"] == pytest.approx(total, rel=1e-4)
    assert both["group_loss"] >= sum(f["group_loss"] for f in losses.values()) * (1 - 1e-6)


def test_the_update_objective_is_the_error_of_the_contribution():
    """One linear's rounding, measured through the block and straight from its own output: the same number."""
    ids = tokens(4, 24)
    done = compress(
        spread(build("llama")), ids, "awq:3,group=8,grid=6,clip=false,objective=update", layers=[0]
    )
    plain = compress(spread(build("llama")), ids, "awq:3,group=8,grid=6,clip=false", layers=[0])
    name = "model.layers.0.mlp.down_proj"  # its output is the MLP's contribution
    assert done.facts[name]["group_loss_rtn"] == pytest.approx(plain.facts[name]["group_loss_rtn"], rel=1e-3)
    assert done.facts[name]["alpha"] == plain.facts[name]["alpha"]


def test_weights_need_the_update_objective():
    for bad in ("awq:parallel=0.5,group=8", "awq:relative=true,group=8"):
        with pytest.raises(InputError, match="objective=update"):
            compress(build("llama"), tokens(1, 8), bad)
    with pytest.raises(InputError, match="not negative nor both 0"):
        compress(build("llama"), tokens(1, 8), "awq:group=8,objective=update,parallel=0,perpendicular=0")
    with pytest.raises(InputError, match="objective of awq"):
        compress(build("llama"), tokens(1, 8), "awq:group=8,objective=outputs")


def test_second_moment_is_exact_on_both_sides_of_the_switch():
    rows = torch.randn(50, 8)
    delta = torch.randn(3, 8)
    wanted = float((rows @ delta.T).square().sum())
    for chunks in ([50], [3, 4, 20, 23], [5]):
        moment = Moment(8)
        used = 0
        for size in chunks:
            moment.add(rows[used : used + size])
            used += size
        expected = float((rows[:used] @ delta.T).square().sum())
        assert moment.energy(delta) == pytest.approx(expected, rel=1e-5)
        blocks_ = moment.diagonal_blocks(4)
        full = rows[:used].T @ rows[:used]
        assert torch.allclose(blocks_[1], full[4:, 4:], atol=1e-4)
    assert wanted > 0


def test_search_leaves_the_dense_weights_for_the_next_group():
    model = spread(build("llama"))
    before = copy.deepcopy(model.state_dict())
    block = blocks(model)[0]
    job = Calibrated(model, block, (), {}, [], [])
    assert awq._groups(job) == []
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


def test_directional_loss_splits_the_squared_error():
    e, u = torch.randn(7, 16), torch.randn(7, 16)
    u[0] = 0
    both = directional_loss(e, u)
    assert both == pytest.approx(float(e.square().sum()), rel=1e-5)
    across = directional_loss(e, u, parallel=0)
    along = directional_loss(e, u, perpendicular=0)
    assert across + along == pytest.approx(both, rel=1e-5)
    unit = u[1:] / u[1:].norm(dim=-1, keepdim=True)
    assert along == pytest.approx(float((e[1:] * unit).sum(-1).square().sum()), rel=1e-4)


@pytest.mark.parametrize("name", ["Nemotron", "Arcee"])
def test_no_scale_is_folded_through_a_squared_activation(name):
    """At eight bits the model stays itself, and nothing was folded where the scale would not come out."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(
        vocab_size=97, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    tokens = torch.randint(3, 97, (4, 32))
    with torch.no_grad():
        before = model(tokens).logits
        done = compress(model, tokens, regime("awq:bits=8,group=32"))
        after = model(tokens).logits
    down = [facts for matrix, facts in done.facts.items() if matrix.endswith("down_proj")]
    assert len(down) == 2
    assert all(facts["folded"] is None for facts in down)
    assert (after - before).abs().max() < 0.02 * before.abs().max()
