"""Surveys of saved probabilities: the numbers that q and k give, and the zero policy where rows underflow."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from perpend.errors import InputError
from perpend.surveys.attention import survey_attention
from perpend.surveys.probabilities import signatures_from_probabilities

W = 8


def attentions(name: str = "llama", count: int = 4, length: int = 30, dtype: torch.dtype = torch.float32):
    model = tiny.build(name).to(dtype)
    model.set_attn_implementation("eager")
    tokens = tiny.tokens(count, length)
    with torch.no_grad():
        return model, tokens, model(tokens, output_attentions=True).attentions


def test_saved_tensors_give_the_survey_of_the_model() -> None:
    model, tokens, saved = attentions()
    survey = survey_attention(model, tokens, window=W)
    for given in (
        saved,
        torch.stack(saved),
        {f"blocks.{i}.attn.hook_pattern": p for i, p in enumerate(saved)},
    ):
        found = signatures_from_probabilities(given, window=W)
        np.testing.assert_allclose(found.signatures, survey.signatures, atol=1e-5)
        np.testing.assert_allclose(found.arithmetic, survey.arithmetic, atol=1e-6)
        for name in ("total", "binary", "dispersion", "balance"):
            np.testing.assert_allclose(found.statistics[name], survey.statistics[name], atol=1e-4)
        assert found.zeros == 0
    one = signatures_from_probabilities(torch.stack(saved)[:, 0], window=W)
    assert one.rows.tolist() == [22, 22, 22]


def test_encoder_probabilities_keep_all_keys() -> None:
    model, tokens, saved = attentions("bert", length=20)
    found = signatures_from_probabilities(saved, sink="cls")
    np.testing.assert_allclose(found.signatures, survey_attention(model, tokens).signatures, atol=1e-5)


def test_underflowed_zeros_are_replaced_and_counted_and_structural_ones_are_left_out() -> None:
    rows = torch.zeros(1, 2, 2, 12, 12, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    for t in range(12):
        rows[..., t, : t + 1] = torch.rand(1, 2, 2, t + 1, generator=generator, dtype=torch.float64) + 0.1
    rows[..., 10:, :4] = 0.0  # no head and no sequence sees keys 0-3 there: a sliding window
    rows[0, 0, 1, 6, 2] = 0.0  # one head, one sequence: underflow
    rows /= rows.sum(-1, keepdim=True)
    found = signatures_from_probabilities(rows, window=4, epsilon=1e-5)
    assert found.zeros == 1
    assert found.left_out.tolist() == [4]
    assert found.rows.tolist() == [12]  # 2 sequences, queries 4 to 9
    part = rows[0, :, :, 4:10, :4]
    part = part / part.sum(-1, keepdim=True)
    part[0, 1, 2] = torch.where(part[0, 1, 2] == 0, 1e-5, part[0, 1, 2] * (1 - 1e-5))
    signature = torch.log_softmax(part.log().mean((0, 2)), -1)
    np.testing.assert_allclose(found.signatures[0], signature, atol=1e-12)
    assert any("1 zeros" in note for note in found.notes)


def test_half_precision_rows_underflow_where_logits_do_not() -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 12
    model = model.to(torch.float16)
    model.set_attn_implementation("eager")
    tokens = tiny.tokens(4, 30)
    with torch.no_grad():
        saved = model(tokens, output_attentions=True).attentions
    zeros = {eps: signatures_from_probabilities(saved, window=W, epsilon=eps) for eps in (1e-5, 1e-6)}
    assert zeros[1e-5].zeros > 0
    assert not np.allclose(zeros[1e-5].signatures, zeros[1e-6].signatures)
    assert survey_attention(model, tokens, window=W).zeros == 0


def test_a_row_without_any_mass_on_the_support_becomes_uniform_and_is_named() -> None:
    rows = torch.full((1, 2, 9, 9), 1 / 9, dtype=torch.float64)
    rows[0, 1, 8] = torch.eye(9)[8]
    found = signatures_from_probabilities([rows], window=4)
    assert found.zeros == 4
    assert any("1 rows had no mass" in note for note in found.notes)
    np.testing.assert_allclose(found.signatures, np.log(1 / 4), atol=1e-12)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((), "sdpa returns an empty tuple"),
        ({"q": torch.ones(1)}, "hook_pattern"),
        ([torch.ones(2, 2)], "shape"),
        ([torch.full((1, 2, 9, 9), 0.5)], "rows above 1"),
        ([torch.full((1, 2, 9, 9), -0.01)], "below 0"),
        ([torch.full((1, 2, 9, 9), 1 / 9), torch.full((1, 2, 8, 8), 1 / 8)], "the same for all layers"),
    ],
)
def test_what_is_no_probability_is_told(given, words: str) -> None:
    with pytest.raises(InputError, match=words):
        signatures_from_probabilities(given, window=None)
