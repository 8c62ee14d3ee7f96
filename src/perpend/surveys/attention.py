"""The attention survey: every head's signature and row statistics, streamed over sequences through a model.

    survey = survey_attention(model, tokens)             # tokens [n, T]; window 64, sink at key 0
    survey.signatures                                    # (layers, heads, keys), log-probabilities, float64
    survey.per_layer()                                   # sink mass, entropy split, dispersion: one row a
    layer

The model runs without its language-model head and keeps its own fast attention; sums are kept per block of
32 sequences, so that bootstrap, split halves, resuming and sharing the work among processes cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from perpend.distributed import Store, direct, map_blocks
from perpend.errors import InputError
from perpend.models.attention import (
    AttentionCall,
    AttentionSite,
    attach,
    attention_sites,
    choose_sites,
    visible,
)
from perpend.progress import Progress, silent
from perpend.surveys import probabilities, variants
from perpend.surveys.attention_result import AttentionSurvey, collect
from perpend.surveys.batches import Sequences, runner, sequences
from perpend.surveys.capture import Capture
from perpend.surveys.supports import Support, plan_support
from perpend.surveys.value_weights import log_weights
from perpend.surveys.variants import Extras, Plan

BLOCK = 32
LOOK = 4  # tokens that a look at the model takes


def survey_attention(
    model: nn.Module,
    tokens: Tensor | Mapping[str, Tensor],
    *,
    window: int | None = None,
    sink: str | int | Sequence[int] = "first",
    queries: str | tuple[int, int] | None = None,
    attention_mask: Tensor | None = None,
    rows: bool = True,
    retained: bool = False,
    sample: int = 4,
    layers: Iterable[int] | None = None,
    tower: str = "text",
    batch: int = 8,
    block: int = BLOCK,
    windows: Sequence[int] = (),
    drop_both: bool = False,
    value_weights: Sequence[str] = (),
    whole_rows: str | Sequence[int] | None = None,
    row_sample: int = 0,
    seed: int = 0,
    store: Store = direct,
    progress: Progress = silent,
) -> AttentionSurvey:
    """Signatures and row statistics of every attention head of `model` over `tokens`.

    tokens: ids [n, T], pixel values [n, C, H, W], or a mapping of the model's inputs (n first in each).
    window: keys kept, None for 64 in causal models and all otherwise. sink: `first`, `first:4`, `cls`, `sep`,
    `virtual`, `auto`, or positions. queries: None (t >= window, or all), `no_sinks`, or (start, stop).
    rows: also row statistics and arithmetic signatures; without them only (mean q)·k is formed.
    retained: also the mass that the support holds of the whole row. sample: rows a sequence kept singly.
    layers: indices in `attention_sites(model)`. batch: sequences a pass; block: sequences whose sums stay
    apart. store, progress: as in `perpend.runs` and `perpend.progress`.

    In the same pass, each off unless asked for: windows: further windows, with the mass they retain
    (`survey.windows`). drop_both: rows of all queries but the sink's own (`survey.variants["drop-both"]`).
    value_weights: of `value`, `output` (`survey.weighted`). whole_rows: rows of every length, in bins of
    positions `log`, `linear` or given (`survey.whole`). row_sample: so many single rows of all heads, at the
    same places, chosen by `seed` (`survey.picked`). With `queries` a pair, all windows have the same queries.

    Raises InputError for inputs and rules that do not fit, PerpendError for logits that are not finite.
    """
    if batch < 1 or block < 1:
        raise InputError("batch and block are numbers of sequences, at least 1")
    data = sequences(tokens, attention_mask)
    sites = choose_sites(attention_sites(model, tower), layers)
    extras = Extras(
        tuple(windows),
        drop_both,
        tuple(value_weights),
        whole_rows if whole_rows is None or isinstance(whole_rows, str) else tuple(whole_rows),
        row_sample,
        seed,
    )
    if extras.any and not rows:
        raise InputError("windows, value weights, whole and single rows need rows=True")
    if any(site.path == "probabilities" for site in sites):
        return probabilities.survey_model(
            model,
            data,
            sites,
            window=window,
            sink=sink,
            queries=queries,
            batch=batch,
            block=block,
            store=store,
            extras=extras,
        )
    run = runner(model, set(data.inputs))
    causal, length, virtual = _look(model, sites, data, run)
    options = dict(
        causal=causal,
        length=length,
        lengths=data.lengths,
        window=window,
        queries=queries,
        has_virtual=virtual,
    )
    count = -(-data.count // block)

    def survey(support: Support, number: int, name: str, want_rows: bool, plan: Plan) -> list[dict[str, Any]]:
        lse = retained or plan.retained
        with progress(
            total=min(data.count, number * block) * length, unit="tokens", description=name
        ) as advance:

            def compute(index: int) -> dict[str, Any]:
                span = range(index * block, min(data.count, (index + 1) * block))
                capture = Capture(support, None, want_rows, retained, sample if want_rows else 0)
                reader = variants.Reader(capture, plan, span)
                with (
                    torch.no_grad(),
                    attach(model, reader.hook, need_lse=lse, sites=sites),
                ):
                    for start in range(span.start, span.stop, batch):
                        stop = min(span.stop, start + batch)
                        inputs, lengths = data.batch(start, stop)
                        reader.batch(lengths, start)
                        run(inputs)
                        advance((stop - start) * length)
                return reader.finish(sites)

            return map_blocks(number, compute, store=store, name=name)

    chosen = sink
    if sink == "auto":
        first = plan_support(sink="virtual" if virtual else "first", **options)
        chosen = _largest(survey(first, 1, "attention-sink", True, Plan()), first)
    support = plan_support(sink=chosen, **options)
    weigh = {}
    if extras.value_weights:
        weigh = log_weights(model, sites, extras.value_weights, run, data.batch(0, 1)[0], tower)
    plan = variants.plan(extras, support, data, options, weigh)
    return collect(
        survey(support, count, "attention", rows, plan),
        sites,
        support,
        data.count,
        plan,
        chosen_sink=support.rule if sink == "auto" else None,
        retained_known=retained and rows,
    )


class _Seen(Exception):
    """Ends the look at the first layer: nothing after it is needed."""


def _look(
    model: nn.Module, sites: tuple[AttentionSite, ...], data: Sequences, run: object
) -> tuple[bool, int, bool]:
    """Whether the model is causal, how many tokens its attention sees, whether it has learned sinks."""
    # of the longest sequence: only a query that has a real key after it can tell
    whole = 0 if data.lengths is None else int(data.lengths.argmax())
    inputs, _ = data.batch(whole, whole + 1)
    call = None
    if data.length > LOOK and all(value.shape[:2] == (1, data.length) for value in inputs.values()):
        # a few tokens tell as much, unless the model pads or pools its sequences
        call = _first_call(model, sites, {name: value[:, :LOOK] for name, value in inputs.items()}, run)
        length = data.length
    if call is None or call.query.shape[2] != LOOK:
        call = _first_call(model, sites, inputs, run)
        length = call.query.shape[2]
    later = visible(call, slice(0, 1), slice(1, 2)) if length > 1 else None
    causal = call.causal or (later is not None and not bool(later.any()))
    modules = dict(model.named_modules())
    virtual = call.sinks is not None or any(hasattr(modules[site.name], "sinks") for site in sites)
    return causal, length, virtual


def _first_call(
    model: nn.Module, sites: tuple[AttentionSite, ...], inputs: dict[str, Tensor], run: object
) -> AttentionCall:
    """The first call of an attention layer on these inputs; the model runs no further than that."""
    seen: list[AttentionCall] = []

    def look(call: AttentionCall, output: Tensor) -> None:
        seen.append(call)
        raise _Seen

    with torch.no_grad(), suppress(_Seen), attach(model, look, sites=sites):
        run(inputs)  # type: ignore[operator]
    if not seen:
        raise InputError("the model called none of its attention layers on this input")
    return seen[0]


def _largest(blocks: list[dict[str, Tensor]], support: Support) -> str | list[int]:
    """The part with the largest mean mass over all heads, as a sink rule."""
    rows = sum(part["rows"] for part in blocks).double()
    total = sum(part["arithmetic"] for part in blocks)
    mean = (total / rows[:, None, None]).flatten(0, 1)
    mean = mean[torch.isfinite(mean).all(-1)]
    if not len(mean):
        raise InputError("sink='auto' found no row that sees the whole support; use a smaller window")
    part = int(mean.mean(0).argmax())
    if support.virtual:
        return "virtual" if part == 0 else [part - 1]
    return [part]
