"""The gradient study's own numbers: the check, the linear reading and what is said of them."""

from __future__ import annotations

import pytest
import torch

import perpend
import tiny
from perpend.models.edit import Edit
from perpend.studies.edit_gradient import gradient_study
from perpend.studies.edit_sweep import Cell, sweep


def test_slopes_check_and_layers_add_up() -> None:
    model, ids = tiny.tiny("llama"), tiny.tokens(4, 12)
    sites = ["value.exclude_self", "residual.mlp"]
    study = gradient_study(model, ids, sites=sites, batch=2)
    for row in study.results["slope_check"]:
        assert row["slope"] == pytest.approx(row["finite"], rel=0.02, abs=1e-3), row
    linear = study.tables["linear"]
    for site in sites:
        own = linear[linear["site"] == site]
        whole, layers = own[own["layer"].isna()].iloc[0], own[own["layer"].notna()]
        assert layers["linear"].sum() == pytest.approx(whole["linear"], abs=1e-6)
        cell = Cell(Edit(site, 0.0))
        base, found = sweep(model, ids, [cell])
        change = found[cell.name].loss.double().mean().item() - base.double().mean().item()
        assert whole["finite"] == pytest.approx(change, abs=1e-6)
        with perpend.edit(model, site, 0.0, layers=[2]), torch.no_grad():
            logits = model(ids[:, :-1])[0].double()
        loss = torch.nn.functional.cross_entropy(logits.transpose(1, 2), ids[:, 1:]).item()
        assert layers["finite"].iloc[2] == pytest.approx(loss - base.double().mean().item(), abs=2e-6)
    slopes = study.tables["slopes"]
    assert len(slopes) == 2 * (3 * 4 + 3)
    assert len(study.findings) == 3


def test_batches_change_nothing() -> None:
    model, ids = tiny.tiny("llama"), tiny.tokens(3, 10)
    one = gradient_study(model, ids, sites=["value.full"], batch=3)
    two = gradient_study(model, ids, sites=["value.full"], batch=1)
    assert one.arrays["slopes_value.full"] == pytest.approx(two.arrays["slopes_value.full"], abs=1e-5)
