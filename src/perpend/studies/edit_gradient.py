"""Where may an edit be read off the gradient, and where does that break?

    study = gradient_study(model, tokens, sites=["value.exclude_self"])

The gradient map gives ∂loss/∂s∥ and ∂loss/∂s⊥ at every layer, head, token and site in one backward pass. Its
linear reading of a removal is −∂loss/∂s∥. Beside it stands the loss that each layer's removal really costs,
and all layers' together: the linear reading is exact for a small step, a full removal is none.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perpend.batching import batches
from perpend.distributed import Store, direct, map_blocks
from perpend.evaluation.windows import Windows, as_windows
from perpend.models.edit import VALUE_SITES, Edit
from perpend.models.gradient import gradient_map
from perpend.models.placement import input_device
from perpend.progress import Progress, silent
from perpend.studies.edit_sweep import Cell, EditStudy, sweep
from perpend.studies.head_sensitivity import layer_changes
from perpend.studies.resampling import draws

SCALES = ("parallel", "perpendicular")
STEPS = (0.99, 1.01)  # the finite edits that check the slope


def gradient_study(
    model: nn.Module,
    tokens: Tensor | Windows,
    *,
    sites: Sequence[str],
    reference: str = "head",
    parallel: float = 0.0,
    batch: int = 2,
    store: Store = direct,
    progress: Progress = silent,
    seed: int = 0,
) -> EditStudy:
    """The map of slopes, its check against finite edits, and each layer's finite edit to `parallel`.

    Tables: `slopes` (site, scale, layer, head), `slope_check` (site, scale: slope and central difference),
    `linear` (site, layer; layer None: all layers: linear reading, finite change, its interval),
    `slope_positions` (site, scale, token).
    """
    import pandas as pd

    windows = as_windows(tokens)
    device = input_device(model)
    groups = batches(windows.tokens, batch)

    def compute(index: int) -> dict[str, Tensor]:
        losses, slopes = gradient_map(model, groups[index].to(device), sites=sites, reference=reference)
        found = {"losses": losses.double().cpu()}
        for site, slope in slopes.items():
            found[f"{site}/heads"] = slope.double().sum(-1).cpu()  # [2, n, layers, heads]
            found[f"{site}/tokens"] = slope.double().sum((2, 3)).cpu()  # [2, n, T - 1]
        return found

    with progress(total=len(groups), unit="batches", description="gradient") as done:

        def counted(index: int) -> dict[str, Tensor]:
            found = compute(index)
            done(1)
            return found

        parts = map_blocks(len(groups), counted, store=store, name="gradient")
    heads = {s: torch.cat([torch.as_tensor(p[f"{s}/heads"]) for p in parts], 1).mean(1) for s in sites}
    positions = {s: torch.cat([torch.as_tensor(p[f"{s}/tokens"]) for p in parts], 1).mean(1) for s in sites}
    check = _check(model, windows, sites, reference, heads, batch, store)
    linear = _linear(model, windows, sites, reference, parallel, heads, batch, store, seed)
    tables = {
        "slopes": pd.DataFrame(_rows(heads)),
        "slope_check": pd.DataFrame(check),
        "linear": pd.DataFrame(linear).astype({"layer": "Int64"}),
        "slope_positions": pd.DataFrame(
            {"site": site, "scale": scale, "token": t, "slope": float(value)}
            for site, slope in positions.items()
            for scale, row in zip(SCALES, slope)
            for t, value in enumerate(row)
        ),
    }
    results = {"slope_check": check, "linear": linear}
    arrays = {f"slopes_{site}": slope.numpy() for site, slope in heads.items()}
    conventions = {
        "slope": "∂(mean loss, nats per token)/∂scale at 1, exact; a site's is the sum over layers, heads, "
        "tokens",
        "linear reading": f"(s∥ − 1)·slope at s∥ = {parallel:g}",
        "reference": reference,
        "check": f"central difference between s = {STEPS[0]} and {STEPS[1]}",
    }
    return EditStudy(results, tables, arrays, _said(check, linear, parallel), conventions)


def _rows(heads: dict[str, Tensor]) -> list[dict[str, Any]]:
    return [
        {
            "site": site,
            "scale": scale,
            "layer": layer,
            "head": head if site in VALUE_SITES else None,
            "slope": float(value),
        }
        for site, slope in heads.items()
        for scale, layers in zip(SCALES, slope)
        for layer, row in enumerate(layers)
        for head, value in enumerate(row)
    ]


def _check(
    model: nn.Module,
    windows: Windows,
    sites: Sequence[str],
    reference: str,
    heads: dict[str, Tensor],
    batch: int,
    store: Store,
) -> list[dict[str, Any]]:
    """Slope of each whole site beside the central difference of two finite edits."""
    cells = {
        (site, scale, step): Cell(Edit(site, **{scale: step}, reference=reference))
        for site in sites
        for scale in SCALES
        for step in STEPS
    }

    def kept(name: str, compute: Any) -> Any:
        return store(f"slope-{name}", compute)

    _, found = sweep(model, windows, list(cells.values()), batch=batch, store=kept)
    rows = []
    for site in sites:
        for scale, slope in zip(SCALES, heads[site]):
            low, high = (found[cells[site, scale, step].name].loss.double().mean().item() for step in STEPS)
            finite = (high - low) / (STEPS[1] - STEPS[0])
            rows.append({"site": site, "scale": scale, "slope": float(slope.sum()), "finite": finite})
    return rows


def _linear(
    model: nn.Module,
    windows: Windows,
    sites: Sequence[str],
    reference: str,
    parallel: float,
    heads: dict[str, Tensor],
    batch: int,
    store: Store,
    seed: int,
) -> list[dict[str, Any]]:
    """Linear reading and finite change: a row a layer, and one with layer None for all layers at once."""
    weights = draws(len(windows.tokens), 1000, seed)
    rows = []
    for site in sites:
        base, found = layer_changes(
            model, windows, site, parallel, reference=reference, batch=batch, store=store
        )
        cell = Cell(Edit(site, parallel, reference=reference))
        _, joint = sweep(
            model, windows, [cell], batch=batch, store=lambda n, c, s=site: store(f"joint-{s}-{n}", c)
        )
        each = [*(found - base), joint[cell.name].loss.double().mean(1) - base]
        slopes = [*heads[site][0].sum(-1), heads[site][0].sum()]
        for layer, (slope, change) in enumerate(zip(slopes, each)):
            low, high = np.quantile(weights @ change.numpy(), [0.025, 0.975])
            rows.append(
                {
                    "site": site,
                    "layer": layer if layer < len(found) else None,
                    "linear": float((parallel - 1.0) * slope),
                    "finite": float(change.mean()),
                    "low": float(low),
                    "high": float(high),
                }
            )
    return rows


def _said(check: list[dict[str, Any]], linear: list[dict[str, Any]], parallel: float) -> list[str]:
    worst = max(abs(r["slope"] - r["finite"]) / max(abs(r["finite"]), 1e-3) for r in check)
    lines = [f"Slopes and central differences of finite edits agree within {worst:.1%} at every site."]
    for site in dict.fromkeys(row["site"] for row in linear):
        own = [row for row in linear if row["site"] == site]
        layers, whole = own[:-1], own[-1]
        pairs = np.array([[row["linear"], row["finite"]] for row in layers])
        signs = int((np.sign(pairs[:, 0]) == np.sign(pairs[:, 1])).sum())
        lines.append(
            f"{site}, s∥ = {parallel:g}: the gradient reads {whole['linear']:+.3f} nats for all layers, the "
            f"edit costs {whole['finite']:+.3f}; layer by layer the finite changes sum to "
            f"{pairs[:, 1].sum():+.3f}, and the linear reading has the sign of the finite one in {signs} of "
            f"{len(layers)}."
        )
    return lines
