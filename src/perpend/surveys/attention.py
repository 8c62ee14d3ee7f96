"""The attention survey: every head's signature and row statistics, streamed over sequences through a model.

    survey = survey_attention(model, tokens)             # tokens [n, T]; window 64, sink at key 0
    survey.signatures                                    # (layers, heads, keys), log-probabilities, float64
    survey.per_layer()                                   # sink mass, entropy split, dispersion: one row a
    layer

The model runs without its language-model head and keeps its own fast attention; sums are kept per block of
32 sequences, so that bootstrap, split halves, resuming and sharing the work among processes cost nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
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
    module_of,
    visible,
)
from perpend.models.limits import check_ids
from perpend.progress import Progress, silent
from perpend.surveys import probabilities, variants
from perpend.surveys.attention_result import AttentionSurvey, collect
from perpend.surveys.batches import Sequences, runner, sequences
from perpend.surveys.capture import Capture
from perpend.surveys.supports import Support, plan_support
from perpend.surveys.value_weights import log_weights
from perpend.surveys.variants import Extras, Plan

BLOCK = 32


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
    importance: bool = True,
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
    importance: of causal models, with rows, also the first 64 keys' importance as sinks (`sink_rate`).
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
    for name, given in (("sample", sample), ("row_sample", row_sample)):
        if given < 0:
            raise InputError(f"{name} is a number of rows, at least 0")
    data = sequences(tokens, attention_mask)
    if "input_ids" in data.inputs:
        check_ids(model, data.inputs["input_ids"])
    sites = choose_sites(attention_sites(model, tower), layers)
    if not sites:
        raise InputError("no layer is chosen; leave layers out for all")
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
            sample=sample if rows else 0,
        )
    run = runner(model, set(data.inputs), sites)
    count = -(-data.count // block)

    def options(call: AttentionCall) -> dict[str, Any]:
        """What a support is planned from, as a call shows it."""
        causal, virtual = _nature(model, sites, call)
        return dict(
            causal=causal,
            length=call.query.shape[2],
            lengths=data.lengths,
            window=window,
            queries=queries,
            has_virtual=virtual,
        )

    def survey(
        support: Support | Callable[[AttentionCall], Support],
        length: int,
        number: int,
        name: str,
        want_rows: bool,
        plan: Plan,
    ) -> list[dict[str, Any]]:
        lse = retained or plan.retained
        with progress(
            total=min(data.count, number * block) * length, unit="tokens", description=name
        ) as advance:

            def compute(index: int) -> dict[str, Any]:
                span = range(index * block, min(data.count, (index + 1) * block))
                capture = Capture(
                    support, None, want_rows, retained, sample if want_rows else 0, importance=importance
                )
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
                if not capture.layers:
                    raise _no_call()
                return reader.finish(sites)

            return map_blocks(number, compute, store=store, name=name)

    plan, automatic = Plan(), sink == "auto"
    if data.length and data.lengths is None and not automatic and not extras.any:
        # of whole texts the first call of the first pass tells what is else looked for beforehand
        at_first = _AtFirst(lambda call: plan_support(sink=sink, **options(call)))
        blocks = survey(at_first, data.length, count, "attention", rows, plan)
        support = at_first.support or at_first(_look(model, sites, data, run))  # all was in the store
    else:
        known = options(_look(model, sites, data, run))
        length = int(known["length"])
        if automatic:
            first = plan_support(sink="virtual" if known["has_virtual"] else "first", **known)
            sink = _largest(survey(first, length, 1, "attention-sink", True, plan), first)
        support = plan_support(sink=sink, **known)
        weigh = {}
        if extras.value_weights:
            weigh = log_weights(model, sites, extras.value_weights, run, data.batch(0, 1)[0], tower)
        plan = variants.plan(extras, support, data, known, weigh)
        blocks = survey(support, length, count, "attention", rows, plan)
    return collect(
        blocks,
        sites,
        support,
        data.count,
        plan,
        chosen_sink=support.rule if automatic else None,
        retained_known=retained and rows,
    )


class _AtFirst:
    """A support that is planned from the first call of an attention layer, and stays."""

    def __init__(self, plan: Callable[[AttentionCall], Support]) -> None:
        self.plan = plan
        self.support: Support | None = None

    def __call__(self, call: AttentionCall) -> Support:
        if self.support is None:
            self.support = self.plan(call)
        return self.support


class _Seen(Exception):
    """Ends the look at the first layer: nothing after it is needed."""


def _look(
    model: nn.Module, sites: tuple[AttentionSite, ...], data: Sequences, run: Callable[..., Any]
) -> AttentionCall:
    """The first call of an attention layer on the longest sequence, of whose length no other may be."""
    # of the longest sequence: only a query that has a real key after it can tell whether it sees it
    whole = 0 if data.lengths is None else int(data.lengths.argmax())
    return _first_call(model, sites, data.batch(whole, whole + 1)[0], run)


def _nature(model: nn.Module, sites: tuple[AttentionSite, ...], call: AttentionCall) -> tuple[bool, bool]:
    """Whether a model is causal, by a call of one of its layers, and whether any has learned sinks."""
    causal = call.causal
    if not causal and call.query.shape[2] > 1:
        later = visible(call, slice(0, 1), slice(1, 2))
        causal = later is not None and not bool(later.any())
    virtual = call.sinks is not None or any(hasattr(module_of(model, site), "sinks") for site in sites)
    return causal, virtual


def _first_call(
    model: nn.Module, sites: tuple[AttentionSite, ...], inputs: dict[str, Tensor], run: Callable[..., Any]
) -> AttentionCall:
    """The first call of an attention layer on these inputs; the model runs no further than that."""
    seen: list[AttentionCall] = []

    def look(call: AttentionCall, output: Tensor) -> None:
        seen.append(call)
        raise _Seen

    with torch.no_grad(), suppress(_Seen), attach(model, look, sites=sites):
        run(inputs)
    if not seen:
        raise _no_call()
    return seen[0]


def _no_call() -> InputError:
    return InputError("the model called none of its attention layers on this input")


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
