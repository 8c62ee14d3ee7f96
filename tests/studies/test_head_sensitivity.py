"""Head sensitivity against whole passes of the model with each head edited."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import perpend
import tiny
from perpend.errors import InputError
from perpend.models.attention import attention_sites
from perpend.models.attention.standin import answering
from perpend.studies.head_sensitivity import head_sensitivity, layer_changes


def loss(model: torch.nn.Module, ids: torch.Tensor) -> float:
    with torch.no_grad():
        logits = model(ids)[0][:, :-1]
    return F.cross_entropy(logits.double().transpose(1, 2), ids[:, 1:]).item()


@pytest.mark.parametrize(
    ("name", "site", "reference"),
    [
        ("llama", "value.exclude_self", "head"),
        ("gemma3", "value.full", "token"),
        ("gpt2", "value.exclude_self", "token"),
        ("qwen3_next", "value.exclude_self", "head"),
        ("gpt_oss", "value.exclude_self", "head"),
        ("bloom", "value.full", "head"),
    ],
)
def test_heads_and_layers_are_those_of_whole_passes(name: str, site: str, reference: str) -> None:
    model, ids = tiny.tiny(name), tiny.tokens(3, 12)
    study = head_sensitivity(model, ids, site=site, reference=reference, batch=2)
    heads, layers = study.tables["heads"], study.tables["layers"]
    base = loss(model, ids)
    for layer in (0, len(layers) - 1):
        with perpend.edit(model, site, 0.0, layers=[layer], reference=reference):
            joint = loss(model, ids) - base
        own = heads[heads["layer"] == layer]["change"].to_numpy()
        for head in (0, 3):
            with perpend.edit(model, site, 0.0, layers=[layer], heads=[head], reference=reference):
                assert own[head] == pytest.approx(loss(model, ids) - base, abs=2e-6)
        row = layers.iloc[layer]
        assert row["joint"] == pytest.approx(joint, abs=2e-6)
        assert row["interaction"] == pytest.approx(joint - own.sum(), abs=1e-5)
        assert (row["smallest"], row["largest"]) == pytest.approx((own.min(), own.max()))
        assert row["sum_of_sizes"] == pytest.approx(abs(own).sum())
    assert len(heads) == sum(s.heads for s in attention_sites(model))
    assert "Layer 0 apart" in study.findings[0]
    assert study.results["cost"]["ratio"] > 0


@pytest.mark.parametrize("site", ["residual.attn", "residual.mlp", "residual.block", "value.full"])
def test_layers_of_every_site(site: str) -> None:
    model, ids = tiny.tiny("llama"), tiny.tokens(3, 12)
    base, found = layer_changes(model, ids, site, 0.5, batch=2)
    assert base.mean().item() == pytest.approx(loss(model, ids), abs=1e-6)
    for layer in range(3):
        with perpend.edit(model, site, 0.5, layers=[layer]):
            assert found[layer].mean().item() == pytest.approx(loss(model, ids), abs=2e-6)


def test_the_kernel_is_not_run_for_an_answer(monkeypatch) -> None:
    model, ids = tiny.build("llama"), tiny.tokens(1, 6)
    site = attention_sites(model)[1]
    calls: list[int] = []
    own = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or own(*a, **k)
    )
    with torch.no_grad():
        plain = model(ids)[0]
        with answering(model, site, torch.zeros(1, 6, 4, 8)):
            answered = model(ids)[0]
        with perpend.ablate(model, [(1, head) for head in range(4)]):
            expected = model(ids)[0]
        assert len(calls) == 3 + 2 + 3
        torch.testing.assert_close(answered, expected)
        assert torch.equal(model(ids)[0], plain)


def test_a_map_goes_on_where_it_stopped() -> None:
    model, ids, kept = tiny.tiny("llama"), tiny.tokens(2, 10), {}

    def stops(name, compute):
        if len(kept) == 2:
            raise KeyboardInterrupt
        kept[name] = compute()
        return kept[name]

    def goes_on(name, compute):
        return kept.get(name) or compute()

    with pytest.raises(KeyboardInterrupt):
        head_sensitivity(model, ids, store=stops)
    resumed = head_sensitivity(model, ids, store=goes_on)
    whole = head_sensitivity(model, ids)
    assert resumed.results["heads"] == whole.results["heads"]
    assert resumed.results["cost"]["ratio"] is None  # what was measured before it stopped is not known


def test_a_site_without_heads_is_refused() -> None:
    with pytest.raises(InputError, match="has no heads"):
        head_sensitivity(tiny.tiny("llama"), tiny.tokens(1, 6), site="residual.mlp")
