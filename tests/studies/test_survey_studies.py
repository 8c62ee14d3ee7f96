"""The ε sweep against eager attention of tiny models."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from perpend.studies.epsilon import epsilon_sweep, half_precision_signatures


def eager_rows(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    own = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return torch.stack(model(tokens, output_attentions=True).attentions).double()
    finally:
        model.set_attn_implementation(own)


def steep(family: str, factor: float) -> torch.nn.Module:
    """A model whose logits are so far apart that half precision loses the small probabilities."""
    model = tiny.build(family)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "q_proj" in name:
                parameter.mul_(factor)
    return model


def test_epsilon_acts_only_where_half_precision_underflows() -> None:
    tokens = tiny.tokens(2, 24)
    gentle, none, _ = half_precision_signatures(tiny.build("llama"), tokens, window=8)
    assert none == 0
    for epsilon in (1e-6, 1e-7):
        np.testing.assert_array_equal(gentle[1e-5], gentle[epsilon])

    lossy, zeros, _ = half_precision_signatures(steep("llama", 30.0), tokens, window=8)
    assert zeros > 0.1
    assert np.abs(lossy[1e-5] - lossy[1e-7]).max() > 1


def test_signatures_from_half_precision_match_a_hand_made_mean() -> None:
    model, tokens = steep("llama", 30.0), tiny.tokens(2, 24)
    found, _, empty = half_precision_signatures(model, tokens, window=8, epsilons=(1e-6,))
    rows = eager_rows(model, tokens)[:, :, :, 8:, :8].half().double()  # layers, batch, heads, rows, keys
    mass = rows.sum(-1, keepdim=True)
    assert empty == pytest.approx(float((mass == 0).double().mean()), abs=1e-3)
    rows = rows / mass
    gone = rows == 0
    filled = torch.where(gone, 1e-6, rows * (1 - 1e-6 * gone.sum(-1, keepdim=True)))
    mean = filled.log().nanmean((1, 3)).log_softmax(-1).flatten(0, 1).numpy()
    # fp32 logits of this size differ in the last digits between kernels, and a few cross a rounding step.
    np.testing.assert_allclose(found[1e-6], mean, atol=0.05)


def test_sweep_reports_a_rate_for_every_epsilon_and_metric() -> None:
    records = epsilon_sweep(steep("llama", 30.0), tiny.tokens(2, 24), window=8)
    assert [record.epsilon for record in records] == [1e-5, 1e-6, 1e-7]
    for record in records:
        assert record.zeros > 0.1
        assert record.exact["content"] == 0
        assert all(0 <= rate <= 1 for rate in record.exact.values())
