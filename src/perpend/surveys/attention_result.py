"""What an attention survey found: sums per block, and everything that is read off them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from perpend.errors import InputError
from perpend.models.attention import AttentionSite
from perpend.surveys.importance import PREFIX, SINK_SHARE
from perpend.surveys.places import PickedRows
from perpend.surveys.rows import STATISTICS
from perpend.surveys.supports import Support
from perpend.surveys.value_weights import WEIGHTS
from perpend.surveys.whole_rows import WholeRows

if TYPE_CHECKING:
    import pandas as pd

    from perpend.surveys.variants import Plan

MEANS = tuple(name for name in STATISTICS if not name.endswith("_square"))


@dataclass(frozen=True)
class AttentionSurvey:
    """Sums over rows, per block of sequences, and what follows from them.

    `blocks`: one dict a block: `logits` [L, H, D] (sum over rows, centred on the content), `arithmetic` [L,
    H, D] (sum of rows), `statistics` [L, H, F], `rows`, `left_out` and `padding` [L]. L layers are `sites`,
    D parts are `support.columns`, NaN pads layers with fewer heads. `zeros`: how many underflowed zeros were
    replaced (probability path only). `variants`: further surveys of the same pass by name; `whole`: rows of
    every length; `picked`: single rows, all heads at the same places. Everything that is read off is NumPy,
    float64; a layer without rows is NaN and is named in `undefined`.
    """

    sites: tuple[AttentionSite, ...]
    support: Support
    blocks: list[dict[str, Tensor]] = field(repr=False)
    sequences: int
    chosen_sink: str | None = None
    retained_known: bool = False
    zeros: int = 0
    epsilon: float | None = None
    extra_notes: tuple[str, ...] = field(default=())
    variants: Mapping[str, AttentionSurvey] = field(default_factory=dict, repr=False)
    whole: WholeRows | None = field(default=None, repr=False)
    picked: PickedRows | None = field(default=None, repr=False)

    def stacked(self, name: str) -> np.ndarray:
        """One quantity over blocks, [blocks, ...]."""
        missing = [i for i, block in enumerate(self.blocks) if name not in block]
        if missing:
            option = name if name == "importance" else "rows"
            raise InputError(f"this survey did not keep {name!r}; run it with {option}=True")
        return torch.stack([block[name] for block in self.blocks]).numpy()

    @property
    def windows(self) -> dict[int, AttentionSurvey]:
        """The surveys of further windows, by number of keys; `statistics["retained"]` is what each holds."""
        return {
            int(name.removeprefix("window-")): survey
            for name, survey in self.variants.items()
            if name.startswith("window-")
        }

    @property
    def weighted(self) -> dict[str, AttentionSurvey]:
        """The surveys of rows weighted by their values, by kind of weight."""
        return {kind: self.variants[kind] for kind in WEIGHTS if kind in self.variants}

    @cached_property
    def rows(self) -> np.ndarray:
        """Rows per layer (per head; the same for all heads of a layer), (layers,)."""
        return self.stacked("rows").sum(0)

    @cached_property
    def left_out(self) -> np.ndarray:
        """Real queries per layer that do not see the whole support: structural, (layers,)."""
        return self.stacked("left_out").sum(0)

    @cached_property
    def signatures(self) -> np.ndarray:
        """Aitchison means over rows, log-probabilities, (layers, heads, parts)."""
        return self._signature()

    @cached_property
    def arithmetic(self) -> np.ndarray:
        """Arithmetic means over rows, probabilities, (layers, heads, parts)."""
        total = self.stacked("arithmetic").sum(0)
        return _over(total, self.rows)

    def _total(self, name: str, weights: np.ndarray | None) -> np.ndarray:
        """A quantity over all blocks, each so many times; None: once."""
        values = self.stacked(name)
        return values.sum(0) if weights is None else np.tensordot(weights, values, 1)

    def _signature(self, weights: np.ndarray | None = None) -> np.ndarray:
        mean = _over(self._total("logits", weights), self._total("rows", weights))
        if self.support.ragged:
            mean = np.full_like(mean, np.nan)
        top = np.max(mean, axis=-1, keepdims=True)
        return mean - top - np.log(np.sum(np.exp(mean - top), axis=-1, keepdims=True))

    @cached_property
    def statistics(self) -> dict[str, np.ndarray]:
        """Means over rows of each of STATISTICS and `total`, (layers, heads)."""
        return self._means()

    def _means(self, weights: np.ndarray | None = None) -> dict[str, np.ndarray]:
        means = _over(self._total("statistics", weights), self._total("rows", weights))
        found = {name: means[..., i] for i, name in enumerate(STATISTICS)}
        if not self.retained_known:
            found["retained"] = np.full_like(found["retained"], np.nan)
        found["total"] = found["binary"] + found["weighted_content"] + found["within_sink"]
        return found

    @cached_property
    def signature_sink(self) -> np.ndarray:
        """The sink's share of each signature, (layers, heads)."""
        return np.exp(self.signatures[..., list(self.support.columns.sink)]).sum(-1)

    @cached_property
    def variance(self) -> np.ndarray:
        """Total Aitchison variance of the rows of each head (single sinks), (layers, heads)."""
        if len(self.support.columns.sink) != 1:
            raise InputError("the variance over rows is kept for a single sink")
        means, signature = self.statistics, self.signatures
        centre = signature - signature.mean(-1, keepdims=True)
        return means["dispersion_square"] + means["balance_square"] - np.square(centre).sum(-1)

    def replicates(self, count: int = 200, seed: int = 0) -> Iterator[np.ndarray]:
        """Signatures of resampled blocks (drawn with replacement), (layers, heads, parts) each."""
        for weights in self.resampled(count, seed):
            yield self._signature(weights)

    def resampled(self, count: int = 200, seed: int = 0) -> Iterator[np.ndarray]:
        """Weights of the blocks in bootstrap replicates, (blocks,) each; the same seed, the same weights."""
        generator, n = np.random.default_rng(seed), len(self.blocks)
        for _ in range(count):
            yield np.bincount(generator.integers(0, n, n), minlength=n).astype(np.float64)

    def statistic_replicates(self, count: int = 200, seed: int = 0) -> Iterator[dict[str, np.ndarray]]:
        """`statistics` of the same replicates."""
        for weights in self.resampled(count, seed):
            yield self._means(weights)

    def halves(self, count: int = 10, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Signatures of random halves of the blocks, pairs of (layers, heads, parts)."""
        n = len(self.blocks)
        if n < 2:
            raise InputError(
                "halves need at least two blocks of sequences; give more sequences or smaller blocks"
            )
        generator = np.random.default_rng(seed)
        for _ in range(count):
            first = np.zeros(n)
            first[generator.permutation(n)[: n // 2]] = 1
            yield self._signature(first), self._signature(1 - first)

    @cached_property
    def undefined(self) -> dict[int, str]:
        """Layers without a value, by index in the model, and why, in words."""
        called = self.stacked("called").max(0)
        found = {}
        for i, site in enumerate(self.sites):
            if self.rows[i]:
                continue
            if not called[i]:
                found[site.index] = "the model does not run this layer on this input"
            elif self.support.virtual and not self.stacked("left_out").sum(0)[i]:
                found[site.index] = "this layer has no learned sink logit"
            elif site.window is not None and site.window <= self.support.window:
                found[site.index] = (
                    f"its sliding window of {site.window} keys never shows a query the sink and all of keys "
                    f"0 to {self.support.window - 1}"
                )
            else:
                found[site.index] = f"no query sees all of keys 0 to {self.support.window - 1}"
        return found

    @cached_property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of these numbers, in sentences."""
        notes = [self.support.words, *self.extra_notes]
        if self.chosen_sink is not None:
            notes.append(f"sink auto chose {self.chosen_sink}: the part with the largest mean mass")
        if self.support.ragged:
            notes.append("sequences differ in length, so the sink has no fixed position: no signatures")
        shared = self.stacked("called").max(0)
        notes += [
            f"layer {site.index} ({site.name}) runs {shared[i]} times a pass, its weights being shared: its "
            "rows are pooled over all depths"
            for i, site in enumerate(self.sites)
            if shared[i] > 1
        ]
        some = [i for i in range(len(self.sites)) if self.rows[i] and self.left_out[i]]
        if some:
            share = self.left_out[some].sum() / (self.left_out[some] + self.rows[some]).sum()
            named = ", ".join(str(self.sites[i].index) for i in some[:8]) + (", ..." if len(some) > 8 else "")
            notes.append(
                f"{share:.1%} of the queries in layers {named} do not see the support and are left out"
            )
        return tuple(notes)

    def sink_rate(self, share: float = SINK_SHARE, key: int = 0) -> float:
        """Sink^ε of the attention-sink literature: share of (layer, head, sequence) with importance of
        `key` > ε.

        Importance is Σ_q A_qk/(T−k) over the causal rows of the first 64 tokens. For ε = 0.3 it is counted
        per sequence; for another ε the mean importance over sequences decides.
        """
        if "importance" not in self.blocks[0]:
            raise InputError("Sink^ε needs a causal model, surveyed with rows=True and importance=True")
        if key >= self.blocks[0]["importance"].shape[-1]:
            raise InputError(f"key {key} is not among the first {PREFIX} tokens")
        prefixes = self.stacked("prefixes").sum(0)
        if share == SINK_SHARE:
            return float(np.nanmean(_over(self.stacked("over").sum(0), prefixes)[..., key]))
        importance = _over(self.stacked("importance").sum(0), prefixes)[..., key]
        return float(np.nanmean(np.where(np.isnan(importance), np.nan, importance > share)))

    @property
    def importance(self) -> np.ndarray:
        """Mean importance Σ_q A_qk/(T−k) of the first 64 keys, (layers, heads, keys); InputError without."""
        return _over(self.stacked("importance").sum(0), self.stacked("prefixes").sum(0))

    @cached_property
    def sample(self) -> np.ndarray:
        """Single rows, evenly spaced: (sequences, layers, heads, rows, SAMPLED); NaN where there is none."""
        if "sample" not in self.blocks[0]:
            raise InputError("this survey kept no single rows; run it with rows=True and sample > 0")
        return torch.cat([block["sample"] for block in self.blocks]).numpy()

    @property
    def results(self) -> dict[str, Any]:
        """Per layer, JSON-ready; None where a layer has no value (`undefined` says why)."""
        rows = self.per_layer().to_dict("records")
        return {
            "per_layer": [{k: None if v != v else v for k, v in row.items()} for row in rows],
            "undefined": {str(layer): why for layer, why in self.undefined.items()},
            "notes": list(self.notes),
        }

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        """`layers` and `heads`, tidy."""
        return {"layers": self.per_layer(), "heads": self.per_head()}

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """`signatures` (log-probabilities) and, with rows, `arithmetic`: (layers, heads, parts)."""
        found = {"signatures": self.signatures}
        return {**found, "arithmetic": self.arithmetic} if "arithmetic" in self.blocks[0] else found

    def _repr_html_(self) -> str:
        return self.per_layer().dropna(axis=1, how="all").to_html(index=False, float_format="%.4g")

    def per_head(self) -> pd.DataFrame:
        """One row a head: signature and row statistics."""
        import pandas as pd

        layers, heads = self.signatures.shape[:2]
        index = {
            "layer": np.repeat([site.index for site in self.sites], heads),
            "head": np.tile(np.arange(heads), layers),
            "rows": np.repeat(self.rows, heads),
        }
        index |= {name: values.ravel() for name, values in self._by_head().items()}
        real = np.concatenate([np.arange(heads) < site.heads for site in self.sites])
        return pd.DataFrame(index)[real].reset_index(drop=True)

    def _by_head(self) -> dict[str, np.ndarray]:
        """What is known of each head, (layers, heads); NaN pads layers with fewer heads."""
        found = {"signature_mass": self.signature_sink}
        if "statistics" in self.blocks[0]:
            found |= {name: self.statistics[name] for name in ("total", *MEANS)}
        return found

    def per_layer(self) -> pd.DataFrame:
        """One row a layer: means over its heads, beside what uniform rows would give.

        row_mass and signature_mass are shares; entropies in nats; total = binary + weighted_content
        (+ within_sink for a sink of several keys).
        """
        import pandas as pd

        r, parts = len(self.support.columns.sink), self.support.columns.parts
        heads = self._by_head()
        means = dict(zip(heads, _mean(np.stack(list(heads.values())))))
        table = {
            "layer": [site.index for site in self.sites],
            "block": [site.block for site in self.sites],
            "rows": self.rows,
            "left_out": self.left_out,
            "signature_mass": means.pop("signature_mass"),
        }
        if means:
            table |= {"row_mass": means.pop("sink_mass"), **means}
        table |= {
            "uniform_mass": r / parts,
            "uniform_total": np.log(parts),
            "uniform_content": np.log(parts - r),
        }
        return pd.DataFrame(table)


def collect(
    blocks: Sequence[Mapping[str, Any]],
    sites: tuple[AttentionSite, ...],
    support: Support,
    sequences: int,
    plan: Plan,
    **more: Any,
) -> AttentionSurvey:
    """The survey of finished blocks, with the variants, whole rows and single rows that `plan` asked for.

    `more`: further fields of AttentionSurvey.
    """
    notes = tuple(more.pop("extra_notes", ()))

    def weightless(variant: str) -> tuple[str, ...]:
        broken = [block["variants"][variant]["statistics"] for block in blocks]
        lost = sum(
            bool(torch.isnan(torch.stack([part[i, head, 0] for part in broken])).any())
            for i, site in enumerate(sites)
            for head in range(site.heads)
            if any(int(block["rows"][i]) for block in blocks)
        )
        return (f"{lost} heads have a key whose value is zero: no weighted rows",) if lost else ()

    variants = {
        variant.name: AttentionSurvey(
            sites,
            variant.support,
            [block["variants"][variant.name] for block in blocks],
            sequences,
            retained_known=variant.retained,
            extra_notes=notes + (weightless(variant.name) if variant.weigh else ()),
        )
        for variant in plan.variants
    }
    whole = picked = None
    if plan.edges is not None:
        whole = WholeRows(
            [dict(block["whole"]) for block in blocks],
            plan.edges,
            support.first,
            tuple(site.index for site in sites),
            tuple(site.heads for site in sites),
        )
    if plan.places is not None:
        picked = PickedRows(plan.places, torch.cat([block["kept"] for block in blocks]).numpy())
    own = [
        {name: value for name, value in block.items() if name not in ("variants", "whole", "kept")}
        for block in blocks
    ]
    return AttentionSurvey(
        sites,
        support,
        own,
        sequences,
        extra_notes=notes,
        variants=variants,
        whole=whole,
        picked=picked,
        **more,
    )


def _over(total: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """total [L, ...] / rows [L], NaN where there is no row."""
    rows = np.asarray(rows, np.float64).reshape(-1, *[1] * (total.ndim - 1))
    return np.divide(total, rows, out=np.full(total.shape, np.nan), where=rows > 0)


def _mean(values: np.ndarray) -> np.ndarray:
    """Means over the heads that have a value, [..., H] -> [...]; NaN where none has."""
    known = ~np.isnan(values)
    count = known.sum(-1)
    total = np.where(known, values, 0.0).sum(-1)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)
