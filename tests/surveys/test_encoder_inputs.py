"""Encoders as they are used: padded batches, and two segments in one sequence."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from perpend import survey_attention
from perpend.geometry import content_dispersion, split_entropy


def pairs_of_text() -> dict[str, torch.Tensor]:
    """Four sequences of two segments, of 20, 14, 17 and 20 real tokens."""
    lengths, second = [20, 14, 17, 20], [9, 6, 8, 11]
    ids, real = tiny.tokens(4, 20), torch.zeros(4, 20, dtype=torch.long)
    segments = torch.zeros(4, 20, dtype=torch.long)
    for i, (length, start) in enumerate(zip(lengths, second)):
        real[i, :length] = 1
        segments[i, start:length] = 1
    return {"input_ids": ids * real, "attention_mask": real, "token_type_ids": segments}


def eager(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Each sequence's rows [L, H, T, T], run alone and unpadded."""
    model.set_attn_implementation("eager")
    found = []
    with torch.no_grad():
        for i, length in enumerate(inputs["attention_mask"].sum(1).tolist()):
            one = {k: v[i : i + 1, :length] for k, v in inputs.items() if k != "attention_mask"}
            found.append(torch.cat(model(**one, output_attentions=True).attentions).double())
    model.set_attn_implementation("sdpa")
    return found


@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_pairs_are_read_as_each_alone_with_its_segments(side: str) -> None:
    model, inputs = tiny.build("bert"), pairs_of_text()
    rows = [each[..., :12] for each in eager(model, inputs)]
    rows = torch.cat([(r / r.sum(-1, keepdim=True)).transpose(0, 2).flatten(0, 0) for r in rows])
    if side == "left":
        shifts = (20 - inputs["attention_mask"].sum(1)).tolist()
        inputs = {
            name: torch.stack([row.roll(shift) for row, shift in zip(value, shifts)])
            for name, value in inputs.items()
        }
    survey = survey_attention(model, inputs, window=12, sink="cls", batch=3)
    assert survey.rows.tolist() == [20 + 14 + 17 + 20] * 3
    parts = split_entropy(rows, 0)  # [queries, H, L]
    np.testing.assert_allclose(survey.statistics["sink_mass"], parts.sink_mass.mean(0).T, rtol=1e-5)
    np.testing.assert_allclose(survey.statistics["total"], parts.total.mean(0).T, rtol=1e-5)
    spread = content_dispersion(rows, 0).mean(0).T
    np.testing.assert_allclose(survey.statistics["dispersion"], spread, rtol=1e-4)


def test_segments_matter_and_the_last_real_token_is_the_separator() -> None:
    model, inputs = tiny.build("bert"), pairs_of_text()
    plain = {**inputs, "token_type_ids": torch.zeros_like(inputs["token_type_ids"])}
    with_segments, without = (survey_attention(model, given, window=12) for given in (inputs, plain))
    assert np.abs(with_segments.signatures - without.signatures).max() > 1e-3
    # [SEP] in ragged sequences: each one's own last token, row statistics and no signatures
    survey = survey_attention(model, inputs, sink="sep", batch=2)
    mass = torch.cat([rows[..., -1].permute(2, 0, 1) for rows in eager(model, inputs)]).mean(0)
    np.testing.assert_allclose(survey.statistics["sink_mass"], mass, rtol=1e-5)
    assert np.isnan(survey.signatures).all()
    assert any("no signatures" in note for note in survey.notes)


def test_a_first_sequence_of_one_token_does_not_make_an_encoder_causal() -> None:
    model, ids, real = tiny.build("bert"), tiny.tokens(3, 20), torch.ones(3, 20, dtype=torch.long)
    real[0, 1:] = 0
    first, last = (
        survey_attention(model, ids[order], attention_mask=real[order], window=8, sink="cls")
        for order in ([0, 1, 2], [2, 1, 0])
    )
    assert first.rows.tolist() == last.rows.tolist() == [20 + 20] * 3
    np.testing.assert_allclose(first.signatures, last.signatures, atol=1e-6)
