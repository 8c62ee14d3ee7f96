"""Repairs: the gain is optimal and free, the refit keeps the mask and never raises its loss."""

from __future__ import annotations

import copy

import pytest
import torch

from perpend.compression.blockwise import compress
from perpend.compression.directional import directional_loss
from perpend.compression.error import measure
from perpend.compression.repair import optimal_gain, solve
from perpend.errors import InputError
from tiny import build, tokens


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 0.25), (0.2, 1.0), (0.0, 1.0)])
def test_the_gain_minimises_the_directional_loss(weights):
    made, wanted = torch.randn(40, 12), torch.randn(40, 12) + 1

    def loss(g):
        return directional_loss(g * made - wanted, wanted, perpendicular=weights[0], parallel=weights[1])

    gain = optimal_gain(made, wanted, *weights)
    assert loss(gain) <= min(loss(gain * 1.01), loss(gain * 0.99), loss(gain + 0.01), loss(gain - 0.01))


def test_isotropic_gain_is_least_squares_and_parallel_gain_zeroes_kappa():
    made, wanted = torch.randn(40, 12), torch.randn(40, 12) + 1
    assert optimal_gain(made, wanted) == pytest.approx(
        float((made * wanted).sum() / made.square().sum()), rel=1e-5
    )
    unit = torch.ones(40, 12)  # equal updates: the parallel gain makes the mean signed error vanish
    gain = optimal_gain(0.7 * unit, unit, 0.0, 1.0)
    assert gain == pytest.approx(1 / 0.7, rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "gpt2", "granite", "cohere2", "gemma3", "olmo2", "qwen3_moe"])
def test_gain_is_folded_and_repairs_a_known_shrinkage(family):
    """Every output projection is halved by hand: the gain finds 2, and the model is the dense one again."""
    from perpend.compression import method, repair
    from perpend.models.stream import blocks

    model, ids = build(family), tokens(3, 20)
    dense = copy.deepcopy(model)

    under_norm = family in ("gemma3", "olmo2")  # there a projection's size is undone by the norm after it

    def shrink(job, settings_of):
        for part in ("attn", "mlp"):
            if under_norm:
                norm = job.block.find(getattr(job.block.family, f"{part}_update"))
                offset = job.block.family.norm_offset
                norm.weight.data.copy_(0.5 * (norm.weight.data + offset) - offset)
            else:
                for parameter in repair._projection(job, part):
                    parameter.data.mul_(0.5)
        return {}

    halve = method.Method("halve", "", {}, frozenset(), lambda m, s: None, shrink, lambda m, s: 1.0)
    chosen = method.Regime("halve+gain", halve, {}, repair.GAIN, dict(repair.GAIN.defaults))
    done = compress(model, ids, chosen)
    gains = [f["gain"] for f in done.facts.values()]
    assert len(gains) == 2 * len(blocks(model))
    assert all(g["gain"] == pytest.approx(2, rel=1e-3) for g in gains)
    folded = {g["folded"] for g in gains}
    assert folded == ({"norm after it"} if under_norm else {"projection"})
    with torch.no_grad():
        assert torch.allclose(model(input_ids=ids).logits, dense(input_ids=ids).logits, atol=1e-3)


def test_gain_lowers_the_isotropic_error_and_keeps_the_mask():
    base, ids = build("llama"), tokens(4, 24)
    errors = {}
    for spec in ("wanda:2:4", "wanda:2:4+gain"):
        other = copy.deepcopy(base)
        done = compress(other, ids, spec, layers=[0])
        errors[spec] = measure(base, other, ids, modes=("local",), layers=[0]).table
        assert done.zeros == 0.5
        weight = other.model.layers[0].mlp.down_proj.weight
        assert float((weight == 0).float().mean()) == 0.5
    attn = {k: t[t["part"] == "attn"]["total_squared"].iloc[0] for k, t in errors.items()}
    assert attn["wanda:2:4+gain"] != attn["wanda:2:4"]


def test_refit_solves_least_squares_on_the_kept_weights():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 12, generator=generator)
    target = x @ torch.randn(6, 12, generator=generator).T
    weight = torch.randn(6, 12, generator=generator)
    weight[torch.rand(6, 12, generator=generator) < 0.5] = 0
    fitted, history = solve(weight, x, x @ weight.T - target, target, iterations=200)
    assert history == sorted(history, reverse=True)
    for row in range(6):
        kept = weight[row] != 0
        exact = torch.linalg.lstsq(x[:, kept].double(), target[:, row, None].double()).solution[:, 0]
        assert torch.allclose(fitted[row, kept].double(), exact, atol=1e-3)
        assert torch.equal(fitted[row, ~kept], torch.zeros(int((~kept).sum())))


@pytest.mark.parametrize("weights", [(1.0, 0.25), (0.25, 1.0)])
def test_refit_minimises_the_weighted_loss(weights):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(300, 10, generator=generator)
    target = x @ torch.randn(5, 10, generator=generator).T + 0.5
    weight = torch.randn(5, 10, generator=generator)
    weight[:, ::2] = 0
    fitted, history = solve(weight, x, x @ weight.T - target, target, weights, 300)
    again = directional_loss(x @ fitted.T - target, target, perpendicular=weights[0], parallel=weights[1])
    assert history[-1] == pytest.approx(again, rel=1e-4)
    free = fitted.clone().requires_grad_()
    e = x @ (free * (weight != 0)).T - target
    u = target / target.norm(dim=-1, keepdim=True)
    along = (e * u).sum(-1).square().sum()
    (weights[0] * (e.square().sum() - along) + weights[1] * along).backward()
    start = (weight != 0) * (e.T @ x)
    assert float(free.grad.norm()) < 1e-2 * float(start.detach().norm()) + 1e-2, "a stationary point"


def test_refit_in_a_model_keeps_the_mask_and_lowers_the_loss():
    model, ids = build("llama"), tokens(4, 24)
    done = compress(model, ids, "wanda:2:4+refit")
    fits = [f["refit"] for f in done.facts.values() if "refit" in f]
    assert len(fits) == 6
    assert all(f["loss"] < f["loss_before"] for f in fits)
    for layer in model.model.layers:
        assert float((layer.mlp.down_proj.weight == 0).float().mean()) == 0.5


def test_what_cannot_be_repaired_is_said():
    done = compress(build("olmo2"), tokens(3, 20), "wanda:2:4+refit")
    assert all("a norm follows" in f["refit"]["skipped"] for f in done.facts.values() if "refit" in f)
    done = compress(build("qwen3_moe"), tokens(3, 20), "wanda:2:4+refit")
    assert "not made by one matrix" in done.facts["model.layers.0.mlp"]["refit"]["skipped"]
    with pytest.raises(InputError, match="parallel > 0"):
        compress(build("llama"), tokens(2, 12), "wanda+gain:parallel=0")
