"""The directional error of a model against its base, streamed layer by layer.

    error = measure(base, other, tokens)          # two models of one architecture
    error.table                                   # one row per mode, direction, layer, part

Two modes. `local`: each layer of the other model reads the *base* stream; attn and block on the base block
input, mlp on the base mid-stream. `propagated`: each model runs on its own stream. Both models advance
together, so one layer's updates of one batch are all that is ever held. Means are over all tokens, sums in
float64; quantiles are exact up to `QUANTILE_TOKENS` tokens and taken from evenly spaced tokens beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from perpend.batching import batches
from perpend.compression.directional import ALONG, Split, isotropic_correlation, split_error
from perpend.compression.replay import capture
from perpend.compression.statistics import check_double
from perpend.errors import InputError, unknown_name
from perpend.models.limits import check_ids
from perpend.models.placement import input_device
from perpend.models.stream import blocks, chosen_layers, contributions, parts_of
from perpend.progress import Progress, silent
from perpend.report.notebook import Rich

if TYPE_CHECKING:
    import pandas as pd

MODES = ("local", "propagated")
METRICS = ("perpendicular", "parallel", "total", "kappa", "rotation")
QUANTILES = {"median": 0.5, "q05": 0.05, "q25": 0.25, "q75": 0.75, "q95": 0.95}
QUANTILE_TOKENS = 1 << 16


@dataclass
class _Tally:
    """Sums over the tokens of one mode, direction, layer and part."""

    stride: int
    width: int = 0
    tokens: int = 0
    undefined: int = 0
    sums: Tensor = field(default_factory=lambda: torch.zeros(len(METRICS), dtype=torch.float64))
    counts: Tensor = field(default_factory=lambda: torch.zeros(len(METRICS), dtype=torch.int64))
    share: float = 0.0
    shared: int = 0
    energy: Tensor = field(default_factory=lambda: torch.zeros(2, dtype=torch.float64))
    moments: Tensor = field(default_factory=lambda: torch.zeros(5, dtype=torch.float64))
    kept: list[Tensor] = field(default_factory=list)
    seen: int = 0

    def add(self, split: Split, width: int) -> None:
        self.width = width
        ok = split.defined & torch.isfinite(split.total)
        self.undefined += int((~ok).sum())
        values = torch.stack([getattr(split, name) for name in METRICS])[:, ok].cpu()
        self.tokens += values.shape[1]
        # where nothing is left of an update its size is -1 along itself, and only its rotation is undefined
        self.counts += torch.isfinite(values).sum(1)
        self.sums += values.nan_to_num(0.0).sum(1)
        share = split.share[ok & torch.isfinite(split.share)]
        self.share += float(share.sum())
        self.shared += len(share)
        perp, total = values[0], values[2]
        self.energy += torch.stack([perp.square().sum(), total.square().sum()])
        self.moments += torch.stack(
            [perp.sum(), total.sum(), perp.square().sum(), total.square().sum(), (perp * total).sum()]
        )
        first = -self.seen % self.stride
        self.seen += values.shape[1]
        self.kept.append(values[:, first :: self.stride].float())

    def row(self) -> dict[str, Any]:
        n = self.tokens
        if n == 0:
            return {"tokens": 0, "undefined": self.undefined}
        out: dict[str, Any] = {"tokens": n, "undefined": self.undefined}
        sample = torch.cat(self.kept, 1).double()
        levels = torch.tensor(list(QUANTILES.values()), dtype=torch.float64)
        for i, name in enumerate(METRICS):
            out[name] = float(self.sums[i] / self.counts[i])
            for key, value in zip(QUANTILES, torch.nanquantile(sample[i], levels)):
                out[f"{name}_{key}"] = float(value)
        share = self.share / self.shared if self.shared else math.nan
        out["energy_share"] = share
        out["perpendicular_squared"], out["total_squared"] = (float(e) / n for e in self.energy)
        out["energy_share_pooled"] = (
            float(self.energy[0] / self.energy[1]) if self.energy[1] > 0 else math.nan
        )
        out["isotropy"] = self.width * (1 - share)
        sp, st, spp, stt, spt = (float(v) / n for v in self.moments)
        var_p, var_t = _spread(spp, sp), _spread(stt, st)
        out["r_perpendicular_total"] = (
            (spt - sp * st) / math.sqrt(var_p * var_t) if min(var_p, var_t) > 0 else math.nan
        )
        out["r_isotropic"] = isotropic_correlation(self.width, st, var_t)
        out["width"] = self.width
        return out


@dataclass(frozen=True, repr=False)
class DirectionalError(Rich):
    """The error of `other` against `base`. table: columns mode, along, layer, part and, per metric, its mean
    (the metric's own name), median and quantiles (name_median, name_q05 ...), all relative to ‖Delta_base‖:

    perpendicular ε⊥, parallel ‖e∥‖, total ‖e‖, kappa (signed), rotation (cosine); energy_share, the mean
    over tokens of ‖e⊥‖²/‖e‖²; isotropy = width · (1 − energy_share), 1 for an isotropic error;
    r_perpendicular_total over tokens and r_isotropic, what an isotropic error would give.
    """

    table: pd.DataFrame
    tokens: int
    quantiles_from: int

    def layer_means(self, mode: str = "local", along: str = "update", part: str = "block") -> pd.DataFrame:
        """The rows of one mode, direction and part, in the order of layers."""
        t = self.table
        return t[(t["mode"] == mode) & (t["along"] == along) & (t["part"] == part)].sort_values("layer")

    @property
    def summary(self) -> list[dict[str, Any]]:
        """Per mode, direction and part: means over layers, and r(‖e⊥‖, ‖e‖) over layers."""
        out = []
        for (mode, along, part), rows in self.table.groupby(["mode", "along", "part"], sort=False):
            means = {name: _finite(rows[name].mean()) for name in (*METRICS, "energy_share", "isotropy")}
            out.append(
                {
                    "mode": mode,
                    "along": along,
                    "part": part,
                    **means,
                    "rotation_degrees": None if means["rotation"] is None else _degrees(means["rotation"]),
                    "r_over_tokens": _finite(rows["r_perpendicular_total"].mean()),
                    "r_isotropic": _finite(rows["r_isotropic"].mean()),
                    "r_over_layers": _finite(rows["perpendicular"].corr(rows["total"]))
                    if len(rows) > 2
                    else None,
                    "undefined_tokens": int(rows["undefined"].sum()),
                }
            )
        return out

    @property
    def results(self) -> dict[str, Any]:
        """For run.json: the summary and what it rests on."""
        return {"summary": self.summary, "tokens": self.tokens, "quantiles_from": self.quantiles_from}

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"layers": self.table}


def _spread(second: float, mean: float) -> float:
    """The variance from two moments; 0 where it is no more than their rounding."""
    variance = second - mean**2
    return variance if variance > 1e-12 * second else 0.0


def _degrees(cosine: float) -> float:
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


class _Watcher:
    """What one model's blocks contributed in the last run; `force` replaces an attention update."""

    def __init__(self) -> None:
        self.seen: dict[str, tuple[Tensor, Tensor]] = {}
        self.force: Tensor | None = None

    def __call__(self, seen: Any) -> Tensor | None:
        self.seen[seen.part] = (seen.update, seen.reference)
        if seen.part == "attn" and self.force is not None:
            return self.force.to(seen.update.device, seen.update.dtype)
        return None


@torch.no_grad()
def measure(
    base: nn.Module,
    other: nn.Module,
    tokens: Tensor,
    *,
    modes: Sequence[str] = MODES,
    along: Sequence[str] = ("update",),
    layers: Sequence[int] | None = None,
    batch: int = 4,
    progress: Progress = silent,
) -> DirectionalError:
    """Directional error of `other` against `base` on tokens [n, T]; see the module for the modes.

    along: directions the error is split along, of "update", "input" (the part's reference) and "output"
    (reference + update). layers: which to report; all are run. Models of different architecture: InputError.
    """
    import pandas as pd

    for kind, given, known in (("mode", modes, MODES), ("direction", along, ALONG)):
        for name in given:
            if name not in known:
                raise unknown_name(kind, name, known)
    check_double(base)
    check_ids(base, tokens)
    check_comparable(base, other)
    parts = parts_of(base)
    count = len(blocks(base))
    shown = chosen_layers(layers, count)
    stride = max(1, math.ceil(tokens.numel() / QUANTILE_TOKENS))
    tallies = {
        (mode, way, layer, part): _Tally(stride)
        for mode in modes
        for way in along
        for layer in shown
        for part in parts
    }

    def add(mode: str, layer: int, part: str, mine: tuple[Tensor, Tensor], theirs: Tensor) -> None:
        update, reference = mine
        wide = torch.promote_types(update.dtype, torch.float32)
        update, reference = update.to(wide), reference.to(wide)
        error = theirs.to(update.device, wide) - update
        directions = {"update": None, "input": reference, "output": reference + update}
        for way in along:
            split = split_error(error, update, directions[way])
            tallies[mode, way, layer, part].add(split, update.shape[-1])

    near, far = _Watcher(), _Watcher()
    place, dtype = input_device(other), other.get_input_embeddings().weight.dtype
    with (
        contributions(base, near, parts),
        contributions(other, far, parts),
        progress(len(tokens) * count, "sequence-layers", "directional error") as advance,
    ):
        for some in batches(tokens, batch):
            ours, theirs = capture(base, some), capture(other, some)
            x, own = ours.hidden, theirs.hidden
            for layer in range(count):
                following = ours.run(layer, x)
                mine = dict(near.seen)
                if "local" in modes and layer in shown:
                    here = x.to(place, dtype)
                    theirs.run(layer, here)
                    for part in parts:
                        if part != "mlp":
                            add("local", layer, part, mine[part], far.seen[part][0])
                    if "mlp" in parts:
                        far.force = mine["attn"][0]
                        theirs.run(layer, here)
                        far.force = None
                        add("local", layer, "mlp", mine["mlp"], far.seen["mlp"][0])
                if "propagated" in modes:
                    own = theirs.run(layer, own)
                    for part in parts if layer in shown else ():
                        add("propagated", layer, part, mine[part], far.seen[part][0])
                x = following
                advance(len(some))
    rows = [
        {"mode": mode, "along": way, "layer": layer, "part": part, **tally.row()}
        for (mode, way, layer, part), tally in tallies.items()
    ]
    return DirectionalError(pd.DataFrame(rows), tokens.numel(), math.ceil(tokens.numel() / stride))


def check_comparable(base: nn.Module, other: nn.Module) -> None:
    """InputError saying in what two models differ, if their layers cannot be compared one by one."""
    ours, theirs = _shape(base), _shape(other)
    differing = [
        f"{name}: {ours[name]} against {theirs[name]}" for name in ours if ours[name] != theirs[name]
    ] or _other_shapes(base, other)
    if differing:
        raise InputError(
            "the two models cannot be compared layer by layer; they differ in "
            + "; ".join(differing)
            + ". Both must be checkpoints of one architecture"
        )


def _other_shapes(base: nn.Module, other: nn.Module, most: int = 3) -> list[str]:
    """The first weights of a block that have another shape (an MLP of another width, fewer heads)."""
    for ours, theirs in zip(blocks(base), blocks(other)):
        mine, weights = dict(ours.module.named_parameters()), dict(theirs.module.named_parameters())
        found = [
            f"{name} of layer {ours.index}: {_sizes(mine[name])} against {_sizes(weights[name])}"
            for name in mine
            if name in weights
            # a packed weight of a quantized model holds several values in one integer
            and mine[name].is_floating_point()
            and weights[name].is_floating_point()
            and mine[name].shape != weights[name].shape
        ]
        if found:
            return found[:most]
    return []


def _sizes(weight: Tensor) -> str:
    return " × ".join(map(str, weight.shape))


def _shape(model: nn.Module) -> dict[str, Any]:
    config = model.config
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    return {
        "architecture": config.model_type,
        "layers": len(blocks(model)),
        "hidden size": getattr(text, "hidden_size", None),
        "vocabulary": getattr(text, "vocab_size", None),
    }
