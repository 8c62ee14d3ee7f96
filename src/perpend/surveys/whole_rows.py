"""Whole attention rows of every length: what an entropy monitor sees, in the split of Proposition 1.

A row here is all keys that its query sees, not a fixed support: H = H_b(s) + (1−s)·H(π) (+ the entropy inside
a sink of several parts). Rows stream by in blocks of queries × blocks of keys with a running maximum (an
online softmax), so that memory stays flat in the length. Means are kept per head and per bin of the query's
position, because a row's entropy grows with the number of its keys: `uniform` is what equal weights would
give, log of that number.

A learned sink logit belongs to the sink always: it is no key, and no content. A query that does not see the
sink (a sliding window) is structural: left out and counted; so is one that sees nothing else (the first).

Source: "Which Question Is Your Attention Metric Answering?", Proposition 1, Section 5.1 (entropy monitors).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from perpend.errors import InputError, unknown_name
from perpend.models.attention import AttentionCall, AttentionSite, row_logits, valid_rows, visible
from perpend.surveys.rows import exponential, sink_split

if TYPE_CHECKING:
    import pandas as pd

STATISTICS = ("sink_mass", "binary", "content", "weighted_content", "within_sink", "uniform")
MEANS = ("total", *STATISTICS)
BINNINGS = ("log", "linear")
LINEAR_BINS = 16
KEYS = 2048  # of one block
CPU_ROOM, GPU_ROOM = 1 << 20, 1 << 26  # logits held at a time


def bin_edges(binning: str | Sequence[int], length: int, *support: int | None) -> tuple[int, ...]:
    """First position of each bin of queries, ascending from 0: powers of two, equal steps, or as given.

    `support` (the first query of the fixed support, the one after its last) are always edges, so that both
    kinds of row can be compared on the same queries.
    """
    if isinstance(binning, str):
        if binning not in BINNINGS:
            raise unknown_name("binning of positions", binning, BINNINGS)
        step = max(1, -(-length // LINEAR_BINS))
        edges = (
            {0, *range(step, length, step)}
            if binning == "linear"
            else {0, *(1 << i for i in range(length.bit_length()))}
        )
    else:
        edges = {0, *(int(edge) for edge in binning)}
        if min(edges) < 0:
            raise InputError(f"bins start at positions of queries, from 0; {min(edges)} is none")
    return tuple(sorted(edge for edge in {*edges, *support} if edge is not None and edge < length))


@dataclass
class WholeCapture:
    """Sums of one block of sequences; its `hook` is for `attach`."""

    sink: tuple[int, ...]
    edges: tuple[int, ...]
    sums: dict[int, Tensor] = field(default_factory=dict)  # layer -> [H, bins, STATISTICS], float64
    rows: dict[int, Tensor] = field(default_factory=dict)  # layer -> [bins]
    names: dict[int, str] = field(default_factory=dict)  # of the layers' modules
    left_out: dict[int, int] = field(default_factory=dict)
    without_content: dict[int, int] = field(default_factory=dict)

    def hook(self, call: AttentionCall, output: Tensor) -> None:
        """Add all rows of one call."""
        batch, heads, length, _ = call.query.shape
        device, bins = call.query.device, len(self.edges)
        if call.layer not in self.sums:
            self.sums[call.layer] = torch.zeros(
                heads, bins, len(STATISTICS), dtype=torch.float64, device=device
            )
            self.rows[call.layer] = torch.zeros(bins, dtype=torch.int64)
            self.left_out[call.layer] = self.without_content[call.layer] = 0
            self.names[call.layer] = call.site.name
        real = valid_rows(call)
        width = min(KEYS, call.key.shape[2])
        room = CPU_ROOM if device.type == "cpu" else GPU_ROOM
        step = max(1, room // max(1, batch * heads * width))
        edges = torch.tensor(self.edges, device=device)
        for start in range(0, length, step):
            rows = slice(start, min(length, start + step))
            place = torch.bucketize(torch.arange(rows.start, rows.stop, device=device), edges, right=True) - 1
            self._add(call, rows, place, real[:, rows], width)

    def damage(self) -> tuple[int, str] | None:
        """The first layer whose sums are not finite, and what there is to say of it."""
        for layer, sums in sorted(self.sums.items()):
            if not bool(torch.isfinite(sums).all()):
                return layer, (
                    f"layer {layer} ({self.names.get(layer, '')}): attention logits are not finite outside "
                    "the fixed support; the model overflows in its dtype (load it with dtype=float32 or "
                    "bfloat16)"
                )
        return None

    def _add(self, call: AttentionCall, rows: slice, place: Tensor, real: Tensor, width: int) -> None:
        batch, heads = call.query.shape[:2]
        count = rows.stop - rows.start
        sees_sink = torch.ones(batch, count, dtype=torch.bool, device=real.device)
        named: Tensor | None = None
        if self.sink:
            keys = torch.tensor(self.sink, device=call.key.device)
            seen = visible(call, rows, keys)
            if seen is not None:
                sees_sink &= seen.all(-1).all(1).expand(batch, count)
            named = row_logits(call, rows, keys, hide=False)
        parts = [named] if named is not None else []
        if call.sinks is not None:
            parts.append(call.sinks.double().view(1, -1, 1, 1).expand(batch, heads, count, 1))
        if not parts:  # the virtual sink of a layer that has none
            self.left_out[call.layer] += int(real.sum())
            return
        mass, inner, number = self._content(call, rows, width)
        filled = (number > 0).all(1).expand(batch, count)
        good = real & sees_sink & filled
        self.left_out[call.layer] += int((real & ~sees_sink).sum())
        self.without_content[call.layer] += int((real & sees_sink & ~filled).sum())
        sink_logits = torch.cat([part.double() for part in parts], -1)
        split, entropy = sink_split(sink_logits, mass), mass - inner
        uniform = (number + sink_logits.shape[-1]).double().log().expand(batch, heads, count)
        values = torch.stack(
            [split.share, split.binary, entropy, split.rest * entropy, split.within, uniform], -1
        )
        keep = good[:, None, :, None]
        together = torch.where(keep, values, 0.0).sum(0)  # [H, q, F]
        self.sums[call.layer].index_add_(1, place, together)
        self.rows[call.layer] += torch.bincount(
            place.expand(batch, count)[good].cpu(), minlength=len(self.edges)
        )

    def add_probabilities(self, index: int, rows: Tensor) -> None:
        """Add rows given as probabilities [B, H, T, S] of one layer, re-closed; their zeros add no entropy.

        A key that is zero at a query in every head and sequence is one that the query does not see.
        """
        batch, heads, length, keys = rows.shape
        bins = len(self.edges)
        if index not in self.sums:
            wide = dict(dtype=torch.float64, device=rows.device)
            self.sums[index] = torch.zeros(heads, bins, len(STATISTICS), **wide)
            self.rows[index] = torch.zeros(bins, dtype=torch.int64)
            self.left_out[index] = self.without_content[index] = 0
        edges = torch.tensor(self.edges, device=rows.device)
        place = torch.bucketize(torch.arange(length, device=rows.device), edges, right=True) - 1
        seen = (rows > 0).any(1).any(0)  # [T, S]
        sees_sink = seen[:, list(self.sink)].all(-1)
        number = seen.sum(-1) - seen[:, list(self.sink)].sum(-1)
        good = sees_sink & (number > 0)
        self.left_out[index] += batch * int((~sees_sink).sum())
        self.without_content[index] += batch * int((sees_sink & (number == 0)).sum())
        self.rows[index] += batch * torch.bincount(place[good].cpu(), minlength=bins)
        content = [key for key in range(keys) if key not in self.sink]
        uniform = (number + len(self.sink)).clamp_min(1).double().log()
        for b in range(batch):
            logs = rows[b].double().log()
            split = sink_split(logs[..., list(self.sink)], mass := logs[..., content].logsumexp(-1))
            inside = (logs[..., content] - mass[..., None]).exp()
            entropy = -torch.special.xlogy(inside, inside).sum(-1)
            values = [split.share, split.binary, entropy, split.rest * entropy, split.within]
            together = torch.stack([*values, uniform.expand(heads, length)], -1)
            together = torch.where(good[None, :, None], together.nan_to_num(nan=0.0), 0.0)
            self.sums[index].index_add_(1, place, together)

    def _content(self, call: AttentionCall, rows: slice, width: int) -> tuple[Tensor, Tensor, Tensor]:
        """Log-sum-exp and mean logit of the content [B, H, q], float64, and its number of keys [B|1, H|1, q].

        Z and U = Σ (l−m)·exp(l−m) are kept at the running maximum m and moved when it grows.
        """
        batch, heads = call.query.shape[:2]
        shape = (batch, heads, rows.stop - rows.start)
        wide = dict(dtype=torch.float64, device=call.query.device)
        top = torch.full(shape, float("-inf"), **wide)
        mass, first = torch.zeros(shape, **wide), torch.zeros(shape, **wide)
        number = torch.zeros(1, 1, shape[2], dtype=torch.long, device=call.query.device)
        sinks = [key for key in self.sink if key < call.key.shape[2]]
        for start in range(0, call.key.shape[2], width):
            keys = slice(start, min(call.key.shape[2], start + width))
            if call.causal and keys.start > rows.stop - 1 + call.diagonal:
                break
            seen = visible(call, rows, keys)
            if seen is not None and not bool(seen.any()):
                continue
            inside = [key - keys.start for key in sinks if keys.start <= key < keys.stop]
            logits = row_logits(call, rows, keys)
            if inside:
                logits[..., inside] = float("-inf")
            if seen is None:
                number = number + (keys.stop - keys.start - len(inside))
            else:
                shown = seen.expand(*seen.shape[:2], shape[2], keys.stop - keys.start)
                number = number + shown.sum(-1)
                if inside:
                    number = number - shown[..., inside].sum(-1)
            new = torch.maximum(top, logits.amax(-1).double())
            held = torch.where(torch.isinf(new), 0.0, new)  # nothing seen yet: exp(-inf) = 0 all the same
            logits = logits.sub_(held.to(logits.dtype)[..., None])
            weights = exponential(logits)
            moved = torch.where(torch.isinf(top), 0.0, (top - held))
            scale = torch.where(torch.isinf(top), 0.0, moved.exp())
            shifted = weights * logits.masked_fill_(weights == 0, 0.0)
            first = (first + moved * mass) * scale + shifted.sum(-1, dtype=torch.float64)
            mass = mass * scale + weights.sum(-1, dtype=torch.float64)
            top = new
        held = torch.where(torch.isinf(top), 0.0, top)
        safe = mass.clamp_min(torch.finfo(torch.float64).tiny)
        return held + safe.log(), held + first / safe, number

    def finish(self, sites: Sequence[AttentionSite]) -> dict[str, Tensor]:
        """`sums` [L, H, bins, F], `rows` [L, bins], `left_out` and `without_content` [L]."""
        heads, bins = max(site.heads for site in sites), len(self.edges)
        sums = torch.full((len(sites), heads, bins, len(STATISTICS)), float("nan"), dtype=torch.float64)
        rows = torch.zeros(len(sites), bins, dtype=torch.int64)
        for i, site in enumerate(sites):
            if site.index in self.sums:
                sums[i, : site.heads] = self.sums[site.index].cpu()
                rows[i] = self.rows[site.index]
        return {
            "sums": sums,
            "rows": rows,
            "left_out": torch.tensor([self.left_out.get(site.index, 0) for site in sites]),
            "without_content": torch.tensor([self.without_content.get(site.index, 0) for site in sites]),
        }


@dataclass(frozen=True)
class WholeRows:
    """Whole rows of a survey: means per head and bin of positions, from sums per block of sequences.

    `edges`: first query of each bin; `support`: W, the first query of the fixed support. NaN where there is
    no row. Entropies in nats, masses as shares.
    """

    blocks: list[dict[str, Tensor]]
    edges: tuple[int, ...]
    support: int
    layers: tuple[int, ...]
    heads: tuple[int, ...]

    @cached_property
    def _sums(self) -> np.ndarray:
        return torch.stack([block["sums"] for block in self.blocks]).numpy()

    @cached_property
    def _rows(self) -> np.ndarray:
        return torch.stack([block["rows"] for block in self.blocks]).numpy().astype(np.float64)

    @property
    def left_out(self) -> np.ndarray:
        """Queries per layer that do not see the whole sink, (layers,)."""
        return torch.stack([block["left_out"] for block in self.blocks]).sum(0).numpy()

    @property
    def without_content(self) -> np.ndarray:
        """Queries per layer that see the sink and nothing else, (layers,)."""
        return torch.stack([block["without_content"] for block in self.blocks]).sum(0).numpy()

    def means(
        self, first: int = 0, last: int | None = None, weights: np.ndarray | None = None
    ) -> dict[str, np.ndarray]:
        """Means over all rows of queries first..last-1, whole bins, (layers, heads) each of MEANS.

        `weights` (blocks,): of a resample. Raises InputError where first or last is inside a bin.
        """
        for edge in (first, last):
            if edge is not None and edge not in self.edges and edge < max(self.edges):
                raise InputError(f"position {edge} is inside a bin; bins start at {list(self.edges)}")
        chosen = [b for b, e in enumerate(self.edges) if e >= first and (last is None or e < last)]
        weights = np.ones(len(self.blocks)) if weights is None else weights
        sums = np.tensordot(weights, self._sums[..., chosen, :].sum(3), 1)
        return self._named(sums, np.tensordot(weights, self._rows[..., chosen].sum(-1), 1)[:, None])

    def by_bin(self, weights: np.ndarray | None = None) -> dict[str, np.ndarray]:
        """Means per bin, (layers, heads, bins) each of MEANS."""
        weights = np.ones(len(self.blocks)) if weights is None else weights
        return self._named(
            np.tensordot(weights, self._sums, 1), np.tensordot(weights, self._rows, 1)[:, None]
        )

    def _named(self, sums: np.ndarray, rows: np.ndarray) -> dict[str, np.ndarray]:
        rows = np.broadcast_to(rows, sums.shape[:-1])[..., None]
        means = np.divide(sums, rows, out=np.full(sums.shape, np.nan), where=rows > 0)
        found = {name: means[..., i] for i, name in enumerate(STATISTICS)}
        found["total"] = found["binary"] + found["weighted_content"] + found["within_sink"]
        return found

    @property
    def rows(self) -> np.ndarray:
        """Rows per layer and bin, (layers, bins)."""
        return self._rows.sum(0).astype(np.int64)

    def per_position(self) -> pd.DataFrame:
        """One row a layer and bin: `first` and `last` query, `rows` (of one head), MEANS over heads."""
        import pandas as pd

        found, rows = self.by_bin(), self.rows
        last = [edge - 1 for edge in self.edges[1:]] + [None]
        table = [
            {
                "layer": layer,
                "first": edge,
                "last": last[b],
                "rows": int(rows[i, b]),
                **{name: float(found[name][i, : self.heads[i], b].mean()) for name in MEANS},
            }
            for i, layer in enumerate(self.layers)
            for b, edge in enumerate(self.edges)
        ]
        return pd.DataFrame(table).astype({"last": "Int64"})

    def per_head(self, first: int = 0) -> pd.DataFrame:
        """One row a head: MEANS over all rows from query `first` on."""
        import pandas as pd

        found = self.means(first)
        return pd.DataFrame(
            [
                {"layer": layer, "head": head, **{name: float(found[name][i, head]) for name in MEANS}}
                for i, layer in enumerate(self.layers)
                for head in range(self.heads[i])
            ]
        )
