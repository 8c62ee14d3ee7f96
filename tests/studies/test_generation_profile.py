"""The ratio while a model writes: real cached steps, equal to what one pass over the finished text gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from perpend.errors import InputError
from perpend.geometry import decompose
from perpend.models.stream import contributions
from perpend.studies.generation_profile import generation_profile, sampled_layers


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "cohere2"])
def test_each_step_is_the_token_of_one_pass_over_the_finished_text(name):
    model, prompts = tiny.tiny(name), tiny.tokens(2, 6)
    profile = generation_profile(model, prompts, steps=5)
    assert profile.cached
    assert profile.tokens.shape == (2, 5)
    assert profile.layers == tuple(sampled_layers(model.config.num_hidden_layers))
    assert profile.ratio.shape == (5, 3, 3, 2)
    seen = {}
    text = torch.cat([prompts, torch.as_tensor(profile.tokens)], 1)
    with torch.no_grad(), contributions(model, lambda c: seen.update({(c.layer, c.part): c})):
        model(text)
    for (step, i, j, prompt), ratio in np.ndenumerate(profile.ratio):
        c = seen[profile.layers[i], profile.parts[j]]
        split = decompose(c.update[prompt, 5 + step].double(), c.reference[prompt, 5 + step].double())
        assert ratio == pytest.approx(float(split.ratio), rel=2e-3, abs=1e-5)
        assert profile.alpha[step, i, j, prompt] == pytest.approx(float(split.alpha), rel=2e-3, abs=1e-5)
    assert len(profile.table) == profile.ratio.size
    row = profile.table.query("step == 3 and layer == @profile.layers[1] and part == 'mlp' and prompt == 1")
    assert float(row.ratio.iloc[0]) == profile.ratio[3, 1, profile.parts.index("mlp"), 1]
    assert [entry["layer"] for entry in profile.results["per_layer"]] == list(profile.layers)


def test_layers_are_spread():
    assert sampled_layers(30) == [5, 15, 25]
    assert sampled_layers(2) == [0, 1]
    assert sampled_layers(5, 2) == [1, 3]


def test_models_that_do_not_write_are_refused():
    with pytest.raises(InputError, match="does not generate"):
        generation_profile(tiny.tiny("bert"), tiny.tokens())
    with pytest.raises(InputError, match="at least one step"):
        generation_profile(tiny.tiny("llama"), tiny.tokens(), steps=0)
