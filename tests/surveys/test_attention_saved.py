"""Surveys of probabilities in the forms that other tools leave them in: all give the same survey."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

import tiny
from perpend.errors import InputError
from perpend.surveys.probabilities import signatures_from_probabilities
from perpend.surveys.saved import attentions_of, survey_saved

W = 8


@pytest.fixture(scope="module")
def output():
    model = tiny.build("llama")
    model.set_attn_implementation("eager")
    with torch.no_grad():
        return model(tiny.tokens(3, 24), output_attentions=True)


class Cache:
    """As TransformerLens' cache: names and items, but no Mapping, and iterating gives names of its own."""

    def __init__(self, held: dict[str, torch.Tensor]) -> None:
        self.held = held

    def keys(self):
        return self.held.keys()

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.held[name]

    def __iter__(self):
        raise TypeError("not this way")


def test_all_forms_give_one_survey(output, tmp_path: Path) -> None:
    layers = [layer.contiguous() for layer in output.attentions]
    stacked = torch.stack(layers)
    names = {f"blocks.{i}.attn.hook_pattern": layer for i, layer in enumerate(layers)}
    np.save(tmp_path / "one.npy", stacked.numpy())
    # layer 10 after layer 2: by number, not by letters
    np.savez(tmp_path / "many.npz", **{f"layer_{n}": v.numpy() for n, v in zip((1, 2, 10), layers)})
    torch.save(tuple(layers), tmp_path / "tuple.pt")
    save_file({"attention": stacked}, tmp_path / "one.safetensors")
    forms = [
        output, stacked, stacked.numpy(), layers, names,
        Cache({**names, "blocks.0.hook_resid_pre": layers[0]}),
        tmp_path / "one.npy", str(tmp_path / "many.npz"), tmp_path / "tuple.pt", tmp_path / "one.safetensors",
    ]  # fmt: skip
    expected = signatures_from_probabilities(layers, window=W)
    assert np.isfinite(expected.signatures).all()
    for form in forms:
        found = survey_saved(form, window=W)
        np.testing.assert_array_equal(found.signatures, expected.signatures)
        np.testing.assert_array_equal(found.statistics["total"], expected.statistics["total"])


def test_zeros_are_replaced_and_counted_whatever_the_form(output) -> None:
    stacked = torch.stack(output.attentions).clone()
    stacked[0, 1, 2, 20, 3] = 0.0
    assert survey_saved(stacked.numpy(), window=W).zeros == 1


def test_forms_that_hold_no_attention(output, tmp_path: Path) -> None:
    layer = output.attentions[0]
    cases = [
        (SimpleNamespace(attentions=None), "eager"),
        (SimpleNamespace(attentions=(layer, None)), "layer 1"),
        (SimpleNamespace(attentions=((layer,), (layer,))), "generated"),
        ({}, "empty"),
        ({"q": layer, "k": layer}, "q, k is no layer"),
        (tmp_path / "a.csv", ".npy"),
        (tmp_path / "missing.npy", "no file"),
    ]
    for given, words in cases:
        with pytest.raises(InputError, match=words):
            survey_saved(given)


def test_files_are_data_and_never_run(tmp_path: Path) -> None:
    torch.save(Cache({}), tmp_path / "object.pt")
    np.save(tmp_path / "object.npy", np.array([Cache({})]), allow_pickle=True)
    (tmp_path / "cut.npz").write_bytes(b"PK\x03\x04")
    (tmp_path / "cut.safetensors").write_bytes(b"\x01")
    for name in ("object.pt", "object.npy", "cut.npz", "cut.safetensors"):
        with pytest.raises(InputError, match="cannot be read as plain"):
            attentions_of(tmp_path / name)
