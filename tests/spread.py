"""Models spread by accelerate, what perpend does with a model, and whether two outcomes are the same bits."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import accelerate
import numpy as np
import pandas as pd
import torch

import perpend
import tiny
from perpend import compression
from perpend.evaluation.losses import divergence, token_nll
from perpend.evaluation.scoring import loglikelihoods
from perpend.models.edit import SITES, Edit
from perpend.models.generate import greedy
from perpend.models.gradient import gradient_map
from perpend.models.layout import blocks
from perpend.models.placement import input_device
from perpend.models.prune import pruned
from perpend.models.smaller import dropped, without
from perpend.models.weights import weights_hash
from perpend.studies.diagonal import diagonal_study
from perpend.studies.edit_gradient import gradient_study
from perpend.studies.edit_sweep import Cell, edit_study
from perpend.studies.generation_profile import generation_profile
from perpend.studies.head_sensitivity import head_sensitivity
from perpend.studies.prune_agreement import evaluate_agreement as agreement
from perpend.studies.pruning import evaluate_sets
from perpend.training.monitor import Monitor


def by_halves(model: Any, first: Any, second: Any) -> dict[str, Any]:
    """A device map: every second block, and the parts around the blocks in turn, at `second`."""
    own = {id(block.module): block.index for block in blocks(model)}
    holding = {id(m) for m in model.modules() if any(id(inner) in own for inner in m.modules())}
    found: dict[str, Any] = {}

    def walk(name: str, module: torch.nn.Module) -> None:
        if id(module) in holding and id(module) not in own:
            tensors = [*module._parameters, *module._buffers]
            found.update({f"{name}.{leaf}".lstrip("."): first for leaf in tensors})
            for child_name, child in module.named_children():
                walk(f"{name}.{child_name}".lstrip("."), child)
        elif any(True for _ in module.state_dict()) or any(True for _ in module.buffers()):
            found[name] = (first, second)[own.get(id(module), len(found)) % 2 == 0]

    walk("", model)
    return found


def on_disk(model: Any, folder: Path) -> Any:
    """Every second block and part of the model in files of `folder`."""
    return accelerate.dispatch_model(model, by_halves(model, "cpu", "disk"), offload_dir=str(folder))


def out_of_memory(model: Any, folder: Path) -> Any:
    """All weights on the meta device between calls, as when a model is kept in memory for an accelerator."""
    return accelerate.cpu_offload(model)


def all_on_disk(model: Any, folder: Path) -> Any:
    return accelerate.disk_offload(model, str(folder))


TOKENS = tiny.tokens(6, 20)


class _Letters:
    """Texts of letters as token ids, for scoring."""

    tokenizer = None

    def pair(self, head: str, tail: str) -> tuple[list[int], list[int]]:
        return [3 + ord(c) % 80 for c in head], [3 + ord(c) % 80 for c in tail]


def _edits(model: Any) -> Any:
    found = {}
    for site in SITES:
        with torch.no_grad(), perpend.edit(model, site=site, parallel=0.0):
            found[site] = model(TOKENS).logits
    with torch.no_grad(), perpend.edit(model, site="value.full", parallel=2.0, heads=[1], layers=[2]):
        found["heads"] = model(TOKENS).logits
    return found


def _ablated(model: Any) -> Any:
    with torch.no_grad(), perpend.ablate(model, [(0, 1), (2, 3)]) as ablation:
        return model(TOKENS).logits, sorted(ablation.checked), ablation.zero_anyway


def _compressed(regime: str) -> Callable[[Any], Any]:
    def run(model: Any) -> Any:
        other = copy.deepcopy(model)
        before = weights_hash(model)
        record = compression.compress(other, tiny.tokens(4, 16, seed=3), regime, batch=2)
        assert weights_hash(model) == before, "the copy shares its weights with the model"
        with torch.no_grad():
            return record.facts, record.bytes, weights_hash(other), other(TOKENS).logits

    return run


def _compared(model: Any) -> Any:
    other = copy.deepcopy(model)
    compression.compress(other, None, "rtn:bits=3,group=8")
    table = compression.measure(model, other, TOKENS, along=("update", "input"), batch=3).table
    with torch.no_grad(), compression.injection(model, other, "perpendicular"):
        injected = model(TOKENS, use_cache=False).logits
    maps = compression.sensitivity(model, other, TOKENS[:2], batch=2)
    return table, injected, maps, divergence(model, other, TOKENS, batch=3)[1].kl


def _pruned(model: Any) -> Any:
    found = []
    for heads in ([(0, 1)], [(layer, head) for layer in range(3) for head in (2, 3)]):
        smaller, how = pruned(model, heads)
        with torch.no_grad():
            found.append((how, weights_hash(smaller), smaller(TOKENS).logits))
    return found


def _smaller(model: Any) -> Any:
    smaller, notes = without(model, [(1, "block"), (2, "attn")])
    with torch.no_grad(), dropped(model, [(0, "mlp")]):
        logits = smaller(TOKENS.to(input_device(smaller))).logits
        return notes, weights_hash(smaller), logits, model(TOKENS).logits


def _monitored(model: Any) -> Any:
    return Monitor(TOKENS, window=6).read(0, model).layers


def _verified(model: Any) -> Any:
    found = perpend.verify(model, tokens=TOKENS)
    assert found.passed, str(found)
    return found.results


def _written(model: Any) -> Any:
    prompts = [[3, 4, 5, 6], [9, 8, 7]]
    return greedy(model, prompts, steps=5, done=[lambda written: False] * 2)


def _gradients(model: Any) -> Any:
    sites = ["value.full", "residual.mlp"]
    return gradient_map(model, TOKENS), gradient_study(model, TOKENS[:4], sites=sites).results


CELLS = [Cell(Edit("value.full", 0.0)), Cell(Edit("residual.mlp", 0.5))]
SETS = [[(0, 1), (1, 2)], [(0, 1), (2, 0)]]
OPERATIONS: dict[str, Callable[[Any], Any]] = {
    "hash": weights_hash,
    "attention": lambda m: perpend.survey_attention(
        m, TOKENS, window=6, windows=(8,), value_weights=("value", "output"),
        whole_rows="log", row_sample=3, retained=True, batch=2, block=4,
    ),
    "updates": lambda m: perpend.survey_updates(m, TOKENS, batch=2),
    "edits": _edits,
    "edit study": lambda m: edit_study(m, TOKENS, CELLS).results,
    "ablation": _ablated,
    "gradients": _gradients,
    "head sensitivity": lambda m: _untimed(head_sensitivity(m, TOKENS, site="value.full", batch=3).tables),
    "diagonals": lambda m: diagonal_study(m, TOKENS, batch=3).results,
    "prune sets": lambda m: evaluate_sets(m, TOKENS, SETS, batch=3),
    "pruned outputs": lambda m: agreement(m, TOKENS, SETS, batch=3),
    "pruned model": _pruned,
    "smaller model": _smaller,
    "losses": lambda m: token_nll(m, TOKENS, batch=4).values,
    "scores": lambda m: loglikelihoods(
        m, _Letters(), [("abcdefgh" * 9, "xy"), ("abcdefgh" * 9, "z"), ("q", "rs")]
    ),
    "generation": _written,
    "generation profile": lambda m: generation_profile(m, TOKENS[:2], steps=3),
    "rtn": _compressed("rtn:bits=4,group=8"),
    "wanda with gain": _compressed("wanda:2:4+gain"),
    "awq": _compressed("awq:bits=4,group=16,grid=4"),
    "refit": _compressed("magnitude+refit:iterations=2"),
    "compared": _compared,
    "monitor": _monitored,
    "verify": _verified,
}  # fmt: skip


def _untimed(tables: Mapping[str, Any]) -> Mapping[str, Any]:
    return {name: table for name, table in tables.items() if name != "cost"}


def differences(one: Any, two: Any, where: str = "") -> list[str]:
    """Where two outcomes are not the same, bit for bit; measured time is no outcome."""
    if isinstance(one, torch.Tensor):
        return differences(one.detach().cpu().numpy(), two.detach().cpu().numpy(), where)
    if isinstance(one, np.ndarray) and one.dtype != object:
        same = one.shape == two.shape and one.tobytes() == two.tobytes()
        return [] if same or np.array_equal(one, two, equal_nan=one.dtype.kind == "f") else [where]
    if isinstance(one, pd.DataFrame):
        return differences(one.to_dict("list"), two.to_dict("list"), where)
    if isinstance(one, Mapping):
        missing = [f"{where}/{key}" for key in one.keys() ^ two.keys()]
        return missing + [
            d for key in one.keys() & two.keys() if "seconds" not in str(key)
            for d in differences(one[key], two[key], f"{where}/{key}")
        ]  # fmt: skip
    if is_dataclass(one) and not isinstance(one, type):
        return [
            d for f in fields(one) if "seconds" not in f.name and f.name != "cost"
            for d in differences(getattr(one, f.name), getattr(two, f.name), f"{where}.{f.name}")
        ]  # fmt: skip
    if isinstance(one, Sequence) and not isinstance(one, str):
        if len(one) != len(two):
            return [where]
        return [d for i, (a, b) in enumerate(zip(one, two)) for d in differences(a, b, f"{where}/{i}")]
    same = one == two or (isinstance(one, float) and np.isnan(one) and np.isnan(two))
    return [] if same or one is two else [f"{where}: {one!r} {two!r}"]
