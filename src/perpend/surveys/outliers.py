"""High-norm outlier tokens of an image model as the sink: where they are, and what rows give them.

    found = find_outliers(model, pixels, roles)              # norms of the last block's output, per image
    survey = survey_outliers(model, pixels, found.positions)
    survey.per_layer()                                       # sink mass, H, H_b, H(π), C_A⊥

In large vision transformers a few patch tokens of little content take norms far above the others' and are
used as registers. Their positions differ from image to image, so that rows have no fixed support: there are
statistics of rows, and no signatures.

Source: Darcet, Oquab, Mairal, Bojanowski, "Vision Transformers Need Registers" (2024), Section 2, whose
cut-off (150, for one model) is here a multiple of the median norm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from perpend.batching import starts
from perpend.distributed import Store, direct, map_blocks
from perpend.errors import InputError
from perpend.models.attention import AttentionCall, attach, attention_sites, row_logits, visible
from perpend.models.inputs import run_trunk
from perpend.models.layout import blocks
from perpend.models.roles import Roles
from perpend.progress import Progress, silent
from perpend.surveys.rows import STATISTICS, Columns, Sums, Work, chunk_rows, row_sums

if TYPE_CHECKING:
    import pandas as pd

FACTOR = 3.0
BLOCK = 32


@dataclass(frozen=True)
class Outliers:
    """`positions` of the outlier patches of each image; norms of block outputs over patches, by block.

    `median`, `top` (the largest) and `share` (of patches above `factor` × median) have one entry a block.
    """

    positions: tuple[tuple[int, ...], ...]
    factor: float
    median: np.ndarray
    top: np.ndarray
    share: np.ndarray

    @property
    def count(self) -> int:
        """Outlier tokens over all images."""
        return sum(map(len, self.positions))

    def table(self) -> pd.DataFrame:
        """One row a block: median and largest norm of patch tokens, share above the cut-off."""
        import pandas as pd

        return pd.DataFrame(
            {
                "block": np.arange(len(self.median)),
                "median_norm": self.median,
                "largest_norm": self.top,
                "largest_over_median": self.top / self.median,
                "share_above": self.share,
            }
        )


def find_outliers(
    model: nn.Module,
    pixels: Tensor,
    roles: Roles,
    *,
    factor: float = FACTOR,
    batch: int = 8,
    progress: Progress = silent,
) -> Outliers:
    """Patch tokens whose norm after the last block exceeds `factor` times the median of all patches.

    pixels [n, C, H, W]. Class token and registers are no candidates. Raises InputError for factor ≤ 1.
    """
    if factor <= 1:
        raise InputError(f"an outlier is above the median by a factor, which must be over 1, not {factor}")
    patches = list(roles.patches)
    modules = [block.module for block in blocks(model)]
    norms: list[list[Tensor]] = [[] for _ in modules]

    def keep(index: int):
        def hook(module: nn.Module, args: object, output: object) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            norms[index].append(torch.linalg.vector_norm(hidden.float(), dim=-1)[:, patches].cpu())

        return hook

    handles = [module.register_forward_hook(keep(index)) for index, module in enumerate(modules)]
    try:
        with torch.no_grad(), progress(total=len(pixels), unit="images", description="norms") as advance:
            for start in starts(len(pixels), batch):
                run_trunk(model, pixels[start : start + batch])
                advance(len(pixels[start : start + batch]))
    finally:
        for handle in handles:
            handle.remove()
    values = torch.stack([torch.cat(parts) for parts in norms]).double().numpy()  # [blocks, n, patches]
    median = np.median(values.reshape(len(values), -1), axis=1)
    above = values > factor * median[:, None, None]
    numbers = np.asarray(patches)
    return Outliers(
        positions=tuple(tuple(int(p) for p in numbers[row]) for row in above[-1]),
        factor=factor,
        median=median,
        top=values.reshape(len(values), -1).max(1),
        share=above.reshape(len(values), -1).mean(1),
    )


@dataclass(frozen=True)
class OutlierSurvey:
    """Sums over rows, [blocks, layers, heads, STATISTICS], and rows [blocks, layers].

    `left_out`: images without an outlier, which have no sink, and in which every quantity of it is undefined.
    """

    sums: np.ndarray
    rows: np.ndarray
    layers: tuple[int, ...]
    images: int
    left_out: int

    @cached_property
    def statistics(self) -> dict[str, np.ndarray]:
        """Means over rows of STATISTICS and `total`, (layers, heads); NaN without a row."""
        return _means(self.sums.sum(0), self.rows.sum(0))

    def resampled(self, count: int = 200, seed: int = 0):
        """`statistics` of resampled blocks of images."""
        generator, n = np.random.default_rng(seed), len(self.rows)
        for _ in range(count):
            weights = np.bincount(generator.integers(0, n, n), minlength=n).astype(np.float64)
            yield _means(np.tensordot(weights, self.sums, 1), weights @ self.rows)

    def per_layer(self) -> pd.DataFrame:
        """One row a layer: means over heads and rows. Entropies in nats."""
        import pandas as pd

        names = ("sink_mass", "total", "binary", "content", "weighted_content", "within_sink", "dispersion")
        table = {name: self.statistics[name].mean(1) for name in names}
        return pd.DataFrame({"layer": self.layers, "rows": self.rows.sum(0), **table})


def _means(sums: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
    rows = np.asarray(rows, np.float64)[:, None, None]
    means = np.divide(sums, rows, out=np.full(sums.shape, np.nan), where=rows > 0)
    found = {name: means[..., i] for i, name in enumerate(STATISTICS) if name != "retained"}
    found["total"] = found["binary"] + found["weighted_content"] + found["within_sink"]
    return found


def survey_outliers(
    model: nn.Module,
    pixels: Tensor,
    positions: Sequence[Sequence[int]],
    *,
    batch: int = 8,
    block: int = BLOCK,
    store: Store = direct,
    progress: Progress = silent,
) -> OutlierSurvey:
    """Row statistics of every head, each image's own `positions` as its sink, all keys the support.

    pixels [n, C, H, W]; positions: one list an image, empty where it has no outlier. Raises InputError where
    their numbers differ, where no image has one, and for a model whose queries do not all see all keys.
    """
    if len(positions) != len(pixels):
        raise InputError(f"{len(positions)} lists of positions for {len(pixels)} images")
    if not any(len(places) for places in positions):
        raise InputError("no image has an outlier token, so there is no sink; lower the factor to see some")
    sites = attention_sites(model)
    heads = max(site.heads for site in sites)
    at = {site.index: i for i, site in enumerate(sites)}

    def compute(index: int) -> dict[str, Tensor]:
        sums = torch.zeros(len(sites), heads, len(STATISTICS), dtype=torch.float64)
        rows = torch.zeros(len(sites), dtype=torch.int64)
        work = Work()
        now: list[Sequence[int]] = []

        def add(call: AttentionCall, output: Tensor) -> None:
            seen = visible(call)
            if seen is not None and not bool(seen.all()):
                raise InputError("outliers as the sink need rows that see every key: a model of whole images")
            length = call.query.shape[2]
            for b, places in enumerate(now):
                if not places:
                    continue
                columns = Columns(tuple(range(length)), tuple(places))
                part = Sums(
                    torch.empty(call.query.shape[1], 0),
                    None,
                    torch.zeros_like(sums[0, : call.query.shape[1]]),
                )
                step = chunk_rows(call.query.shape[1], length, call.query.device)
                for start in range(0, length, step):
                    chosen = slice(start, min(length, start + step))
                    logits = row_logits(_image(call, b), chosen)[0].cpu()[..., columns.order]
                    logits = logits - logits[..., len(columns.sink) :].mean(-1, keepdim=True)
                    part.add(row_sums(logits, columns, work), columns)
                sums[at[call.layer], : len(part.statistics)] += part.statistics
                rows[at[call.layer]] += length

        last = min(len(pixels), (index + 1) * block)
        with torch.no_grad(), attach(model, add):
            for start in starts(last, batch, first=index * block):
                stop = min(last, start + batch)
                now[:] = positions[start:stop]
                run_trunk(model, pixels[start:stop])
                advance(stop - start)
        return {"sums": sums, "rows": rows}

    count = -(-len(pixels) // block)
    with progress(total=len(pixels), unit="images", description="outliers") as advance:
        found = map_blocks(count, compute, store=store, name="outliers")
    return OutlierSurvey(
        sums=np.stack([np.asarray(part["sums"], np.float64) for part in found]),
        rows=np.stack([np.asarray(part["rows"]) for part in found]),
        layers=tuple(site.index for site in sites),
        images=len(pixels),
        left_out=sum(not len(places) for places in positions),
    )


def _image(call: AttentionCall, b: int) -> AttentionCall:
    """The call of one image alone."""
    from dataclasses import replace

    def cut(value: Tensor | None) -> Tensor | None:
        return value if value is None or value.shape[0] == 1 else value[b : b + 1]

    return replace(
        call,
        query=call.query[b : b + 1],
        key=call.key[b : b + 1],
        value=call.value[b : b + 1],
        mask=cut(call.mask),
        bias=cut(call.bias),
        padding=cut(call.padding),
    )
