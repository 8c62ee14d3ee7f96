"""Comparisons over seeds and budgets, on curves whose answer is known; and what a run is said to cost."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats

from perpend.errors import InputError
from perpend.training.compare import compare, interval, loss_at
from perpend.training.estimate import estimate, kept_bytes
from perpend.training.model import SIZES, Shape, build, shape
from perpend.training.recipe import PRESETS, Recipe, flops_per_token, peak_flops
from perpend.training.variants import apply_variant


def log(end: float, *, speed: float = 1.0, steps: int = 100) -> pd.DataFrame:
    """A curve that falls linearly from 5 to `end`, evaluated every ten steps, at `speed` steps a second."""
    rows = []
    for step in range(10, steps + 1, 10):
        spent = {"seconds": step / speed, "cpu_seconds": step / speed / 2}
        both = {"step": step, "tokens": step * 64, **spent}
        rows.append({**both, "loss": 5 - (5 - end) * step / steps, "valid_loss": None, "mfu": None})
        rows.append({**both, "loss": None, "valid_loss": 5 - (5 - end) * step / steps, "mfu": None})
    return pd.DataFrame(rows).astype({"loss": float, "valid_loss": float})


def test_differences_are_taken_within_seeds():
    """Seeds differ by 0.5, variants by 0.01: only pairing can see it."""
    ends = {0: 3.0, 1: 3.5, 2: 4.0}
    gaps = {0: -0.010, 1: -0.011, 2: -0.009}
    logs = {("baseline", s): log(e) for s, e in ends.items()}
    logs |= {("value-full", s): log(e + gaps[s]) for s, e in ends.items()}
    got = compare(logs)
    row = got.tables["paired"].set_index("budget").loc["tokens"]
    reference = stats.ttest_1samp(list(gaps.values()), 0.0)
    low, high = reference.confidence_interval(0.95)
    assert row["mean"] == pytest.approx(-0.01)
    assert (row["low"], row["high"]) == (pytest.approx(low), pytest.approx(high))
    assert row["high"] < 0
    assert "better" in " ".join(got.findings)
    assert got.results["final"]["baseline"]["sd"] == pytest.approx(0.5)
    assert got.results["variants"] == ["baseline", "value-full"]
    assert set(got.tables) == {"runs", "summary", "curves", "bands", "paired", "pairs"}
    assert got.tables["bands"].query("variant == 'baseline' and step == 100")["high"].item() == pytest.approx(
        4.0
    )


def test_a_slower_variant_is_charged_at_equal_time():
    """Equal after equal tokens, half as fast: at equal time it has done half the way, 5 -> 4 instead of 5 ->
    3."""
    logs = {("baseline", s): log(3.0) for s in (0, 1)}
    logs |= {("residual", s): log(3.0, speed=0.5) for s in (0, 1)}
    paired = compare(logs).tables["paired"].set_index("budget")
    assert paired.loc["tokens", "mean"] == pytest.approx(0)
    assert paired.loc["wall clock", "mean"] == pytest.approx(1.0)
    assert paired.loc["processor", "mean"] == pytest.approx(1.0)


def test_one_seed_has_no_interval_and_says_so():
    got = compare({("baseline", 0): log(3.0), ("residual", 0): log(3.2)})
    assert got.results["paired"][0]["low"] is None
    assert "no interval" in got.findings[1]
    assert got.results["final"]["baseline"]["sd"] is None
    assert got.tables["bands"][["low", "high"]].isna().all(axis=None)
    assert "paired" not in compare({("baseline", 0): log(3.0)}).tables


def test_the_detectable_effect_is_what_a_t_test_finds_four_times_in_five():
    generator = np.random.default_rng(0)
    effect = interval([-1.0, 0.0, 1.0, 0.5, -0.5])["detectable"] / np.std([-1, 0, 1, 0.5, -0.5], ddof=1)
    samples = generator.normal(effect, 1.0, size=(20_000, 5))
    found = stats.ttest_1samp(samples, 0.0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.06)


def test_losses_are_read_between_evaluations_and_never_outside():
    assert loss_at(log(3.0), "tokens", 55 * 64) == pytest.approx(5 - 2 * 0.55)
    assert math.isnan(loss_at(log(3.0), "seconds", 5.0))
    assert math.isnan(loss_at(log(3.0), "seconds", 101.0))


@pytest.mark.parametrize("variant", ["baseline", "value-exclude-self", "residual"])
def test_kept_bytes_are_what_autograd_keeps(variant):
    """Against a real forward pass, storages counted once, weights and logits left out."""
    size = Shape(layers=3, dim=32, heads=4, kv_heads=2, hidden=64, vocab=100, context=16)
    model = apply_variant(build(size), variant)
    seen: dict[int, int] = {}
    alive = []

    def keep(tensor):
        alive.append(tensor)
        seen[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logits = model(torch.zeros(2, 16, dtype=torch.long))
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), logits)}
    wanted = sum(n for pointer, n in seen.items() if pointer not in own)
    assert kept_bytes(size, variant, 2, 16, "float32") == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("size", PRESETS)
def test_the_papers_recipe_is_the_preset(size):
    source, recipe = PRESETS[size]
    assert (recipe.steps, recipe.batch, recipe.context, recipe.warmup) == (200_000, 256, 2048, 2000)
    assert recipe.steps * recipe.tokens_per_step == pytest.approx(104.9e9, rel=1e-3)
    assert recipe.lr == (3e-4 if size == "2.7B" else 4e-4)
    assert source == ("fineweb" if size.endswith("B") else "openwebtext")
    assert recipe.dtype == "bfloat16"
    large = shape(size).parameters() > 1e9
    cost = estimate(
        shape(size), "value-exclude-self", recipe, processes=8, strategy="fsdp" if large else "ddp"
    )
    assert cost.memory < 75e9, "does not fit in the 80 GB that the paper's machine has"


def test_flops_are_six_per_weight_and_token_and_causal_attention():
    s = SIZES["1.4B"]
    multiplied = s.parameters() - s.vocab * s.dim
    assert flops_per_token(s) == 6 * multiplied + 6 * s.layers * s.context * s.dim
    tied = SIZES["toy"]
    assert flops_per_token(tied) == 6 * tied.parameters() + 6 * tied.layers * tied.context * tied.dim
    assert peak_flops("NVIDIA H100 80GB HBM3") == 989e12
    assert peak_flops("AMD EPYC") is None


def test_recipes_refuse_what_cannot_be():
    for wrong in ({"steps": 0}, {"dtype": "float16"}, {"lr": 0.0}, {"final_lr": 2.0}, {"beta2": 1.0}):
        with pytest.raises(InputError):
            Recipe(**wrong)


@pytest.mark.parametrize("name", ["lr", "final_lr", "weight_decay", "beta1", "beta2", "clip"])
@pytest.mark.parametrize("wrong", [math.nan, math.inf, -0.5])
def test_a_number_of_a_recipe_that_is_none_is_named(name, wrong):
    with pytest.raises(InputError, match=rf"{name} .*not {wrong:g}"):
        Recipe(**{name: wrong})


def test_the_documented_costs_are_the_computed_ones():
    page = (Path(__file__).parents[2] / "docs/train.md").read_text(encoding="utf-8")
    for size, (source, recipe) in PRESETS.items():
        s = shape(size)
        large = s.parameters() > 1e9
        how = {"processes": 8, "strategy": "fsdp" if large else "ddp"}
        plain, exclude = (estimate(s, v, recipe, **how) for v in ("baseline", "value-exclude-self"))
        hours = plain.flops / (peak_flops("H100") * 8 * 0.4) / 3600
        row = (
            f"| {size} | {s.layers} × {s.dim}, {s.heads}/{s.kv_heads} heads, SwiGLU {s.hidden} "
            f"| {plain.parameters / 1e6:,.1f} M | {source} | {'FSDP' if large else 'DDP'}, {recipe.micro} "
            f"| {plain.states / 1e9:.1f} | {plain.memory / 1e9:.0f} | {exclude.memory / 1e9:.0f} "
            f"| {plain.flops:.2e} | {hours:.0f} |"
        )
        assert row in page
