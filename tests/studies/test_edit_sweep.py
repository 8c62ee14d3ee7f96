"""The sweep against plain forward passes; basins against curves whose answer is known."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import perpend
import tiny
from perpend.errors import InputError
from perpend.evaluation.windows import as_windows, cut
from perpend.models.edit import Edit
from perpend.studies.edit_sweep import GROUP, Cell, edit_study, sweep, tolerance_basin

CELLS = [Cell(Edit("value.exclude_self", 0.0)), Cell(Edit("residual.mlp", 1.0, 0.5))]


def test_losses_kl_and_agreement_are_those_of_whole_logits() -> None:
    model, ids = tiny.tiny("llama"), tiny.tokens(5, 16)
    base, found = sweep(model, ids, CELLS, batch=2)
    with torch.no_grad():
        plain = model(ids)[0][:, :-1].double().log_softmax(-1)
        expected = F.nll_loss(plain.transpose(1, 2), ids[:, 1:], reduction="none")
        torch.testing.assert_close(base.double(), expected, atol=1e-5, rtol=1e-5)
        for cell in CELLS:
            with perpend.edit(model, cell.edit):
                edited = model(ids)[0][:, :-1].double().log_softmax(-1)
            losses = found[cell.name]
            expected = F.nll_loss(edited.transpose(1, 2), ids[:, 1:], reduction="none")
            torch.testing.assert_close(losses.loss.double(), expected, atol=1e-5, rtol=1e-5)
            kl = (plain.exp() * (plain - edited)).sum(-1)
            torch.testing.assert_close(losses.kl.double(), kl, atol=1e-5, rtol=1e-4)
            assert torch.equal(losses.agreement.bool(), plain.argmax(-1) == edited.argmax(-1))


def test_the_study_says_what_it_found() -> None:
    cells = [CELLS[0], Cell(CELLS[0].edit, "random")]
    study = edit_study(tiny.tiny("llama"), tiny.tokens(4, 16), cells)
    unedited, edit, control = study.results["cells"]
    assert edit["change"] == pytest.approx(edit["loss"] - unedited["loss"], abs=1e-9)
    assert edit["change_low"] <= edit["change"] <= edit["change_high"]
    assert math.exp(edit["loss"]) == pytest.approx(edit["perplexity"])
    assert control["control"] == "random"
    assert "random" in study.findings[1]
    assert "95 % interval over sequences" in study.findings[1]
    assert edit["word_perplexity"] is None  # no words were counted


def test_perplexities_and_positions_by_hand() -> None:
    """C4 style per token, WikiText style per word; loss, KL and agreement at each token."""
    model, ids = tiny.tiny("llama"), tiny.tokens(4, 16)
    windows = replace(as_windows(ids), words=torch.tensor([7, 8, 9, 10]))
    study = edit_study(model, windows, CELLS, batch=3)
    with torch.no_grad():
        plain = model(ids)[0][:, :-1].double().log_softmax(-1)
        with perpend.edit(model, CELLS[1].edit):
            edited = model(ids)[0][:, :-1].double().log_softmax(-1)
    loss = F.nll_loss(edited.transpose(1, 2), ids[:, 1:], reduction="none")
    row = study.results["cells"][2]
    assert row["perplexity"] == pytest.approx(math.exp(loss.mean()), rel=1e-5)
    assert row["word_perplexity"] == pytest.approx(math.exp(loss.sum() / 34), rel=1e-5)
    positions = study.tables["positions"]
    assert list(positions) == ["cell", "edit", "token", "loss", "kl", "top1_agreement"]
    own = positions[positions["cell"] == 2]
    assert set(own["edit"]) == {CELLS[1].name}
    assert list(own["token"]) == list(range(1, 16))
    kl = (plain.exp() * (plain - edited)).sum(-1)
    same = (plain.argmax(-1) == edited.argmax(-1)).double()
    for name, expected in (("loss", loss), ("kl", kl), ("top1_agreement", same)):
        assert own[name].to_numpy() == pytest.approx(expected.mean(0).numpy(), abs=1e-5)
    unedited = positions[positions["cell"] == 0]
    assert set(unedited["kl"]) == {0.0}
    assert set(unedited["top1_agreement"]) == {1.0}


def test_windows_that_leave_tokens_out_are_refused() -> None:
    with pytest.raises(InputError, match="leave some out"):
        edit_study(tiny.tiny("llama"), cut(range(30), 16, 8), CELLS)


def test_a_sweep_goes_on_where_it_stopped() -> None:
    kept: dict[str, object] = {}

    def store(name, compute):
        if len(kept) == 1 and name not in kept:
            raise KeyboardInterrupt
        return kept.setdefault(name, None) or kept.__setitem__(name, compute()) or kept[name]

    model, ids = tiny.tiny("llama"), tiny.tokens(2, 16)
    cells = [Cell(Edit("value.full", parallel=scale)) for scale in np.linspace(-1, 2, GROUP + 2).tolist()]
    with pytest.raises(KeyboardInterrupt):
        sweep(model, ids, cells, store=store)
    kept["full"] = None
    _, resumed = sweep(model, ids, cells, store=store)
    _, whole = sweep(model, ids, cells)
    assert all(torch.equal(resumed[c.name].loss, whole[c.name].loss) for c in cells)


def test_the_same_cell_twice_is_refused() -> None:
    with pytest.raises(InputError, match="names a cell twice"):
        sweep(tiny.tiny("llama"), tiny.tokens(1, 8), [CELLS[0], CELLS[0]])


def test_basins() -> None:
    scales = [0.0, 0.5, 1.0, 1.5, 2.0]
    both = tolerance_basin(scales, [0.2, 0.03, 0.0, 0.02, 0.06], 0.05)
    assert both.low == pytest.approx(0.5 - 0.5 * 0.02 / 0.17)
    assert both.high == pytest.approx(1.5 + 0.5 * 0.03 / 0.04)
    assert not both.open_low
    assert not both.open_high
    flat = tolerance_basin(scales, [0.01, -0.2, 0.0, 0.0, math.inf], 0.05)
    assert (flat.low, flat.open_low) == (0.0, True)
    assert (flat.high, flat.open_high) == (1.5, False)
    narrow = tolerance_basin([0.9, 1.0, 1.1], [1.0, 0.0, 1.0], 0.01)
    assert narrow.width == pytest.approx(0.002)
    with pytest.raises(InputError, match="must contain it"):
        tolerance_basin([0.0, 2.0], [0.0, 0.0], 0.05)


def test_a_cell_whose_loss_is_none_is_told() -> None:
    model = copy.deepcopy(tiny.tiny("llama"))
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(1e4)  # far beyond float32 with the scale below
    cells = [Cell(Edit("value.full", 3e38, 3e38)), Cell(Edit("residual.mlp", 0.5))]
    study = edit_study(model, tiny.tokens(2, 16), cells)
    assert not math.isfinite(study.results["cells"][1]["loss"])
    (line,) = [line for line in study.findings if "no loss" in line]
    assert line.startswith("1 of 2 cells")
    assert "value.full, s∥ 3e+38" in line
