"""The directional error against updates taken from whole hidden states, and its laws."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from perpend.compression.blockwise import compress
from perpend.compression.directional import isotropic_correlation, split_error
from perpend.compression.error import check_comparable, measure
from perpend.errors import InputError
from tiny import build, tokens


@pytest.fixture(scope="module")
def pair():
    base = build("llama")
    other = copy.deepcopy(base)
    compress(other, tokens(4, 24), "wanda:2:4")
    return base, other


def updates(model, ids, replace_stream=None):
    """Per layer (x, attn, mlp, y) of a Llama, by hand; `replace_stream` gives each layer's block input."""
    out = []
    body = model.model
    with torch.no_grad():
        x = body.embed_tokens(ids)
        rotary = body.rotary_emb(x, torch.arange(ids.shape[1])[None])
        for index, layer in enumerate(body.layers):
            if replace_stream is not None:
                x = replace_stream[index][0]
            attn = layer.self_attn(layer.input_layernorm(x), position_embeddings=rotary, attention_mask=None)[
                0
            ]
            mid = x + attn if replace_stream is None else x + replace_stream[index][1]
            mlp = layer.mlp(layer.post_attention_layernorm(mid))
            y = x + attn + layer.mlp(layer.post_attention_layernorm(x + attn))
            out.append((x, attn, mlp, y - x))
            x = y
    return out


def expected(base_update, other_update, direction):
    d = base_update.double().reshape(-1, base_update.shape[-1]).numpy()
    e = other_update.double().reshape(d.shape).numpy() - d
    u = direction.double().reshape(d.shape).numpy()
    size = np.linalg.norm(d, axis=1)
    length = np.linalg.norm(u, axis=1)
    along = (e * u).sum(1) / length
    across = np.linalg.norm(e - (along / length)[:, None] * u, axis=1)
    cosine = (u * (u + e)).sum(1) / (length * np.linalg.norm(u + e, axis=1))
    return {
        "perpendicular": across / size,
        "parallel": np.abs(along) / size,
        "total": np.linalg.norm(e, axis=1) / size,
        "kappa": along / size,
        "rotation": cosine,
    }


@pytest.mark.parametrize("batch", [1, 3])
def test_both_modes_and_all_directions_are_the_definition(pair, batch):
    base, other = pair
    ids = tokens(3, 20, seed=7)
    error = measure(base, other, ids, along=("update", "input", "output"), batch=batch)
    ours = updates(base, ids)
    modes = {"local": updates(other, ids, replace_stream=ours), "propagated": updates(other, ids)}
    checked = 0
    for row in error.table.itertuples():
        x, attn, mlp, block = ours[row.layer]
        theirs = dict(zip(("attn", "mlp", "block"), modes[row.mode][row.layer][1:]))
        mine = {"attn": attn, "mlp": mlp, "block": block}
        reference = {"attn": x, "mlp": x + attn, "block": x}[row.part]
        direction = {"update": mine[row.part], "input": reference, "output": reference + mine[row.part]}[
            row.along
        ]
        want = expected(mine[row.part], theirs[row.part], direction)
        for name, values in want.items():
            assert getattr(row, name) == pytest.approx(values.mean(), rel=2e-4, abs=2e-5), (row, name)
            assert getattr(row, f"{name}_median") == pytest.approx(
                np.quantile(values, 0.5), rel=1e-3, abs=1e-4
            )
            assert getattr(row, f"{name}_q95") == pytest.approx(np.quantile(values, 0.95), rel=1e-3, abs=1e-4)
        share = (want["perpendicular"] ** 2 / want["total"] ** 2).mean()
        assert row.energy_share == pytest.approx(share, rel=1e-4)
        assert row.isotropy == pytest.approx(32 * (1 - share), rel=1e-3, abs=1e-3)
        pearson = np.corrcoef(want["perpendicular"], want["total"])[0, 1]
        assert row.r_perpendicular_total == pytest.approx(pearson, abs=1e-3)
        assert row.tokens + row.undefined == ids.numel()
        checked += 1
    assert checked == 2 * 3 * 3 * 3
    assert error.results["tokens"] == ids.numel()
    assert len(error.summary) == 2 * 3 * 3
    assert "kappa" in error._repr_html_()


def test_rotation_along_the_update_is_the_stated_function_of_kappa_and_across():
    e, u = torch.randn(50, 24).double(), torch.randn(50, 24).double()
    s = split_error(e, u)
    cosine = (1 + s.kappa) / torch.sqrt((1 + s.kappa) ** 2 + s.perpendicular**2)
    assert torch.allclose(s.rotation, cosine, atol=1e-12)
    assert torch.allclose(s.perpendicular**2 + s.parallel**2, s.total**2, atol=1e-12)
    assert torch.allclose(s.rotation, torch.cosine_similarity(u, u + e, dim=-1), atol=1e-12)


def test_a_model_against_itself_has_no_error(pair):
    base, _ = pair
    table = measure(base, base, tokens(2, 12)).table
    assert float(table[["perpendicular", "parallel", "total"]].abs().to_numpy().max()) == 0
    assert (table["rotation"] > 1 - 1e-6).all()
    assert table["energy_share"].isna().all(), "no error has no direction"


def test_pure_gain_is_all_parallel_and_pure_rotation_is_not(pair):
    base, _ = pair
    other = copy.deepcopy(base)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.self_attn.o_proj.weight.mul_(0.8)
            layer.mlp.down_proj.weight.mul_(1.3)
    table = measure(base, other, tokens(2, 16), modes=("local",)).table
    attn, mlp = table[table["part"] == "attn"], table[table["part"] == "mlp"]
    assert np.allclose(attn["kappa"], -0.2, atol=1e-5)
    assert np.allclose(mlp["kappa"], 0.3, atol=1e-5)
    assert float(attn["perpendicular"].max()) < 1e-5
    assert np.allclose(attn["energy_share"], 0, atol=1e-6)


def test_zero_updates_are_counted_not_averaged():
    base = build("llama")
    with torch.no_grad():
        base.model.layers[1].mlp.down_proj.weight.zero_()
    other = copy.deepcopy(base)
    compress(other, tokens(2, 16), "magnitude")
    table = measure(base, other, tokens(2, 12), modes=("local",)).table
    row = table[(table["layer"] == 1) & (table["part"] == "mlp")].iloc[0]
    assert row["tokens"] == 0
    assert row["undefined"] == 24
    assert math.isnan(row["perpendicular"])
    summary = next(
        s for s in measure(base, other, tokens(2, 12), modes=("local",)).summary if s["part"] == "mlp"
    )
    assert summary["undefined_tokens"] == 24


def test_quantiles_from_a_stride_say_so(pair, monkeypatch):
    base, other = pair
    ids = tokens(4, 24)
    exact = measure(base, other, ids, modes=("local",), batch=2)
    monkeypatch.setattr("perpend.compression.error.QUANTILE_TOKENS", 40)
    strided = measure(base, other, ids, modes=("local",), batch=2)
    assert exact.quantiles_from == 96
    assert strided.quantiles_from == 32
    assert np.allclose(exact.table["perpendicular"], strided.table["perpendicular"])
    assert not np.allclose(exact.table["perpendicular_median"], strided.table["perpendicular_median"])


def test_only_one_layer_of_one_batch_is_held(pair):
    """Hooks see at most the updates of one layer before they are consumed: no list grows with depth."""
    import gc

    base, other = pair
    ids = tokens(2, 16)

    def alive():
        gc.collect()
        return sum(1 for o in gc.get_objects() if torch.is_tensor(o) and o.shape == (2, 16, 32))

    counts = []
    handle = other.model.layers[2].register_forward_hook(lambda *a: counts.append(alive()))
    measure(base, other, ids, batch=2)
    handle.remove()
    early = []
    handle = other.model.layers[0].register_forward_hook(lambda *a: early.append(alive()))
    measure(base, other, ids, batch=2)
    handle.remove()
    assert max(counts) <= max(early) + 4


@pytest.mark.parametrize("width", [4, 64, 576])
def test_isotropic_correlation_is_what_random_directions_give(width):
    generator = np.random.default_rng(0)
    norms = generator.gamma(9, 0.1, 40_000)
    directions = generator.standard_normal((40_000, 2))
    chi = generator.chisquare(width - 2, 40_000) if width > 2 else np.zeros(40_000)
    squared = directions[:, 0] ** 2 / ((directions**2).sum(1) + chi)
    simulated = np.corrcoef(norms * np.sqrt(1 - squared), norms)[0, 1]
    assert isotropic_correlation(width, norms.mean(), norms.var()) == pytest.approx(simulated, abs=0.01)
    assert isotropic_correlation(576, 0.3, 0.01) > 0.999


def test_models_that_cannot_be_compared_are_refused_with_what_differs(pair):
    base, _ = pair
    with pytest.raises(InputError, match="architecture: llama against gpt2"):
        check_comparable(base, build("gpt2"))
    import transformers as t

    config = copy.deepcopy(base.config)
    config.num_hidden_layers, config.vocab_size = 2, 50
    with pytest.raises(InputError, match=r"layers: 3 against 2; vocabulary: 97 against 50"):
        measure(base, t.LlamaForCausalLM(config), tokens(1, 8))
    config = copy.deepcopy(base.config)
    width, config.intermediate_size = config.intermediate_size, 24
    told = rf"mlp.gate_proj.weight of layer 0: 24 × \d+ against {width} × \d+; mlp.up_proj.weight of layer 0"
    with pytest.raises(InputError, match=told):
        measure(t.LlamaForCausalLM(config), base, tokens(1, 8))
    with pytest.raises(InputError, match="did you mean 'local'"):
        measure(base, base, tokens(1, 8), modes=("locale",))


def test_models_of_two_precisions(pair):
    base, _ = pair
    half = copy.deepcopy(base).to(torch.bfloat16)
    table = measure(base, half, tokens(2, 16)).table
    assert 0 < float(table["total"].max()) < 0.1


def test_what_is_left_of_nothing_is_counted_and_only_its_rotation_undefined():
    """A layer that no longer adds anything errs by its whole update, backwards: kappa is -1."""
    base = build("llama")
    other = copy.deepcopy(base)
    with torch.no_grad():
        other.model.layers[1].mlp.down_proj.weight.zero_()
    error = measure(base, other, tokens(2, 12), modes=("local",))
    row = error.layer_means(part="mlp").iloc[1]
    assert (row["tokens"], row["undefined"]) == (24, 0)
    assert row["kappa"] == pytest.approx(-1)
    assert row["kappa_q05"] == pytest.approx(-1)
    assert row["total"] == pytest.approx(1)
    assert row["perpendicular"] == pytest.approx(0, abs=1e-6)
    assert math.isnan(row["rotation"])
    summary = next(s for s in error.summary if s["part"] == "mlp")
    assert summary["kappa"] == pytest.approx(-1 / 3)


def test_sizes_whose_squares_leave_single_precision():
    e, u = torch.randn(8, 16), torch.randn(8, 16)
    plain = split_error(e, u)
    for scale in (1e30, 1e-30):
        split = split_error(e * scale, u * scale)
        assert split.defined.all()
        for name in ("perpendicular", "parallel", "total", "kappa", "rotation", "share"):
            assert torch.allclose(getattr(split, name), getattr(plain, name), rtol=1e-5), name


def test_an_error_of_one_size_has_no_correlation(pair):
    """All of an update removed by a tenth: every token errs alike, and rounding is no spread."""
    base, _ = pair
    other = copy.deepcopy(base)
    with torch.no_grad():
        for layer in other.model.layers:
            layer.mlp.down_proj.weight *= 0.9
    row = measure(base, other, tokens(2, 12), modes=("local",)).layer_means(part="mlp").iloc[0]
    assert row["total"] == pytest.approx(0.1, rel=1e-5)
    assert math.isnan(row["r_perpendicular_total"])
