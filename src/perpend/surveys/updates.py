"""What each layer adds to the stream, split along and across it: streamed sums over a model and sequences.

For every token, layer and part (attn, mlp, block), update Δ and reference z of models/stream.py:

    α = <Δ, z>/‖z‖²,  ‖Δ∥‖ = |α|·‖z‖,  Δ⊥ = Δ − αz,  ρ = ‖Δ⊥‖/‖z + Δ∥‖
    cos(z, z+Δ) = sign(1+α)/√(1+ρ²)       exact; its second-order form is 1 − ρ²/2

The ratio reported first is the mean over tokens of ‖Δ∥‖/‖Δ⊥‖ (the directional-decomposition paper, §3),
beside it the median and quantiles, and what a random direction of R^d gives.

Tokens. One where z = 0, Δ⊥ = 0 or 1 + α = 0 (to RELATIVE_ZERO) is counted and enters no mean. Padding is left
out and counted. Four sets of tokens: all, without position 0 (the first real token of each sequence), without
the 1 % of largest norm, without both. The 1 %: within each block of 32 sequences, at each layer and part on
its own, the ceil(n/100) of the block's n real tokens whose reference has the largest norm.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from perpend.batching import starts
from perpend.distributed import Store, direct, map_blocks
from perpend.errors import InputError, unknown_name
from perpend.models.inputs import run_trunk
from perpend.models.layout import PARTS, blocks, how_to_add, parts_of
from perpend.models.limits import check_ids
from perpend.models.stream import contributions
from perpend.progress import Progress, silent
from perpend.surveys import histogram
from perpend.surveys._update_sums import (
    BINNED,
    BLOCK,
    COUNTS,
    RELATIVE_ZERO,
    SETS,
    STATISTICS,
    TOP,
    Collector,
)

if TYPE_CHECKING:
    import pandas as pd

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
UPPER_QUARTILE = 0.6744897501960817  # of the normal distribution


@dataclass(frozen=True)
class UpdateSurvey:
    """Sums over tokens, [classes, layers, parts, ...], and what is read off them.

    `sums` float64 [4, L, P, STATISTICS], `counts` int64 [4, L, P, COUNTS], `bins` int64
    [4, BINNED, L, P, histogram.BINS]; `by_block` are the sums before adding, [blocks, 4, L, P, STATISTICS],
    and `filled` the places and contents of each block's filled bins.
    """

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    width: int
    by_block: np.ndarray
    counts: np.ndarray
    filled: tuple[tuple[np.ndarray, np.ndarray], ...]
    padding: int
    notes: tuple[str, ...] = ()

    @cached_property
    def sums(self) -> np.ndarray:
        return self.by_block.sum(0)

    @cached_property
    def bins(self) -> np.ndarray:
        bins = np.zeros((4, len(BINNED), *self.counts.shape[1:3], histogram.BINS), dtype=np.int64)
        for place, content in self.filled:
            bins.reshape(-1)[place] += content
        return bins

    def count(self, which: str, tokens: str = "all") -> np.ndarray:
        """How many tokens [L, P]; `which` of COUNTS, `tokens` of SETS."""
        return self.counts[..., COUNTS.index(which)][list(SETS[tokens])].sum(0)

    def mean(self, statistic: str, tokens: str = "all") -> np.ndarray:
        """The mean over the tokens used, [L, P]; NaN where there is none. `statistic` of STATISTICS."""
        total = self.sums[..., STATISTICS.index(statistic)][list(SETS[tokens])].sum(0)
        used = self.count("used", tokens)
        return total / np.where(used > 0, used, np.nan)

    def quantile(self, statistic: str, q: float, tokens: str = "all") -> np.ndarray:
        """A quantile over the tokens used, [L, P], to one part in `histogram.RESOLUTION`.

        `statistic` is `alpha`, `ratio`, `share`, `rho`, `cosine`, `gap`, or one of the three norms.
        """
        if statistic == "share":
            ratio = self.quantile("ratio", q, tokens)
            return ratio / np.hypot(1.0, ratio)
        if statistic == "rho":
            counts = self._histograms(("cotangent", "cotangent_negative"), tokens).sum(0)
            return 1.0 / histogram.quantile(counts, 1 - q)
        if statistic == "cosine":
            counts, negative = self._histograms(("cotangent", "cotangent_negative"), tokens)
            cotangent = histogram.quantile(counts, q, negative)
            return cotangent / np.hypot(1.0, cotangent)
        if statistic == "gap":  # grows with ρ; of a token that is not turned
            rho = self.quantile("rho", q, tokens)
            return 1 / np.hypot(1.0, rho) - (1 - rho**2 / 2)
        if statistic == "alpha":
            counts, negative = self._histograms(("alpha", "alpha_negative"), tokens)
            return histogram.quantile(counts, q, negative)
        (counts,) = self._histograms((statistic,), tokens)
        return histogram.quantile(counts, q)

    def _histograms(self, names: Sequence[str], tokens: str) -> np.ndarray:
        """[len(names), L, P, BINS] over a set of tokens."""
        for name in names:
            if name not in BINNED:
                raise unknown_name(
                    "statistic with quantiles", name, {*BINNED, "share", "rho", "cosine", "gap"}
                )
        return self.bins[np.ix_(SETS[tokens], [BINNED.index(name) for name in names])].sum(0)

    @property
    def null(self) -> dict[str, float]:
        """What a direction drawn at random in R^d has (`random_direction`)."""
        return random_direction(self.width)

    def table(self, tokens: Sequence[str] = tuple(SETS)) -> pd.DataFrame:
        """One row a layer, part and set of tokens."""
        import pandas as pd

        null = self.null
        rows = []
        for name in tokens:
            means = {s: self.mean(s, name) for s in STATISTICS}
            quantiles = {
                (s, q): self.quantile(s, q, name)
                for s in ("ratio", "alpha", "share", "rho", "cosine", "gap", "relative_norm")
                for q in QUANTILES
            }
            counts = {c: self.count(c, name) for c in COUNTS}
            for i, layer in enumerate(self.layers):
                for j, part in enumerate(self.parts):
                    row: dict[str, Any] = {"layer": layer, "part": part, "set": name}
                    row |= {s: means[s][i, j] for s in STATISTICS[:-2]}
                    row["gap"] = row["cosine"] - row["second_order"]
                    for s in ("alpha", "ratio"):
                        variance = means[f"{s}_square"][i, j] - means[s][i, j] ** 2
                        row[f"{s}_sd"] = math.sqrt(max(variance, 0.0)) if variance == variance else variance
                    row |= {f"{s}_q{round(100 * q):02d}": v[i, j] for (s, q), v in quantiles.items()}
                    row |= {f"null_{key}": value for key, value in null.items()}
                    row |= {key: int(value[i, j]) for key, value in counts.items()}
                    rows.append(row)
        return pd.DataFrame(rows)

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        return {"updates": self.table()}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """Sums, counts and histograms as they are, with the grid's edges."""
        return {
            "sums": self.sums,
            "counts": self.counts,
            "histograms": self.bins,
            "histogram_edges": histogram.edges(),
        }

    @property
    def results(self) -> dict[str, Any]:
        """Per layer and part over all tokens, and per part over layers for each set of tokens."""
        frame = self.table(["all"])
        keep = (
            "alpha",
            "ratio",
            "ratio_q50",
            "share",
            "energy",
            "update_norm",
            "reference_norm",
            "relative_norm",
            "cosine",
            "second_order",
            "gap",
            "gap_q50",
        )
        per_layer = [
            {
                "layer": layer,
                **{
                    row["part"]: {key.replace("_q50", "_median"): _number(row[key]) for key in keep}
                    for row in group.to_dict("records")
                },
            }
            for layer, group in frame.groupby("layer")
        ]
        over = {
            part: {
                name: {
                    "ratio": _number(_finite_mean(self.mean("ratio", name)[:, j])),
                    "ratio_median": _number(_finite_mean(self.quantile("ratio", 0.5, name)[:, j])),
                    "alpha": _number(_finite_mean(self.mean("alpha", name)[:, j])),
                    "energy": _number(_finite_mean(self.mean("energy", name)[:, j])),
                }
                for name in SETS
            }
            for j, part in enumerate(self.parts)
        }
        left_out = {
            name: int(self.count(name).sum())
            for name in ("zero_reference", "no_perpendicular", "reversal", "not_finite")
        }
        return {
            "width": self.width,
            "null": self.null,
            "per_layer": per_layer,
            "over_layers": over,
            "left_out": {**left_out, "padding": self.padding},
        }

    @property
    def undefined(self) -> list[str]:
        """Layers and parts without one token to average."""
        used = self.count("used")
        return [
            f"layer {layer} {part}: no token has a non-zero reference and a non-zero perpendicular part"
            for i, layer in enumerate(self.layers)
            for j, part in enumerate(self.parts)
            if used[i, j] == 0
        ]

    def _repr_html_(self) -> str:
        columns = ["layer", "part", "alpha", "ratio", "ratio_q50", "null_ratio", "energy", "cosine", "gap"]
        return self.table(["all"])[columns].to_html(index=False, float_format="%.4g")


CONVENTIONS = {
    "ratio": "mean over tokens of |parallel| / |perpendicular|",
    "reference": "attn and block: block input; mlp: the stream just before its addition",
    "top": f"the ceil(n/{TOP}) of a block's n real tokens of largest reference norm, by layer and part; a "
    f"block is {BLOCK} sequences",
    "left_out": "tokens with z = 0, a perpendicular part of zero or 1 + alpha = 0 (to "
    f"{RELATIVE_ZERO:.2g} of the vector) are counted, never averaged in",
    "quantiles": f"from histograms with bins of {100 * histogram.RESOLUTION:.1f} % width, interpolated",
    "null_ratio": "1/sqrt(d-1); null_ratio_mean is the exact mean of the ratio for a random direction",
}


def random_direction(width: int) -> dict[str, float]:
    """Ratio, energy and share of a uniformly random direction against a fixed one in R^width.

    `ratio` 1/√(d−1) and `energy` 1/d are the usual scales; a mean of per-token ratios converges to
    `ratio_mean` = Γ((d−2)/2) / (√π Γ((d−1)/2)) ≈ 0.8/√d, and of shares to Γ(d/2) / (√π Γ((d+1)/2)). The ratio
    is |t|/√(d−1), t of Student's distribution with d − 1 degrees of freedom: `ratio_median` is its median,
    from the Cornish-Fisher expansion (below 1e-5 of itself from d = 12 on).
    """
    if width < 3:
        raise InputError(f"a random direction has a mean ratio from three dimensions on, not {width}")

    def quotient(a: float, b: float) -> float:
        return math.exp(math.lgamma(a) - math.lgamma(b)) / math.sqrt(math.pi)

    z, v = UPPER_QUARTILE, width - 1
    student = z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2)
    student += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return {
        "ratio": 1 / math.sqrt(width - 1),
        "ratio_mean": quotient((width - 2) / 2, (width - 1) / 2),
        "ratio_median": student / math.sqrt(v),
        "energy": 1 / width,
        "share": quotient(width / 2, (width + 1) / 2),
    }


def survey_updates(
    model: nn.Module,
    tokens: Tensor,
    *,
    mask: Tensor | None = None,
    batch: int = 8,
    parts: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    store: Store = direct,
    progress: Progress = silent,
) -> UpdateSurvey:
    """Split every update along and across its reference, over all tokens.

    tokens   [n, T] token ids, or [n, 3, height, width] images
    mask     [n, T], True where a token is real; None: all are. Padding may stand on either side
    parts    of "attn", "mlp", "block"; None: all that the family has
    layers   block indices; None: all
    store    keeps the sums of each block of 32 sequences (`run.step` of a run folder resumes from them)

    Memory does not grow with n. Raises InputError for shapes that do not fit, and whatever `contributions`
    raises.
    """
    check_ids(model, tokens)
    tokens, mask = _checked(tokens, mask)
    total = len(tokens)
    count = -(-total // BLOCK)
    collector = Collector()
    with progress(total=total, unit="sequences", description="updates") as advance, torch.inference_mode():

        def compute(index: int) -> dict[str, Any]:
            rows = slice(index * BLOCK, min((index + 1) * BLOCK, total))
            collector.clear()
            for start in starts(rows.stop, batch, first=rows.start):
                part = slice(start, min(start + batch, rows.stop))
                given = None if mask is None else mask[part]
                run_trunk(model, tokens[part], given)
                advance(part.stop - part.start)
            return collector.reduce(None if mask is None else mask[rows], rows.stop - rows.start)

        with contributions(model, collector, parts=parts, layers=layers) as watched:
            if not watched:
                raise InputError("no layer is chosen; leave layers out for all")
            results = map_blocks(count, compute, store=store, name="updates")
    notes: tuple[str, ...] = ()
    if watched[0].family is None:
        notes = (f"Block updates only, over {len(blocks(model))} blocks: {how_to_add(model)}",)
    if parts is None:
        parts = parts_of(model)
    chosen = tuple(part for part in PARTS if part in ((parts,) if isinstance(parts, str) else parts))
    return _merge(results, tuple(block.index for block in watched), chosen, notes)


def _merge(
    results: Sequence[dict[str, Any]], layers: tuple[int, ...], parts: tuple[str, ...], notes: tuple[str, ...]
) -> UpdateSurvey:
    return UpdateSurvey(
        layers=layers,
        parts=parts,
        width=int(results[0]["width"]),
        by_block=np.stack([result["sums"] for result in results]),
        counts=sum(np.asarray(result["counts"]) for result in results),
        filled=tuple((np.asarray(result["bins_at"]), np.asarray(result["bins"])) for result in results),
        padding=sum(int(result["padding"]) for result in results),
        notes=notes,
    )


def _checked(tokens: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
    images = torch.is_floating_point(tokens)
    if tokens.ndim != (4 if images else 2) or tokens.numel() == 0:
        raise InputError(
            f"tokens have shape {tuple(tokens.shape)}; give token ids [n, T] or images [n, 3, height, width]"
        )
    if mask is not None:
        if images or mask.shape != tokens.shape:
            raise InputError(f"mask has shape {tuple(mask.shape)} and tokens {tuple(tokens.shape)}")
        mask = mask.bool()
        if not mask.any():
            raise InputError("the mask leaves no token")
    return tokens, mask


def _number(value: float) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)


def _finite_mean(values: np.ndarray) -> float:
    kept = values[np.isfinite(values)]
    return float(kept.mean()) if len(kept) else math.nan
