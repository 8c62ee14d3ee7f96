"""Diagonal forms against attention maps changed by hand; the audit against edits that really ran."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import perpend
import tiny
from perpend.models.attention import attach
from perpend.models.attention.fused import self_weight
from perpend.models.stream import contributions
from perpend.studies.diagonal import FORMS, Spread, applied, diagonal_study, residual_changes


def contribution(model: torch.nn.Module, ids: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    kept = []
    with torch.no_grad(), contributions(model, lambda c: kept.append(c), parts=("attn",), layers=[layer]):
        model(ids)
    return kept[0].update.clone(), kept[0].reference.clone()


@pytest.mark.parametrize("site", ["value.full", "value.exclude_self"])
def test_value_forms_are_the_edit_itself(site: str) -> None:
    """A_tt changed by the form and every other weight held gives the aggregate of the edit."""
    model, ids = tiny.build("llama").double(), tiny.tokens(1, 10)
    seen: dict[str, Tensor] = {}

    def look(call, output) -> None:
        value = call.value.repeat_interleave(call.groups, 1).transpose(1, 2)
        y = output - (self_weight(call).transpose(1, 2)[..., None] * value if "exclude" in site else 0)
        change = (0.25 - 1) * (y * value).sum(-1, keepdim=True) / (value * value).sum(-1, keepdim=True)
        seen["by_hand"] = output + change * value
        seen["change"] = change

    with torch.no_grad():
        with attach(model, look, layers=[0]):
            model(ids)
        with (
            perpend.edit(model, site, 0.25),
            attach(model, lambda c, o: seen.update(edited=o.clone()), layers=[0]),
        ):
            model(ids)
    torch.testing.assert_close(seen["by_hand"], seen["edited"], atol=1e-10, rtol=1e-8)
    table = diagonal_study(model, ids, parallel=0.25).tables["diagonal"]
    row = table[(table["form"] == site) & (table["layer"] == 0)].iloc[0]
    change = seen["change"]
    assert row["mean"] == pytest.approx(change.mean().item(), abs=1e-9)
    assert (row["min"], row["max"]) == pytest.approx((change.min().item(), change.max().item()), abs=1e-9)
    assert row["median"] == pytest.approx(change.flatten().quantile(0.5).item(), abs=0.02)


def test_residual_forms_solve_their_least_squares_problems() -> None:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    y, z, value, weight = normal(5, 12), normal(5, 12), normal(5, 3, 4), normal(12, 3, 4)
    factor = torch.full((5, 12), 0.5, dtype=torch.float64)
    forms, left = residual_changes(y, z, value, weight, factor, 0.25)
    w = 0.5 * torch.einsum("dhv,nhv->nhd", weight, value)
    target = -0.75 * ((y * z).sum(-1) / (z * z).sum(-1))[:, None] * z
    for n in range(5):
        best = torch.linalg.lstsq(w[n].T, target[n][:, None]).solution[:, 0]
        torch.testing.assert_close(forms["residual.attn joint"][n], best)
        rest = target[n] - best @ w[n]
        torch.testing.assert_close(left[n], rest.square().sum() / target[n].square().sum())
        for h in range(3):
            alone = torch.linalg.lstsq(w[n, h][:, None], target[n][:, None]).solution[0, 0]
            torch.testing.assert_close(forms["residual.attn head"][n, h], alone)
    # least Frobenius norm: the projection of the rank-one operator onto those of the heads
    rank_one = target[0][:, None] * value[0].flatten()[None] / value[0].square().sum()
    for h in range(3):
        own = torch.zeros(12, 3, 4, dtype=torch.float64)
        own[:, h] = 0.5 * weight[:, h]
        expected = (rank_one * own.flatten(1)).sum() / own.square().sum()
        torch.testing.assert_close(forms["residual.attn operator"][0, h], expected)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "granite"])
def test_the_audit_is_what_an_edit_of_that_layer_alone_does(name: str) -> None:
    model, ids = tiny.build(name), tiny.tokens(2, 10)
    table = diagonal_study(model, ids).tables["audit"]
    for layer in (0, 1):
        y, _ = contribution(model, ids, layer)
        for site in ("value.full", "value.exclude_self", "residual.attn"):
            if name == "gemma3" and site != "residual.attn":
                continue  # its post-norm changes size with the edit; the audit holds it
            with perpend.edit(model, site, 0.0, layers=[layer]):
                edited, _ = contribution(model, ids, layer)
            expected = applied(y, edited).mean(1)
            row = table[(table["layer"] == layer) & (table["site"] == site)].iloc[0]
            found = [row[key] for key in ("norm_change", "energy_change", "energy_removed", "cosine")]
            assert found == pytest.approx(expected.tolist(), abs=1e-4), (layer, site)


def test_blocks_and_batches_change_nothing() -> None:
    model, ids = tiny.tiny("llama"), tiny.tokens(35, 6)
    one = diagonal_study(model, ids, batch=35).tables
    other = diagonal_study(model, ids, batch=2).tables
    for name, table in one.items():
        numbers = table.select_dtypes("float").to_numpy()
        assert numbers == pytest.approx(other[name].select_dtypes("float").to_numpy(), abs=1e-5), name
    assert set(one["diagonal"]["form"]) == set(FORMS)
    row = one["unrealised"].iloc[0]
    assert 0 < row["mean"] < 1


def test_gated_attention_has_no_residual_form_and_says_so() -> None:
    study = diagonal_study(tiny.tiny("qwen3_next"), tiny.tokens(1, 8))
    assert set(study.tables["diagonal"]["form"]) == {"value.full", "value.exclude_self"}
    assert any("gate" in words for words in study.conventions["undefined"].values())


def test_spreads() -> None:
    values = torch.linspace(-1, 2, 301, dtype=torch.float64)
    spread = Spread()
    spread.add(values[:100])
    spread.add(values[100:])
    record = spread.record()
    assert (record["min"], record["max"]) == (-1.0, 2.0)
    assert record["median"] == pytest.approx(0.5, abs=0.01)
    assert spread.outside.tolist() == [100.0, 100.0]


def test_quantiles_lie_between_the_ends_and_tell_a_small_spread() -> None:
    values = torch.linspace(-0.0042, 0.0040, 1001, dtype=torch.float64)
    spread = Spread()
    spread.add(values)
    record = spread.record()
    for name, share in (("q05", 0.05), ("median", 0.5), ("q95", 0.95)):
        assert record[name] == pytest.approx(values.quantile(share).item(), abs=1e-4)
    assert record["min"] < record["q05"] < record["median"] < record["q95"] < record["max"]
