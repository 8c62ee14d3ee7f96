"""What a parallel scale would have to do to the attention map's diagonal, and what it does after W_O.

    study = diagonal_study(model, tokens, parallel=0.0)

An edit of the part along a reference can be read as a change of A_tt with every other weight held. As
numbers added to A_tt, per token and head, y what attention adds to the stream, z the block's input,
w_h = W_O^h v_h:

    value.full           (s∥−1) ⟨o,v⟩/‖v‖²                                    realises the edit exactly
    value.exclude_self   (s∥−1) ⟨c,v⟩/‖v‖²                                    realises the edit exactly
    residual.attn head       (s∥−1) (yᵀz/‖z‖²) (zᵀw_h)/‖w_h‖²                 least squares, each head alone
    residual.attn joint      least squares over all heads together
    residual.attn operator   (s∥−1) (yᵀz)(zᵀw_h) / (‖v‖²‖z‖²‖W_O^h‖_F²)       least Frobenius norm

v is repeated per query head, W_O's bias is no part of the operator, and a factor between W_O and the stream
(a multiplier, a LayerScale, a post-norm at the size it has on this token) is folded into w_h. A diagonal
after an edit may lie below 0 or above 1: the edited map is no composition, and nothing of Aitchison's
applies.

Every layer is read on the unedited stream.

Source: "Disentangling Representation Evolution in Transformers through Directional Decomposition", Eq. 12,
Appendix B, Tables 5 and 6; the joint form and the unrealised fraction are perpend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from perpend.batching import batches
from perpend.distributed import Store, direct, map_blocks
from perpend.models.attention import AttentionCall, attach, attention_sites, self_weight
from perpend.models.edit import coefficient_along, own_value, value_coefficient
from perpend.models.head import halves
from perpend.models.placement import input_device
from perpend.models.stream import Contribution, blocks, contributions, parts_of
from perpend.progress import Progress, silent
from perpend.studies.edit_sweep import EditStudy

VALUE_FORMS = ("value.full", "value.exclude_self")
RESIDUAL_FORMS = ("residual.attn head", "residual.attn joint", "residual.attn operator")
FORMS = VALUE_FORMS + RESIDUAL_FORMS
AUDITED = (*VALUE_FORMS, "residual.attn")
MEASURES = ("norm_change", "energy_change", "energy_removed", "cosine")
BLOCK = 32  # sequences: the unit that is stored and shared out
EDGE, BINS = 4.0, 1600  # quantiles are interpolated in bins of 0.005 between −4 and 4; ends are exact
ROOM = 1 << 24  # numbers of w_h held at a time


@dataclass
class Spread:
    """Count, sum, ends and histogram of numbers that come in parts."""

    sums: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    ends: Tensor = field(default_factory=lambda: torch.tensor([torch.inf, -torch.inf], dtype=torch.float64))
    outside: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    bins: Tensor = field(default_factory=lambda: torch.zeros(BINS, dtype=torch.float64))

    def add(self, values: Tensor) -> None:
        v = values.detach().flatten().double().cpu()
        self.sums += torch.stack([torch.tensor(float(len(v))), v.sum()])
        self.ends = torch.stack([torch.minimum(self.ends[0], v.min()), torch.maximum(self.ends[1], v.max())])
        self.outside += torch.stack([(v < 0).sum(), (v > 1).sum()])
        place = ((v + EDGE) * (BINS / (2 * EDGE))).floor().clamp(0, BINS - 1).long()
        self.bins += torch.bincount(place, minlength=BINS)

    @classmethod
    def joined(cls, parts: list[Mapping[str, Tensor]]) -> Spread:
        total = cls()
        for part in parts:
            total.sums += part["sums"]
            total.outside += part["outside"]
            total.bins += part["bins"]
            low, high = part["ends"]
            total.ends = torch.stack([torch.minimum(total.ends[0], low), torch.maximum(total.ends[1], high)])
        return total

    def quantile(self, share: float) -> float:
        """Interpolated inside its bin, as far as the bin reaches between the exact ends."""
        wanted, until = float(share * self.sums[0]), self.bins.cumsum(0)
        at = min(int((until < wanted).sum()), BINS - 1)
        held = float(self.bins[at])
        within = (wanted - float(until[at]) + held) / held if held else 0.5
        edge, width = -EDGE + at * 2 * EDGE / BINS, 2 * EDGE / BINS
        low = min(max(edge, float(self.ends[0])), float(self.ends[1]))
        high = max(min(edge + width, float(self.ends[1])), low)
        return low + (high - low) * within

    def record(self) -> dict[str, float]:
        return {
            "mean": float(self.sums[1] / self.sums[0]),
            "q05": self.quantile(0.05),
            "median": self.quantile(0.5),
            "q95": self.quantile(0.95),
            "min": float(self.ends[0]),
            "max": float(self.ends[1]),
        }


@dataclass
class Reading:
    """One layer's call on the unedited stream: what its hooks saw, until its contribution comes."""

    output: Tensor  # o [B, T, H, d_v]
    value: Tensor  # v [B, T, H, d_v], repeated per query head
    mass: Tensor  # A_tt [B, T, H]
    along: dict[str, Tensor]  # α of both value sites [B, T, H]


def value_changes(reading: Reading, parallel: float) -> dict[str, Tensor]:
    """Changes of A_tt [B, T, H] at the two value sites."""
    return {site: (parallel - 1.0) * along for site, along in reading.along.items()}


def residual_changes(
    y: Tensor, z: Tensor, value: Tensor, weight: Tensor, factor: Tensor, parallel: float
) -> tuple[dict[str, Tensor], Tensor]:
    """Changes of A_tt [N, H] by the three residual forms, and the unrealised fraction [N].

    y, z, factor [N, d]; value [N, H, d_v]; weight W_O [d, H, d_v]. The unrealised fraction is the share of
    the edit's squared norm that the best change of all heads' diagonals leaves.
    """
    w = torch.einsum("dhv,nhv->nhd", weight, value) * factor[:, None, :]
    alpha = coefficient_along(y, z)
    target = (parallel - 1.0) * alpha * z
    onto = (w @ target[..., None])[..., 0]  # wᵀ of the edit's move
    size = (w * w).sum(-1)
    alone = torch.where(size > 0, onto / torch.where(size > 0, size, 1.0), 0.0)
    gram, wanted = (w @ w.transpose(-1, -2)).double(), onto.double()
    joint = (torch.linalg.pinv(gram, hermitian=True) @ wanted[..., None])[..., 0]
    energy = target.double().square().sum(-1)
    left = (1.0 - (joint * wanted).sum(-1) / torch.where(energy > 0, energy, 1.0)).clamp(0.0, 1.0)
    left = torch.where(energy > 0, left, 0.0)
    operators = (weight * weight).sum((0, 2)) * factor.square().mean(-1, keepdim=True)
    if bool((factor != factor[:, :1]).any()):  # a factor per channel: the Frobenius norm of diag(f)·W_O^h
        operators = torch.einsum("nd,dh->nh", factor.square(), weight.square().sum(-1))
    below = value.square().sum((-1, -2))[:, None] * operators
    operator = torch.where(below > 0, onto / torch.where(below > 0, below, 1.0), 0.0)
    return {
        "residual.attn head": alone,
        "residual.attn joint": joint.to(alone.dtype),
        "residual.attn operator": operator,
    }, left


def applied(y: Tensor, edited: Tensor) -> Tensor:
    """‖ỹ−y‖/‖y‖, ‖ỹ−y‖²/‖y‖², 1−‖ỹ‖²/‖y‖², cos(y, ỹ), [4, N]; tokens with y = 0 are left out."""
    y, edited = (x.double().flatten(0, -2) for x in (y, edited))
    energy = y.square().sum(-1)
    kept = energy > 0
    y, edited, energy = y[kept], edited[kept], energy[kept]
    change, after = (edited - y).square().sum(-1) / energy, edited.square().sum(-1)
    cosine = (y * edited).sum(-1) / (energy * after).sqrt().clamp(min=torch.finfo(torch.float64).tiny)
    return torch.stack([change.sqrt(), change, 1.0 - after / energy, cosine])


class _Sums:
    """The sums of one block of sequences, by layer and form."""

    def __init__(self) -> None:
        self.spreads: dict[tuple[int, str, str], Spread] = {}
        self.audit: dict[tuple[int, str], Tensor] = {}

    def changed(self, layer: int, form: str, change: Tensor, mass: Tensor) -> None:
        self.spreads.setdefault((layer, form, "change"), Spread()).add(change)
        self.spreads.setdefault((layer, form, "after"), Spread()).add(mass + change)

    def unrealised(self, layer: int, left: Tensor) -> None:
        self.spreads.setdefault((layer, "residual.attn joint", "unrealised"), Spread()).add(left)

    def applied(self, layer: int, site: str, measures: Tensor) -> None:
        count = torch.full((1,), float(measures.shape[1]), dtype=torch.float64)
        row = torch.cat([measures.sum(1).cpu(), count])
        self.audit[layer, site] = self.audit.get((layer, site), torch.zeros_like(row)) + row

    def tensors(self) -> dict[str, Tensor]:
        found = {
            f"{layer}/{form}/{kind}/{name}": getattr(spread, name)
            for (layer, form, kind), spread in self.spreads.items()
            for name in ("sums", "ends", "outside", "bins")
        }
        return found | {f"{layer}/{site}/audit": row for (layer, site), row in self.audit.items()}


@contextmanager
def _watched(model: nn.Module, sums: _Sums, parallel: float, undefined: dict[str, str]) -> Iterator[None]:
    """Read every attention layer of whatever runs inside into `sums`."""
    readings: dict[int, Reading] = {}
    raw: dict[int, tuple[Tensor, Tensor]] = {}
    layer_of: dict[int, int] = {}
    has_parts = "attn" in parts_of(model)
    of_block = {block.index: block for block in blocks(model)} if has_parts else {}

    def hook(call: AttentionCall, output: Tensor) -> None:
        wide = torch.promote_types(output.dtype, torch.float32)
        value, mass = own_value(call), self_weight(call).transpose(1, 2)
        along = {
            "value.full": value_coefficient(output, value, None),
            "value.exclude_self": value_coefficient(output, value, mass),
        }
        layer, value = call.layer, value.to(wide).repeat_interleave(call.groups, dim=2)
        reading = Reading(output.to(wide), value, mass, along)
        for form, change in value_changes(reading, parallel).items():
            sums.changed(layer, form, change, mass)
        if has_parts:
            readings[call.site.block] = reading
            layer_of[call.site.block] = layer

    def seen(index: int) -> Callable[..., None]:
        def keep(module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            raw[index] = (args[0], output)

        return keep

    def visit(c: Contribution) -> None:
        reading = readings.pop(c.layer, None)
        if reading is None or c.layer not in raw:
            return
        read, made = raw.pop(c.layer)
        heads = reading.value.shape[2]
        weight = of_block[c.layer].projection(heads)
        plain = reading.output.flatten(2).to(read.dtype)
        if weight is None or read.shape[-1] != plain.shape[-1] or not torch.equal(read.view_as(plain), plain):
            undefined[f"layer {layer_of[c.layer]}"] = (
                "W_O does not read the aggregate itself (a gate, or heads of another width): residual forms "
                "and the output audit are undefined there"
            )
            return
        _layer(sums, layer_of[c.layer], reading, c, weight, made, parallel)

    with ExitStack() as stack:
        stack.enter_context(attach(model, hook, need_lse=True))
        if has_parts:
            stack.enter_context(contributions(model, visit, parts=("attn",)))
            for block in of_block.values():
                if block.out_proj is not None:
                    handle = block.out_proj.register_forward_hook(seen(block.index))
                    stack.callback(handle.remove)
        else:
            undefined["residual.attn"] = "the family has no adapter: what attention adds is unknown"
        yield


def _layer(
    sums: _Sums,
    layer: int,
    reading: Reading,
    c: Contribution,
    weight: Tensor,
    made: Tensor,
    parallel: float,
) -> None:
    """The residual forms and the output audit of one layer's call."""
    wide = reading.output.dtype
    y, z, made = (x.to(wide).reshape(-1, x.shape[-1]) for x in (c.update, c.reference, made))
    # what lies between W_O and the stream, per token and channel: 1 in most models
    factor = torch.where(made == 0, 1.0, y / torch.where(made == 0, 1.0, made))
    weight, value = weight.to(wide), reading.value.flatten(0, 1)
    step = max(1, ROOM // (value.shape[1] * y.shape[1]))
    mass = reading.mass.flatten(0, 1)
    for a in range(0, len(y), step):
        cut = slice(a, a + step)
        forms, left = residual_changes(y[cut], z[cut], value[cut], weight, factor[cut], parallel)
        for form, change in forms.items():
            sums.changed(layer, form, change, mass[cut])
        sums.unrealised(layer, left)
    for site, along in reading.along.items():
        moved = ((parallel - 1.0) * along.flatten(0, 1)[..., None] * value).flatten(1)
        sums.applied(layer, site, applied(y, y + factor * (moved @ weight.flatten(1).T)))
    sums.applied(layer, "residual.attn", applied(y, y + (parallel - 1.0) * coefficient_along(y, z) * z))


def diagonal_study(
    model: nn.Module,
    tokens: Tensor,
    *,
    parallel: float = 0.0,
    batch: int = 4,
    store: Store = direct,
    progress: Progress = silent,
) -> EditStudy:
    """Diagonal forms and applied-output audit of the scale `parallel` over tokens [n, T].

    Tables: `diagonal` (layer and form, distribution of the change and of A_tt after it), `unrealised`
    (layer), `audit` (layer and site). The row with layer None is all layers together.
    """
    import pandas as pd

    device, undefined = input_device(model), {}
    trunk = halves(model).trunk if hasattr(model, "config") else model
    starts = range(0, len(tokens), BLOCK)
    with torch.no_grad(), progress(total=tokens.numel(), unit="tokens", description="diagonals") as done:

        def block(index: int) -> dict[str, Tensor]:
            sums = _Sums()
            with _watched(model, sums, parallel, undefined):
                for rows in batches(tokens[starts[index] : starts[index] + BLOCK], batch):
                    trunk(rows.to(device))
                    done(rows.numel())
            return sums.tensors()

        parts = [
            {key: torch.as_tensor(value) for key, value in part.items()}
            for part in map_blocks(len(starts), block, store=store, name="diagonal")
        ]
    layers = [site.index for site in attention_sites(model)]
    tables = _tables(parts, layers)
    conventions = {
        "scale": parallel,
        "change": "added to A_tt with every other weight held; per token and query head",
        "unrealised": "share of the residual edit's squared norm that no change of the diagonals realises",
        "audit": "after W_O, in units of what attention adds to the stream; means over tokens of ratios",
        "stream": "every layer on the unedited stream",
        "quantiles": f"interpolated in bins of {2 * EDGE / BINS:g} between −{EDGE:g} and {EDGE:g}, to within "
        "one bin; ends are exact",
        "undefined": undefined,
    }
    results = {
        name: [{**row, "layer": None if row["layer"] is pd.NA else row["layer"]} for row in rows]
        for name, rows in ((name, table.to_dict("records")) for name, table in tables.items())
    }
    return EditStudy(results, tables, {}, _said(tables, parallel), conventions)


def _tables(parts: list[dict[str, Tensor]], layers: list[int]) -> dict[str, Any]:
    import pandas as pd

    def spread(chosen: list[int], form: str, kind: str) -> Spread | None:
        found = [
            {name: part[f"{layer}/{form}/{kind}/{name}"] for name in ("sums", "ends", "outside", "bins")}
            for part in parts
            for layer in chosen
            if f"{layer}/{form}/{kind}/sums" in part
        ]
        return Spread.joined(found) if found else None

    diagonal, unrealised, audit = [], [], []
    for layer, chosen in [(None, layers), *((layer, [layer]) for layer in layers)]:
        for form in FORMS:
            change, after = spread(chosen, form, "change"), spread(chosen, form, "after")
            if change is None or after is None:
                continue
            below, above = (after.outside / after.sums[0]).tolist()
            named = {f"after_{key}": value for key, value in after.record().items()}
            record = {"layer": layer, "form": form, **change.record(), **named}
            diagonal.append({**record, "after_below_0": below, "after_above_1": above})
        left = spread(chosen, "residual.attn joint", "unrealised")
        if left is not None:
            unrealised.append({"layer": layer, **left.record()})
        for site in AUDITED:
            rows = [part[key] for part in parts for n in chosen if (key := f"{n}/{site}/audit") in part]
            if rows:
                *sums, count = torch.stack(rows).sum(0).tolist()
                means = (value / count for value in sums)
                record = {"layer": layer, "site": site, **dict(zip(MEASURES, means))}
                audit.append({**record, "tokens": int(count)})
    tables = {"diagonal": diagonal, "unrealised": unrealised, "audit": audit}
    return {name: pd.DataFrame(rows).astype({"layer": "Int64"}) for name, rows in tables.items() if rows}


def _said(tables: Mapping[str, Any], parallel: float) -> list[str]:
    whole = {name: table[table["layer"].isna()] for name, table in tables.items()}
    lines = []
    for row in whole["diagonal"].to_dict("records"):
        lines.append(
            f"s∥ = {parallel:g} at {row['form']} as a change of A_tt: {row['min']:+.3g} to "
            f"{row['max']:+.3g}, median {row['median']:+.2g}; after it {row['after_below_0']:.1%} of the "
            f"diagonals lie below 0 and {row['after_above_1']:.1%} above 1."
        )
    if "unrealised" in whole:
        share = whole["unrealised"]["mean"].iloc[0]
        lines.append(f"No change of the diagonals realises {share:.1%} of the residual edit (squared norm).")
    for row in whole["audit"].to_dict("records") if "audit" in whole else []:
        lines.append(
            f"After W_O, {row['site']} moves the output by {row['norm_change']:.1%} of its norm and takes "
            f"{row['energy_removed']:.1%} of its energy (cosine {row['cosine']:.3f})."
        )
    return lines
