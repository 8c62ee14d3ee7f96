"""One block of sequences as plain tensors: what is stored, resumed, shared among processes and resampled."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from perpend.models.attention import AttentionSite
from perpend.surveys.capture import Capture
from perpend.surveys.rows import SAMPLED, STATISTICS


def finish(capture: Capture, sites: tuple[AttentionSite, ...], count: int) -> dict[str, Tensor]:
    """One block's sums over layers, as CPU tensors; NaN fills layers with fewer heads."""
    heads = max(site.heads for site in sites)
    parts = capture.support.columns.parts
    length = max(
        (len(x.importance[0]) for x in capture.layers.values() if x.importance is not None), default=0
    )

    def table(pick: Any, *shape: int) -> Tensor:
        filled = torch.full((len(sites), heads, *shape), float("nan"), dtype=torch.float64)
        for i, site in enumerate(sites):
            layer = capture.layers.get(site.index)
            value = None if layer is None else pick(layer)
            if value is not None:
                filled[i, : len(value)] = value.cpu()
        return filled

    def number(name: str) -> Tensor:
        return torch.tensor(
            [getattr(capture.layers[s.index], name) if s.index in capture.layers else 0 for s in sites]
        )

    block = {
        "logits": table(lambda layer: layer.heads.logits, parts),
        "rows": number("rows"),
        "left_out": number("left_out"),
        "padding": number("padding"),
        "prefixes": number("prefixes"),
        "called": number("most_calls"),
        "sequences": torch.tensor(count),
    }
    if capture.want_rows:
        block["arithmetic"] = table(lambda layer: layer.heads.arithmetic, parts)
        block["statistics"] = table(lambda layer: layer.heads.statistics, len(STATISTICS))
        if length:
            block["importance"] = table(lambda layer: layer.importance, length)
            block["over"] = table(lambda layer: layer.over, length)
    if capture.sample:
        sample = torch.full((count, len(sites), heads, capture.sample, len(SAMPLED)), float("nan"))
        for i, site in enumerate(sites):
            layer = capture.layers.get(site.index)
            for n, rows in enumerate(layer.sample[:count] if layer else []):
                sample[n, i, : rows.shape[0]] = rows
        block["sample"] = sample
    return block


def kept_rows(capture: Capture, sites: tuple[AttentionSite, ...]) -> Tensor:
    """Logits of the wanted rows, centred on their content, [places, L, H, D] in order of sequence and query.

    NaN where a layer has no such row. Of a layer that several blocks share, the last call's rows.
    """
    places = [(sequence, query) for sequence, queries in (capture.wanted or {}).items() for query in queries]
    heads = max(site.heads for site in sites)
    rows = torch.full((len(places), len(sites), heads, capture.support.columns.parts), float("nan"))
    for i, site in enumerate(sites):
        layer = capture.layers.get(site.index)
        for n, place in enumerate(places):
            row = None if layer is None else layer.kept.get(place)
            if row is not None:
                rows[n, i, : len(row)] = row
    return rows
