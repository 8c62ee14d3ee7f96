"""Which heads does the loss feel, and do they cancel? Each head's removal beside all heads' at once.

    study = head_sensitivity(model, tokens, site="value.exclude_self", parallel=0.0)

Per layer: Δ_h, the change of the loss when head h alone is edited; Δ_joint, when all heads are; the smallest
and largest Δ_h, Σ|Δ_h|, ΣΔ_h with its sign, and the interaction Δ_joint − ΣΔ_h, which is 0 where heads only
add up.

What lies before the edited layer runs once for all its heads, and so does that layer's own attention: each
head costs the rest of its block, the blocks after it, and the head of the model. Over a whole map that is at
most lm head + body·(L+1)/2L a head; the cost measured against that bound is in the result.

Source: "Disentangling Representation Evolution in Transformers through Directional Decomposition", Figure 7;
the signed sum and the interaction are perpend's.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from perpend.batching import batches
from perpend.compression.replay import Replay, capture, stand_ins
from perpend.distributed import Store, direct, map_blocks
from perpend.errors import InputError
from perpend.evaluation.windows import Windows, as_windows
from perpend.models.attention import AttentionCall, AttentionSite, attach, attention_sites
from perpend.models.attention.standin import answering
from perpend.models.edit import RESIDUAL_SITES, VALUE_SITES, Edit, edit, plan_of, value_hook
from perpend.models.head import halves
from perpend.models.placement import input_device
from perpend.progress import Progress, silent
from perpend.studies.edit_sweep import EditStudy, token_losses
from perpend.studies.resampling import draws


@dataclass
class Prefixes:
    """Batches of sequences, run block by block: the stream as it enters block `at`, for each batch."""

    model: nn.Module
    rows: Sequence[Tensor]
    replays: list[Replay] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    at: int = 0

    def __post_init__(self) -> None:
        self.replays = [capture(self.model, rows[:, :-1]) for rows in self.rows]
        self.hidden = [replay.hidden for replay in self.replays]

    def advance(self, block: int) -> None:
        """Bring the streams to the entry of a block, the model being as it is."""
        while self.at < block:
            self.hidden = [r.run(self.at, h) for r, h in zip(self.replays, self.hidden)]
            self.at += 1

    def losses(self, batch: int, context: AbstractContextManager[Any] | None = None) -> Tensor:
        """Mean loss [rows] of one batch with this block run inside `context` and the rest as it is."""
        replay, hidden = self.replays[batch], self.hidden[batch]
        with context or nullcontext():
            hidden = replay.run(self.at, hidden)
        for block in range(self.at + 1, len(replay.blocks)):
            hidden = replay.run(block, hidden)
        with stand_ins(self.model, hidden):
            last = halves(self.model).trunk(self.rows[batch][:, :-1])
        return token_losses(self.model, last, self.rows[batch]).double().mean(1)


def prefixes(model: nn.Module, tokens: Tensor | Windows, batch: int) -> Prefixes:
    """Every batch of `tokens` at the entry of the first block."""
    halves(model)
    device = input_device(model)
    return Prefixes(model, [rows.to(device) for rows in batches(as_windows(tokens).tokens, batch)])


def layer_changes(
    model: nn.Module,
    tokens: Tensor | Windows,
    site: str,
    parallel: float,
    *,
    reference: str = "head",
    batch: int = 4,
    store: Store = direct,
) -> tuple[Tensor, Tensor]:
    """The unedited losses [n], and the losses [layers, n] with each layer's whole site edited alone."""
    layers = _layers(model, site)
    with torch.no_grad():
        state = prefixes(model, tokens, batch)
        base = torch.cat([state.losses(i) for i in range(len(state.rows))])

        def compute(index: int) -> dict[str, Tensor]:
            layer, block = layers[index]
            state.advance(block)
            change = Edit(site, parallel, layers=(layer,), reference=reference)
            return {"loss": torch.cat([state.losses(i, edit(model, change)) for i in range(len(state.rows))])}

        found = map_blocks(len(layers), compute, store=store, name=f"{site}-{reference}-layer")
    return base, torch.stack([torch.as_tensor(one["loss"]) for one in found])


def _layers(model: nn.Module, site: str) -> list[tuple[int, int]]:
    """(layer, block) of each layer that a site has."""
    if site in RESIDUAL_SITES:
        return [(index, index) for index in plan_of(model, Edit(site)).layers]
    return [(s.index, s.block) for s in attention_sites(model)]


def _head_losses(state: Prefixes, site: AttentionSite, change: Edit) -> Tensor:
    """Losses [1 + heads, n] of one layer: all heads edited, then each alone; its attention runs once."""
    model = state.model
    make = value_hook(plan_of(model, change), change)
    every: list[Tensor] = []
    for index, (replay, hidden) in enumerate(zip(state.replays, state.hidden)):
        kept: list[tuple[Tensor, Tensor]] = []

        def look(call: AttentionCall, output: Tensor, kept: list = kept) -> None:
            kept.append((output.clone(), make(call, output)))

        with attach(model, look, layers=[site.index], need_lse=change.site == "value.exclude_self"):
            replay.run(state.at, hidden)
        plain, edited = kept[0]
        rows = [state.losses(index, answering(model, site, edited))]
        for head in range(site.heads):
            alone = plain.clone()
            alone[:, :, head] = edited[:, :, head]
            rows.append(state.losses(index, answering(model, site, alone)))
        every.append(torch.stack(rows))
    return torch.cat(every, 1)


def head_sensitivity(
    model: nn.Module,
    tokens: Tensor | Windows,
    *,
    site: str = "value.exclude_self",
    parallel: float = 0.0,
    reference: str = "head",
    batch: int = 4,
    store: Store = direct,
    progress: Progress = silent,
    seed: int = 0,
) -> EditStudy:
    """Every head's edit alone and each layer's jointly. Raises InputError for a site without heads.

    Tables: `heads` (layer, head, change with its interval over sequences), `layers` (joint, smallest,
    largest, sum of sizes, signed sum, interaction). Changes in nats per token, paired with the unedited
    model. Layers are stored one by one, so that an interrupted map goes on.
    """
    if site not in VALUE_SITES:
        raise InputError(f"{site} has no heads; head sensitivity is defined for {' and '.join(VALUE_SITES)}")
    sites = attention_sites(model)
    change = Edit(site, parallel, reference=reference)
    total = sum(1 + s.heads for s in sites)
    with torch.no_grad():
        state = prefixes(model, tokens, batch)
        began = time.process_time()
        base = torch.cat([state.losses(i) for i in range(len(state.rows))])
        whole = time.process_time() - began
        head_time = _head_seconds(state)
        seconds, fresh = 0.0, 0
        with progress(total=total, unit="heads", description="head sensitivity") as done:

            def compute(index: int) -> dict[str, Tensor]:
                nonlocal seconds, fresh
                state.advance(sites[index].block)
                began = time.process_time()
                found = _head_losses(state, sites[index], change)
                seconds += time.process_time() - began
                fresh += 1 + sites[index].heads
                done(1 + sites[index].heads)
                return {"loss": found}

            stored = map_blocks(len(sites), compute, store=store, name=f"heads-{site}")
    losses = [torch.as_tensor(one["loss"]) for one in stored]
    blocks, body = len(state.replays[0].blocks), max(whole - head_time, 0.0)
    bound = head_time + body * (blocks + 1) / (2 * blocks)
    cost = {
        "bound": "lm head + body (L+1)/2L, a head",
        "bound_seconds": bound,
        "seconds_a_head": seconds / fresh if fresh else None,
        "ratio": seconds / fresh / bound if fresh == total and bound else None,
    }
    return _study(base, losses, cost, change, seed)


def _head_seconds(state: Prefixes) -> float:
    """What final norm and head of the model take for all batches, in seconds of the process."""
    began = time.process_time()
    for index, hidden in enumerate(state.hidden):
        with stand_ins(state.model, hidden):
            last = halves(state.model).trunk(state.rows[index][:, :-1])
        token_losses(state.model, last, state.rows[index])
    return time.process_time() - began


def _study(base: Tensor, losses: Sequence[Tensor], cost: dict, change: Edit, seed: int) -> EditStudy:
    import pandas as pd

    weights = draws(len(base), 1000, seed)
    heads, layers = [], []
    for layer, found in enumerate(losses):
        changes = (found - base).numpy()  # [1 + heads, n]
        means = changes.mean(1)
        low, high = np.quantile(weights @ changes.T, [0.025, 0.975], axis=0)
        for head in range(1, len(means)):
            record = {"layer": layer, "head": head - 1, "change": float(means[head])}
            heads.append({**record, "low": float(low[head]), "high": float(high[head])})
        alone = means[1:]
        layers.append(
            {
                "layer": layer,
                "joint": float(means[0]),
                "joint_low": float(low[0]),
                "joint_high": float(high[0]),
                "smallest": float(alone.min()),
                "largest": float(alone.max()),
                "sum_of_sizes": float(np.abs(alone).sum()),
                "signed_sum": float(alone.sum()),
                "interaction": float(means[0] - alone.sum()),
                "within_envelope": bool(alone.min() <= means[0] <= alone.max()),
            }
        )
    tables = {"heads": pd.DataFrame(heads), "layers": pd.DataFrame(layers)}
    results = {name: table.to_dict("records") for name, table in tables.items()} | {"cost": cost}
    conventions = {
        "edit": change.to_json(),
        "change": "nats per token, edited − unedited on the same tokens",
        "interval": "95 %, bootstrap over sequences",
        "interaction": "joint − signed sum of the heads",
    }
    return EditStudy(results, tables, {}, _said(tables["heads"], tables["layers"], cost), conventions)


def _said(heads: Any, layers: Any, cost: dict[str, Any]) -> list[str]:
    first, rest = layers.iloc[0], layers.iloc[1:]
    lines = [
        f"Layer 0 apart: all heads together change the loss by {first['joint']:+.4f} nats, its single heads "
        f"by {first['smallest']:+.4f} to {first['largest']:+.4f} (signed sum {first['signed_sum']:+.4f})."
    ]
    if len(rest):
        below = int((rest["joint"] < rest["sum_of_sizes"]).sum())
        inside = int(rest["within_envelope"].sum())
        lines.append(
            f"In the other {len(rest)} layers the joint change lies within the range of the single heads in "
            f"{inside}, and below the sum of their sizes in {below}; joint {rest['joint'].sum():+.4f} nats "
            f"summed over layers, signed sum of heads {rest['signed_sum'].sum():+.4f}, sum of sizes "
            f"{rest['sum_of_sizes'].sum():.4f}."
        )
    harms = int((heads["low"] > 0).sum())
    helps = int((heads["high"] < 0).sum())
    lines.append(
        f"Of {len(heads)} heads, {harms} raise the loss when edited alone and {helps} lower it; the interval "
        "of the others includes 0."
    )
    if cost["ratio"] is not None:
        lines.append(
            f"Cost: {cost['ratio']:.3f} × the bound (lm head + body·(L+1)/2L), "
            f"{cost['seconds_a_head']:.2f} s of processor time a head."
        )
    return lines
