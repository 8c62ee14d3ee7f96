"""Masks against their definition, written a second time in plain Python."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perpend.compression.blockwise import compress
from perpend.compression.masks import lowest, pattern_of, pruned, removed
from perpend.errors import InputError
from tiny import build, tokens


def oracle_mask(scores: np.ndarray, pattern: str, sparsity: float, scope: str) -> np.ndarray:
    """True where a weight goes: sort (score, position) pairs, take from the front."""
    out = np.zeros(scores.shape, dtype=bool)
    rows, width = scores.shape
    if ":" in pattern:
        kept, of = map(int, pattern.split(":"))
        for i in range(rows):
            for start in range(0, width, of):
                group = sorted((scores[i, j], j) for j in range(start, start + of))
                for _, j in group[: of - kept]:
                    out[i, j] = True
        return out
    if scope == "matrix":
        ranked = sorted((scores[i, j], i, j) for i in range(rows) for j in range(width))
        for _, i, j in ranked[: math.floor(sparsity * rows * width + 1e-9)]:
            out[i, j] = True
        return out
    for i in range(rows):
        for _, j in sorted((scores[i, j], j) for j in range(width))[: math.floor(sparsity * width + 1e-9)]:
            out[i, j] = True
    return out


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    pattern=st.sampled_from(["unstructured", "2:4", "4:8", "1:4", "3:8"]),
    scope=st.sampled_from(["row", "matrix"]),
    sparsity=st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.77]),
    values=st.sampled_from([3, 1000]),
)
def test_masks_are_the_definition_with_and_without_ties(seed, pattern, scope, sparsity, values):
    # few distinct integers: most groups hold ties
    scores = np.random.default_rng(seed).integers(0, values, (5, 24)).astype(float)
    mask = pruned(torch.tensor(scores), pattern=pattern, sparsity=sparsity, scope=scope)
    assert np.array_equal(mask.numpy(), oracle_mask(scores, pattern, sparsity, scope))


def test_ties_go_by_position():
    assert lowest(torch.zeros(1, 4), 2).tolist() == [[True, True, False, False]]
    assert lowest(torch.tensor([[1.0, 0.0, 1.0, 0.0]]), 3).tolist() == [[True, True, False, True]]


@pytest.mark.parametrize("width", [4, 24])
def test_the_lowest_are_the_first_of_a_stable_sort_infinities_and_nan_included(width):
    generator = np.random.default_rng(3)
    scores = torch.tensor(generator.choice([0.0, 1.0, 2.0, math.inf, math.nan], (40, width)))
    for count in range(width + 1):
        first = torch.argsort(scores, dim=-1, stable=True)[:, :count]
        assert torch.equal(lowest(scores, count), torch.zeros(40, width).bool().scatter(1, first, True))
        known = scores.nan_to_num(3.0, posinf=math.inf)
        first = torch.argsort(known, dim=-1, stable=True)[:, :count]
        assert torch.equal(lowest(known, count), torch.zeros(40, width).bool().scatter(1, first, True))


def test_the_count_is_not_lost_to_binary_fractions():
    assert int(0.29 * 100) == 28  # the trap
    assert removed(100, 0.29) == 29


@pytest.mark.parametrize("text", ["4:4", "0:4", "2:4:8", "half", "8:4"])
def test_patterns_that_are_none(text):
    with pytest.raises(InputError, match="KEPT:OF"):
        pattern_of(text)


@pytest.mark.parametrize("spec", ["wanda", "wanda:2:4", "wanda:4:8", "wanda:sparsity=0.3"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe", "gpt_oss"])
def test_wanda_masks_of_a_first_block_are_the_definition(family, spec):
    """Inputs of every matrix taken by module hooks (and by hand for experts), scores in float64 NumPy."""
    model = build(family)
    ids = tokens(3, 20)
    before = copy.deepcopy(model)
    inputs = block_inputs(before, ids)
    compress(model, ids, spec)
    pattern = spec.removeprefix("wanda:") if spec.count(":") == 2 else "unstructured"
    sparsity = 0.3 if "0.3" in spec else 0.5
    checked = 0
    for name, (dense, rows) in inputs.items():
        pruned_weight = _matrix(model, name)
        norms = np.sqrt((rows.double().numpy() ** 2).sum(0))
        if not len(rows):
            norms = np.ones_like(norms)
        scores = np.abs(dense.double().numpy()) * norms
        mask = oracle_mask(scores, pattern, sparsity, "row")
        assert np.array_equal(pruned_weight.numpy() == 0, mask), name
        assert np.array_equal(pruned_weight.numpy()[~mask], dense.numpy()[~mask]), "no weight is updated"
        checked += 1
    assert checked >= 4


def test_magnitude_masks_are_the_definition():
    for spec, pattern in (("magnitude", "unstructured"), ("magnitude:2:4", "2:4")):
        model = build("llama")
        dense = model.model.layers[1].mlp.up_proj.weight.detach().clone().numpy()
        compress(model, None, spec)
        mask = oracle_mask(np.abs(dense.astype(float)), pattern, 0.5, "matrix")
        assert np.array_equal(model.model.layers[1].mlp.up_proj.weight.detach().numpy() == 0, mask)


def test_later_blocks_are_scored_on_compressed_activations():
    """Sequential propagation: the second block's norms come from the pruned first block."""
    ids = tokens(3, 20)
    model = build("llama")
    reference = copy.deepcopy(model)
    compress(model, ids, "wanda")
    for index in range(3):
        layer = reference.model.layers[index]
        seen = {}
        handles = [
            m.register_forward_pre_hook(lambda m, a, n=n, seen=seen: seen.__setitem__(n, a[0].detach()))
            for n, m in layer.named_modules()
            if isinstance(m, torch.nn.Linear)
        ]
        with torch.no_grad():
            reference(input_ids=ids)
        for handle in handles:
            handle.remove()
        for name, rows in seen.items():
            weight = layer.get_submodule(name).weight.data
            norms = rows.reshape(-1, rows.shape[-1]).double().square().sum(0).sqrt().numpy()
            mask = oracle_mask(np.abs(weight.double().numpy()) * norms, "unstructured", 0.5, "row")
            weight[torch.tensor(mask)] = 0
    assert torch.equal(
        reference.model.layers[2].mlp.down_proj.weight, model.model.layers[2].mlp.down_proj.weight
    )
    assert all(torch.equal(a, b) for a, b in zip(reference.parameters(), model.parameters()))


def block_inputs(model, ids):
    """Matrix name -> (weight [out, in], input rows), for every matrix of block 0, found without perpend."""
    block = model.transformer.h[0] if hasattr(model, "transformer") else model.model.layers[0]
    prefix = "transformer.h.0" if hasattr(model, "transformer") else "model.layers.0"
    seen = {}
    handles = []
    for name, module in block.named_modules():
        kind = type(module).__name__
        if kind in ("Linear", "Conv1D"):
            handles.append(
                module.register_forward_pre_hook(lambda m, a, n=name: seen.__setitem__(n, a[0].detach()))
            )
        elif kind.endswith("Experts"):
            handles.append(module.register_forward_pre_hook(lambda m, a, n=name: seen.__setitem__(n, a)))
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    out = {}
    for name, rows in seen.items():
        module = block.get_submodule(name)
        if isinstance(rows, torch.Tensor):
            weight = module.weight.data.T if type(module).__name__ == "Conv1D" else module.weight.data
            out[f"{prefix}.{name}"] = (weight, rows.reshape(-1, rows.shape[-1]))
            continue
        hidden, chosen = rows[0].detach(), rows[1]
        for expert in range(module.num_experts):
            mine = hidden.reshape(-1, hidden.shape[-1])[(chosen == expert).any(-1)]
            up, down = module.gate_up_proj.data[expert], module.down_proj.data[expert]
            if module.is_transposed:  # gpt-oss: [in, out], gate and up interleaved, with biases
                inner = module._apply_gate(mine @ up + module.gate_up_proj_bias.data[expert])
                up, down = up.T, down.T
            else:
                gate, value = (mine @ up.T).chunk(2, -1)
                inner = module.act_fn(gate) * value
            out[f"{prefix}.{name}.gate_up_proj[{expert}]"] = (up, mine)
            out[f"{prefix}.{name}.down_proj[{expert}]"] = (down, inner)
    return out


def _matrix(model, name):
    path, _, rest = name.partition("[")
    if rest:
        owner, _, own = path.rpartition(".")
        module = model.get_submodule(owner)
        weight = getattr(module, own).data[int(rest[:-1])]
        return weight.T if module.is_transposed else weight
    module = model.get_submodule(path)
    return module.weight.data.T if type(module).__name__ == "Conv1D" else module.weight.data
