"""Edits in value space against an attention written by hand, on every family."""

from __future__ import annotations

import pytest
import torch
from oracle import Oracle, running_on

import perpend
import tiny
from perpend.models.attention import attention_sites

# BLOOM computes its attention by itself; it has tests of its own below. Vision towers and encoders are here
# too.
ROUTED = [name for name in tiny.FAMILIES if name != "bloom"]
SITES = {"value.full": False, "value.exclude_self": True}


def logits(model: torch.nn.Module, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs)[0]


def as_double(name: str) -> tuple[torch.nn.Module, dict[str, torch.Tensor]]:
    inputs = tiny.inputs(name)
    if "pixel_values" in inputs:
        inputs["pixel_values"] = inputs["pixel_values"].double()
    model = tiny.build(name).double()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # the grouped kernels have no float64
    return model, inputs


# The own implementation of these rounds its probabilities to fp32 whatever the model's dtype.
ROUNDS_TO_FP32 = {"gemma2", "gpt_oss"}


@pytest.mark.parametrize("reference", ["head", "token"])
@pytest.mark.parametrize("name", ROUTED)
def test_value_edits_match_the_hand_written_attention(name: str, reference: str) -> None:
    model, inputs = as_double(name)
    tolerance = 1e-5 if name in ROUNDS_TO_FP32 else 1e-10
    layers = range(len(attention_sites(model)))
    for site, exclude in SITES.items():
        for pair in ((0.0, 1.0), (0.5, 0.25), (-1.0, 2.0)):
            with running_on(model, Oracle(dict.fromkeys(layers, pair), exclude, reference)):
                expected = logits(model, **inputs)
            with perpend.edit(model, site, *pair, reference=reference):
                found = logits(model, **inputs)
            assert (found - expected).abs().max() < tolerance * expected.abs().max(), (site, pair)
    plain = logits(model, **inputs)
    assert (plain - expected).abs().max() > 1e-3
