"""Models larger than a device: with weights on the disk or out of memory, perpend gives the same bits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import perpend
import spread
import tiny
from perpend.errors import InputError
from perpend.models.placement import as_placed, held, input_device, is_spread, max_memory, places, stored
from perpend.models.roles import find_roles
from perpend.models.weights import weights_hash
from perpend.surveys.outliers import survey_outliers


@pytest.fixture(scope="module")
def plain() -> Any:
    return tiny.build("llama")


@pytest.fixture(scope="module")
def on_disk(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return spread.on_disk(tiny.build("llama"), tmp_path_factory.mktemp("disk"))


@pytest.fixture(scope="module")
def out_of_memory() -> Any:
    return spread.out_of_memory(tiny.build("llama"), Path())


@pytest.mark.parametrize("name", spread.OPERATIONS)
def test_what_perpend_does_is_the_same_with_weights_on_the_disk(name: str, plain: Any, on_disk: Any) -> None:
    operation = spread.OPERATIONS[name]
    assert spread.differences(operation(plain), operation(on_disk)) == []
    meta = [n for n, p in on_disk.named_parameters() if p.device.type == "meta"]
    assert len(meta) > 20, "the weights came into memory and stayed there"


@pytest.mark.parametrize("name", ["attention", "edits", "ablation", "gradients", "awq", "pruned model"])
def test_what_perpend_does_is_the_same_with_weights_out_of_memory(
    name: str, plain: Any, out_of_memory: Any
) -> None:
    operation = spread.OPERATIONS[name]
    assert spread.differences(operation(plain), operation(out_of_memory)) == []


def _read(name: str, model: Any) -> dict[str, Any]:
    """Surveys, an edit of each kind and an ablation of any family."""
    inputs = next(iter(tiny.inputs(name).values()))
    whole = name in tiny.VISION + tiny.ENCODERS
    found: dict[str, Any] = {
        "hash": weights_hash(model),
        "attention": perpend.survey_attention(model, inputs, window=None if whole else 6),
        "updates": perpend.survey_updates(model, inputs),
    }
    for site in ("value.exclude_self", "residual.attn"):
        with torch.no_grad(), perpend.edit(model, site=site, parallel=0.0):
            found[site] = model(inputs)[0]
    with torch.no_grad(), perpend.ablate(model, [(1, 1)]):
        found["ablated"] = model(inputs)[0]
    if name in tiny.VISION:
        found["roles"] = find_roles(model, inputs)
        found["outliers"] = survey_outliers(model, inputs, [(0,)] * len(inputs))
    return found


# one of each: Conv1D with tied embeddings, ALiBi through an adapter, experts fused in one tensor, learned
# sinks, norms after attention, an encoder, images; all families are read in the same way
@pytest.mark.parametrize(
    "name", ["gpt2", "bloom", "qwen3_moe", "gpt_oss", "gemma2", "bert", "dinov2_registers"]
)
def test_families_are_read_and_edited_alike_with_weights_on_the_disk(name: str, tmp_path: Path) -> None:
    model = spread.on_disk(tiny.build(name), tmp_path)
    assert spread.differences(_read(name, tiny.tiny(name)), _read(name, model)) == []


@pytest.mark.parametrize("regime", ["wanda:2:4", "rtn:bits=3,group=8"])
@pytest.mark.parametrize("name", ["gpt2", "qwen3_moe"])
def test_fused_and_transposed_weights_on_the_disk_are_compressed(
    name: str, regime: str, tmp_path: Path
) -> None:
    compressed = spread._compressed(regime)
    model = spread.on_disk(tiny.build(name), tmp_path)
    before = sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir())
    assert spread.differences(compressed(tiny.tiny(name)), compressed(model)) == []
    assert sorted((p.name, p.read_bytes()) for p in tmp_path.iterdir()) == before, "the files were written"


# ---- loading ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3_moe"])
def test_what_does_not_fit_in_memory_is_left_on_the_disk(name: str, tmp_path: Path) -> None:
    tiny.tiny(name).save_pretrained(tmp_path)
    size = sum(p.numel() * 4 for p in tiny.tiny(name).parameters())
    model, _ = perpend.load(tmp_path, device="auto", max_memory={"cpu": size * 6 // 10})
    assert "disk" in places(model)
    assert is_spread(model)
    assert input_device(model) == torch.device("cpu")
    inputs = tiny.tokens()
    with torch.no_grad():
        assert torch.equal(model(inputs).logits, tiny.tiny(name)(inputs).logits)
    assert weights_hash(model) == weights_hash(tiny.tiny(name))
    again, _ = perpend.load(tmp_path, **as_placed(model))
    assert places(again) == places(model)


def test_a_model_that_fits_is_not_spread(tmp_path: Path) -> None:
    tiny.save_llama(tmp_path)
    model, _ = perpend.load(tmp_path, device="auto")
    if torch.cuda.device_count() < 2:
        assert not is_spread(model)
    assert as_placed(tiny.tiny("llama")) == {"device": "cpu"}
    assert places(tiny.tiny("llama")) == "cpu"


def test_a_nan_on_the_disk_is_named(tmp_path: Path) -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[2].mlp.down_proj.weight[0, 0] = torch.nan
    model.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=r"model\.layers\.2\.mlp\.down_proj\.weight"):
        perpend.load(tmp_path, device="auto", max_memory={"cpu": "100KB"})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("cpu", "no size"),
        ("cpu=lots", "'lots' for 'cpu' is no size"),
        ("cuda=1GiB", "no device 'cuda' here"),
        ("99=1GiB", "no device '99' here"),
        ({"cpu": "1TB"}, "0=20GiB,cpu=64GiB"),
    ],
)
def test_a_limit_that_is_none_is_refused(given: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=words):
        max_memory(given)
    with pytest.raises(InputError, match=words):
        perpend.load(tiny.save_llama(tmp_path), device="auto", max_memory=given)


def test_a_limit_without_spreading_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="device=auto"):
        perpend.load(tiny.save_llama(tmp_path), device="cpu", max_memory="cpu=1GiB")


def test_limits_are_bytes() -> None:
    assert max_memory(None) is None
    assert max_memory(" cpu = 1.5GiB ")["cpu"] == 3 * 2**29
    assert max_memory({"cpu": 1000})["cpu"] == 1000


# ---- weights that are elsewhere --------------------------------------------------------------------------


def test_what_is_written_is_kept_by_this_model_and_not_by_its_copy(tmp_path: Path) -> None:
    model = spread.on_disk(tiny.build("llama"), tmp_path)
    other = copy.deepcopy(model)
    before = weights_hash(model)
    layer = model.model.layers[0]
    with held(layer, write=True), torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)
        inside = layer.mlp.up_proj.weight.clone()
        model(tiny.tokens())  # a call inside leaves what is there
        assert torch.equal(layer.mlp.up_proj.weight, inside)
    assert layer.mlp.up_proj.weight.device.type == "meta"
    assert torch.equal(stored(layer.mlp.up_proj, "weight"), inside)
    assert weights_hash(model) != before
    assert weights_hash(other) == before
    third = copy.deepcopy(model)
    changed = weights_hash(model)
    del model, layer
    assert weights_hash(third) == changed, "the files went with the model that wrote them"


@pytest.mark.parametrize("place", [spread.on_disk, spread.out_of_memory])
def test_what_is_not_to_be_kept_is_not(place: Any, tmp_path: Path) -> None:
    model = place(tiny.build("llama"), tmp_path)
    before, layer = weights_hash(model), model.model.layers[2]
    with held(layer), torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)
    assert weights_hash(model) == before
    with pytest.raises(RuntimeError, match="shape"), held(layer, write=True), torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2).view(7, 7)
    assert weights_hash(model) == before
    with held(layer, write=True), held(layer.mlp), torch.no_grad():
        layer.mlp.up_proj.weight.mul_(2)  # the outer one is in charge
    assert weights_hash(model) != before


def test_a_model_without_values_is_refused() -> None:
    with torch.device("meta"):
        empty = nn.Linear(2, 2)
    with pytest.raises(InputError, match="meta device"):
        input_device(empty)
    with pytest.raises(InputError, match="weight has no values"):
        stored(empty, "weight")
    assert input_device(nn.ReLU()) == torch.device("cpu")
