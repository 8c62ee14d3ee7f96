"""Surveys from attention probabilities: saved tensors, another tool's cache, models that hide q and k.

Rows given as probabilities carry zeros of two kinds. A key that no row at that query ever sees (in no head
and no sequence) is *structural*: a query that cannot see the whole support is left out and counted. Any
other zero has underflowed and gets multiplicative replacement, epsilon (1e-6), the rest of its row scaled
by 1 - epsilon times their number; they are counted too. Where q and k can be had nothing underflows, and
this is not used.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from perpend.distributed import Store, map_blocks
from perpend.errors import InputError
from perpend.models.attention import AttentionSite
from perpend.surveys.attention_result import AttentionSurvey, collect
from perpend.surveys.batches import Sequences, runner
from perpend.surveys.capture import Capture, LayerSums, _as_slice, _spread, picks
from perpend.surveys.rows import STATISTICS, Sums, chunk_rows
from perpend.surveys.supports import Support, plan_support
from perpend.surveys.variants import Extras, Plan, Reader, plan

EPSILON = 1e-6
_PATTERN = re.compile(r"blocks\.(\d+)\.attn\.hook_pattern$")


def signatures_from_probabilities(
    attentions: Tensor | Sequence[Tensor] | Mapping[str, Tensor],
    *,
    window: int | None = None,
    sink: str | int | Sequence[int] = "first",
    queries: str | tuple[int, int] | None = None,
    epsilon: float = EPSILON,
    block: int = 32,
    sample: int = 4,
    windows: Sequence[int] = (),
    drop_both: bool = False,
    whole_rows: str | Sequence[int] | None = None,
    row_sample: int = 0,
    seed: int = 0,
) -> AttentionSurvey:
    """A survey of saved attention probabilities.

    `attentions`: a tensor [layers, heads, query, key] (one sequence) or [layers, batch, heads, query, key], a
    sequence of [batch, heads, query, key] (transformers' `outputs.attentions`), or a mapping with
    TransformerLens' keys `blocks.{layer}.attn.hook_pattern`. Rows are re-closed on the support. windows,
    drop_both, whole_rows, row_sample, seed: as in `survey_attention`; probabilities know no values.

    Raises InputError for empty tuples (what sdpa returns for output_attentions), negative or non-finite
    entries, and rows that do not sum to one (below one where a learned sink takes the rest).
    """
    layers = _as_layers(attentions)
    options = dict(
        causal=_is_causal(layers),
        length=layers[0].shape[-1],
        lengths=None,
        window=window,
        queries=queries,
        has_virtual=False,
    )
    support = plan_support(sink=sink, **options)
    count = layers[0].shape[0]
    bins = whole_rows if whole_rows is None or isinstance(whole_rows, str) else tuple(whole_rows)
    extras = Extras(tuple(windows), drop_both, (), bins, row_sample, seed)
    chosen = plan(extras, support, Sequences({}, None, count, options["length"]), options, {})
    sites = tuple(
        AttentionSite(i, f"layer {i}", i, layer.shape[1], layer.shape[1], 0, 0, None, "probabilities")
        for i, layer in enumerate(layers)
    )
    blocks, zeros = [], Counter()
    for start in range(0, count, block):
        reader = _reader(support, chosen, range(start, min(count, start + block)), sample)
        for site, layer in zip(sites, layers):
            zeros += _read(reader, site.index, layer[start : start + block], epsilon)
        blocks.append(reader.finish(sites))
    return _survey(sites, support, blocks, count, zeros, epsilon, chosen)


def survey_model(
    model: nn.Module,
    data: Sequences,
    sites: tuple[AttentionSite, ...],
    *,
    window: int | None,
    sink: str | int | Sequence[int],
    queries: str | tuple[int, int] | None,
    batch: int,
    block: int,
    store: Store,
    extras: Extras,
    sample: int,
    epsilon: float = EPSILON,
) -> AttentionSurvey:
    """A survey from the probabilities that a model returns: T x T rows, one batch at a time."""
    run = runner(model, set(data.inputs), sites)
    if data.lengths is not None:
        raise InputError(
            "a model that shows only probabilities is surveyed on whole sequences, without padding"
        )

    def rows_of(start: int, stop: int) -> list[Tensor]:
        inputs, _ = data.batch(start, stop)
        with torch.no_grad():
            found = getattr(run({**inputs, "output_attentions": torch.tensor(True)}), "attentions", None)
        return _as_layers(found or ())

    first = rows_of(0, 1)
    if len(first) != len(sites):
        raise InputError(
            f"the model returned {len(first)} attention tensors for {len(sites)} attention layers; survey "
            "them as saved tensors with signatures_from_probabilities"
        )
    if extras.value_weights:
        raise InputError("this model shows probabilities and no values: its rows cannot be weighted by them")
    if sink == "auto":
        raise InputError(
            "sink='auto' needs a model that shows queries and keys; name a position, or sink='first'"
        )
    options = dict(
        causal=_is_causal(first),
        length=first[0].shape[-1],
        lengths=None,
        window=window,
        queries=queries,
        has_virtual=False,
    )
    support = plan_support(sink=sink, **options)
    chosen = plan(extras, support, data, options, {})

    def compute(index: int) -> dict[str, Any]:
        span = range(index * block, min(data.count, (index + 1) * block))
        reader, zeros = _reader(support, chosen, span, sample), Counter()
        for start in range(span.start, span.stop, batch):
            reader.batch(None, start)
            for site, layer in zip(sites, rows_of(start, min(span.stop, start + batch))):
                zeros += _read(reader, site.index, layer, epsilon)
        return {**reader.finish(sites), "zeros": torch.tensor([zeros["zeros"], zeros["massless"]])}

    blocks = map_blocks(-(-data.count // block), compute, store=store, name="attention")
    zeros = Counter(
        zeros=sum(int(part["zeros"][0]) for part in blocks),
        massless=sum(int(part["zeros"][1]) for part in blocks),
    )
    return _survey(sites, support, blocks, data.count, zeros, epsilon, chosen)


def _reader(support: Support, chosen: Plan, span: range, sample: int) -> Reader:
    reader = Reader(Capture(support, None, True, False, sample), chosen, span)
    reader.batch(None, span.start)
    return reader


def _read(reader: Reader, index: int, rows: Tensor, epsilon: float) -> Counter[str]:
    """Add a layer's rows to everything the reader holds; zeros are counted on the main support."""
    zeros = _add(reader.main, index, rows, epsilon)
    for capture in reader.others.values():
        _add(capture, index, rows, epsilon)
    if reader.whole is not None:
        reader.whole.add_probabilities(index, rows)
    return zeros


def _survey(
    sites: tuple[AttentionSite, ...],
    support: Support,
    blocks: list[dict[str, Any]],
    count: int,
    zeros: Counter[str],
    epsilon: float,
    chosen: Plan,
) -> AttentionSurvey:
    notes = [
        f"read from probabilities (T x T rows): {zeros['zeros']} zeros that are not structural were replaced "
        f"by {epsilon:g}"
    ]
    if zeros["massless"]:
        notes.append(f"{zeros['massless']} rows had no mass on the support at all and became uniform")
    return collect(
        blocks,
        sites,
        support,
        count,
        chosen,
        zeros=zeros["zeros"],
        epsilon=epsilon,
        extra_notes=tuple(notes),
    )


def _as_layers(attentions: Any) -> list[Tensor]:
    """One [batch, heads, query, key] tensor a layer, checked."""
    if isinstance(attentions, Mapping):
        found = {int(m[1]): value for name, value in attentions.items() if (m := _PATTERN.search(name))}
        if not found:
            raise InputError(
                "the mapping holds no blocks.{layer}.attn.hook_pattern; give probabilities by layer"
            )
        attentions = [found[layer] for layer in sorted(found)]
    layers = [torch.as_tensor(layer) for layer in attentions]
    layers = [layer[None] if layer.ndim == 3 else layer for layer in layers]
    if not layers:
        raise InputError(
            "there are no attention probabilities: sdpa returns an empty tuple for output_attentions; load "
            "the model with attn_implementation='eager', or give survey_attention the model itself"
        )
    for i, layer in enumerate(layers):
        if (
            layer.ndim != 4
            or layer.shape[-2:] != layers[0].shape[-2:]
            or layer.shape[0] != layers[0].shape[0]
        ):
            raise InputError(
                f"layer {i} has shape {tuple(layer.shape)}; give [batch, heads, query, key], the same for "
                "all layers"
            )
        total = layer.double().sum(-1)
        if not bool(torch.isfinite(layer).all()) or bool((layer < 0).any()) or bool((total > 1.01).any()):
            raise InputError(
                f"layer {i} holds no probabilities: entries below 0, not finite, or rows above 1"
            )
    return layers


def _is_causal(layers: Sequence[Tensor]) -> bool:
    above = torch.ones(layers[0].shape[-2:], dtype=torch.bool).triu(1)
    return all(not bool(layer[..., above.to(layer.device)].any()) for layer in layers)


def _add(capture: Capture, index: int, rows: Tensor, epsilon: float) -> Counter[str]:
    """Add a layer's rows [batch, heads, query, key]; counts zeros replaced, and rows without mass."""
    support, columns = capture.support, capture.support.columns
    batch, heads, length = rows.shape[:3]
    chosen = support.rows(length)
    candidates = torch.arange(length)[chosen].to(rows.device)
    seen = (rows > 0).any(1).any(0)[candidates, : support.window].all(-1)  # in some head and sequence
    inside = _as_slice(candidates[seen])
    wide = dict(dtype=torch.float64, device=rows.device)
    if index not in capture.layers:
        capture.layers[index] = LayerSums(
            Sums(
                torch.zeros(heads, columns.parts, **wide),
                torch.zeros(heads, columns.parts, **wide),
                torch.zeros(heads, len(STATISTICS), **wide),
            )
        )
    layer = capture.layers[index]
    layer.most_calls = 1
    layer.left_out += batch * int((~seen).sum())
    if inside is None:
        return Counter()
    zeros, massless, order, sinks = 0, 0, columns.order, len(columns.sink)
    for b in range(batch):
        part = rows[b, :, inside, : support.window].double()
        total = part.sum(-1, keepdim=True)
        massless += int((total == 0).sum())
        if capture.retained:
            layer.heads.statistics[:, STATISTICS.index("retained")] += total[..., 0].sum(1)
        part = part / total.clamp_min(torch.finfo(total.dtype).tiny)
        empty = part == 0
        zeros += int(empty.sum())
        part = torch.where(empty, epsilon, part * (1 - epsilon * empty.sum(-1, keepdim=True)))
        logits = part.log()[..., order]
        logits -= logits[..., sinks:].mean(-1, keepdim=True)
        layer.heads.logits[:, order] += logits.sum(1)
        count, step = logits.shape[1], chunk_rows(heads, columns.parts, rows.device)
        for i, place in capture.kept_places(b, inside, count).items():
            layer.kept[place] = torch.empty(heads, columns.parts)
            layer.kept[place][:, order] = logits[:, i].float().cpu()
        wanted = _spread(count, capture.sample)
        tables = [capture.new_sample(index, heads)] if capture.sample else []
        for start in range(0, count, step):
            piece = logits[:, start : start + step]
            room = capture.waiting.room(heads, piece.shape[1], columns, piece).copy_(piece)
            capture.waiting.add(layer.heads, room, None, picks(tables, wanted, slice(start, start + step)))
        layer.rows += count
    return Counter(zeros=zeros, massless=massless)
