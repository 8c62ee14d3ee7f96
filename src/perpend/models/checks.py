"""The checks of `perpend.verify`, one small function each; a new one is one more function with `@check`.

A check takes the `Probe` (model and inputs) and returns what it `Found`: errors, and the tolerance they are
held to. It raises `Skip` with a reason where it does not apply.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from perpend.models.attention import AttentionCall, attach, attention_sites, self_weight, valid_rows
from perpend.models.attention.support import row_logits, visible
from perpend.models.edit import SITES, edit
from perpend.models.inputs import model_inputs
from perpend.models.layout import Block, blocks, family_or_none
from perpend.models.stream import Contribution, contributions, identity_error
from perpend.models.verify import DECODED, Found, Probe, Skip, output_of

NO_DECODER = "it generates nothing (an encoder, or a decoder without its language-model head)"
CHECKS: list[Callable[[Probe], Found]] = []


def check(title: str) -> Callable[[Callable[[Probe], Found]], Callable[[Probe], Found]]:
    """Adds a function to the checks under a title."""

    def keep(function: Callable[[Probe], Found]) -> Callable[[Probe], Found]:
        function.title = title  # type: ignore[attr-defined]
        CHECKS.append(function)
        return function

    return keep


@check("stream adds up")
def stream_adds_up(probe: Probe) -> Found:
    """x + sum of contributions = y in every layer (post-norm blocks: at each addition, before its norm)."""
    if family_or_none(probe.model) is None:
        raise Skip(
            "no adapter for this family: block updates only (perpend/models/families says how to add one)"
        )
    seen: dict[tuple[int, str], Contribution] = {}
    with contributions(probe.model, lambda c: seen.update({(c.layer, c.part): c})) as watched:
        probe.run()
    found = Found(1.0, detail="error in units of the rounding allowed for three summands")
    for block in watched:
        attn, mlp, whole = (seen[block.index, part] for part in ("attn", "mlp", "block"))
        end = whole.reference.to(whole.update.dtype) + whole.update
        if block.family.form != "post_norm":
            error, bound = identity_error(attn.reference, [attn.update, mlp.update], end)
            found.errors.append(error / (2 * bound))  # y itself was rebuilt from y - x: one rounding more
            continue
        norms = [block.find(path) for path in block.family.sums]
        ends = (mlp.reference, end)
        for norm, part, after in zip(norms, (attn, mlp), ends):
            with torch.no_grad():
                got = norm(part.reference + part.update)
            after = after.to(torch.promote_types(after.dtype, torch.float32))
            error = (got.to(after.dtype) - after).norm(dim=-1) / after.norm(dim=-1)
            found.errors.append(error / probe.local)
    found.seen = f"{len(watched)} blocks"
    return found


@check("aggregate to contribution")
def aggregate_to_contribution(probe: Probe) -> Found:
    """The value aggregate before W_O, through W_O and what follows it, is what attention adds."""
    if family_or_none(probe.model) is None:
        raise Skip("no adapter for this family")
    if getattr(probe.model, "perpend_variant", None) == "residual":
        raise Skip("a residual variant adds what is left of W_O's output across the stream")
    by_name = _blocks_by_site(probe.model)
    aggregates: dict[int, Tensor] = {}
    gates: dict[int, Tensor] = {}
    added: dict[int, Tensor] = {}
    handles = []
    for index, block in by_name.items():
        gate = block.find(block.family.gate) if block.family.gate else None
        if gate is not None:
            handles.append(gate.register_forward_hook(lambda m, a, out, i=index: gates.update({i: out})))
    try:
        with (
            _attached(probe.model, lambda call, o: aggregates.update({call.layer: o})) as sites,
            contributions(probe.model, lambda c: added.update({c.layer: c.update}), parts=("attn",)),
        ):
            probe.run()
    finally:
        for handle in handles:
            handle.remove()
    found = Found(probe.local)
    for site in sites:
        block = by_name[site.index]
        with torch.no_grad():
            read = aggregates[site.index].flatten(-2)
            if site.index in gates:
                halves = gates[site.index].unflatten(-1, (site.heads, -1)).chunk(2, -1)
                read = read * torch.sigmoid(halves[1].flatten(-2))
            got = _tail(block, block.out_proj(read)) * block.multiplier
        found.add(got, added[block.index])
    hybrid = len(blocks(probe.model)) - len(by_name)
    found.seen = f"{len(sites)} layers"
    found.detail = f"{hybrid} blocks of linear attention have no rows" if hybrid else ""
    return found


@check("self message apart")
def self_message_apart(probe: Probe) -> Found:
    """c_t + A_tt v_t = o_t, c_t summed over the other tokens in fp32 or better, A_tt from the log-sum-exp."""
    variant = getattr(probe.model, "perpend_variant", None) or ""
    if variant.startswith("value"):
        raise Skip(f"the aggregate of a {variant} model is the plain one less a part along v_t")
    found = Found(max(probe.local, 1e-4))

    def look(call: AttentionCall, output: Tensor) -> None:
        weights, real = _weights(call)
        _allow_for_logits(found, row_logits(call))
        own = _own(call)
        value = call.value.repeat_interleave(call.groups, 1).to(weights.dtype)
        others = weights.masked_fill(own, 0.0) @ value
        picked = own.to(weights.dtype) @ value
        sum_of = others + self_weight(call).to(weights.dtype)[..., None] * picked
        keep = real[:, :, None].expand(-1, -1, output.shape[2])
        found.add(sum_of.transpose(1, 2), output, keep)

    with _attached(probe.model, look) as sites:
        probe.run()
    found.seen = _heads(sites)
    return found


@check("rows sum to one")
def rows_sum_to_one(probe: Probe) -> Found:
    """Weights of the visible keys, from the kernel's log-sum-exp, sum to one with a learned sink's."""
    found = Found(max(probe.local, 1e-4))

    def look(call: AttentionCall, output: Tensor) -> None:
        lse, logits = call.lse, row_logits(call)
        _allow_for_logits(found, logits)
        total = (logits - lse[..., None]).exp().sum(-1)
        if call.sinks is not None:
            total = total + (call.sinks.to(lse.dtype).view(1, -1, 1) - lse).exp()
        real = valid_rows(call)[:, None].expand(-1, total.shape[1], -1)
        found.add(total[..., None], torch.ones_like(total)[..., None], real)

    with _attached(probe.model, look) as sites:
        probe.run()
    found.seen = _heads(sites)
    return found


@check("sinks and windows")
def sinks_and_windows(probe: Probe) -> Found:
    """Each row sees the keys its layer says; with learned sinks, less the sink's share."""
    found = Found(0.0)
    lacking: list[float] = []
    counted = {"both": 0}

    def look(call: AttentionCall, output: Tensor) -> None:
        seen = visible(call)
        length, keys = call.query.shape[2], call.key.shape[2]
        expected = torch.ones(length, keys, dtype=torch.bool, device=output.device)
        window = call.site.window
        if getattr(call.module, "is_causal", probe.causal):
            expected = expected.tril()
            if window is not None:
                expected = expected.triu(1 - window)
        elif window is not None and window < length:
            counted["both"] += (
                1  # families count a window on both sides differently: the other checks hold it
            )
            return
        got = torch.ones_like(expected) if seen is None else seen
        found.errors.append((got != expected).float().reshape(-1))
        if call.sinks is not None:
            weights, real = _weights(call)
            rows = weights.sum(-1).transpose(1, 2)[real]
            lacking.append(float((1 - rows).mean()))
            found.errors.append((rows >= 1).float().reshape(-1))

    with _attached(probe.model, look) as sites:
        probe.run()
    windowed = sum(site.window is not None for site in sites)
    found.seen = f"{len(sites)} layers"
    words = [f"{windowed} see a window alone"] if windowed else []
    words += [f"{counted['both']} see one on both sides, not counted here"] if counted["both"] else []
    words += [f"learned sinks take {sum(lacking) / len(lacking):.3f} of a row"] if lacking else []
    found.detail = ", ".join(words)
    return found


@check("observing is bit-exact")
def observing_is_exact(probe: Probe) -> Found:
    """Hooks that look at everything and change nothing leave every output bit as it was."""
    found = Found(0.0)
    with contributions(probe.model, lambda c: None, parts=_parts(probe)):
        found.errors.append((probe.run() != probe.plain).float())
    sites = ()
    if _hookable(probe.model):
        with _attached(probe.model, lambda call, o: None) as sites:
            found.errors.append((probe.run() != probe.plain).float())
    found.seen = f"{len(blocks(probe.model))} blocks, {len(sites)} attention layers"
    return found


@check("no-op edit is bit-exact")
def noop_edit_is_exact(probe: Probe) -> Found:
    """An edit by (1, 1) changes no bit, and one by (0, 1) does change the output, at every site."""
    found, tried = Found(0.0), []
    for site in _sites(probe):
        with edit(probe.model, site, parallel=1.0, perpendicular=1.0):
            found.errors.append((probe.run() != probe.plain).float())
        with edit(probe.model, site, parallel=0.0):
            found.errors.append(torch.tensor([float(torch.equal(probe.run(), probe.plain))]))
        tried.append(site)
    found.seen = f"{len(tried)} sites"
    found.detail = "" if len(tried) == len(SITES) else f"sites: {', '.join(tried)}"
    return found


@check("decode = prefill, dynamic cache")
def decode_is_prefill(probe: Probe) -> Found:
    """Tokens decoded one by one with a growing cache have the logits of one pass, plain and edited."""
    return _decoding(probe, lambda name, length: None)


@check("decode = prefill, static cache")
def decode_is_prefill_static(probe: Probe) -> Found:
    """The same with a cache of fixed size, whose own key is not the last."""
    if not probe.causal:
        raise Skip(NO_DECODER)
    from transformers import StaticCache

    if not getattr(probe.model, "_can_compile_fullgraph", False):
        raise Skip("transformers offers no static cache for this family")
    config = probe.model.config.get_text_config(decoder=True)

    def make(name: str, length: int) -> dict[str, Any]:
        return {name: StaticCache(config=config, max_cache_len=length + 8)}

    return _decoding(probe, make)


@check("padded = unpadded")
def padded_is_unpadded(probe: Probe) -> Found:
    """Sequences of different lengths, padded on the left in one batch, read as each does alone."""
    if probe.images:
        raise Skip("images are not padded")
    length = probe.tokens.shape[1]
    lengths = [max(2, round(length * share)) for share in (1, 0.7, 0.5, 0.3)][: len(probe.tokens)]
    padded = torch.zeros(len(lengths), length, dtype=torch.long)
    padded[:] = getattr(probe.model.config.get_text_config(decoder=True), "pad_token_id", None) or 0
    mask = torch.zeros(padded.shape, dtype=torch.bool)
    for row, count in enumerate(lengths):
        padded[row, length - count :] = probe.tokens[row, :count]
        mask[row, length - count :] = True
    found = Found(probe.through)
    for change in _changes(probe):
        with _edited(probe, change):
            together = probe.run(padded, mask)
            for row, count in enumerate(lengths):
                found.add(together[row, length - count :], probe.run(probe.tokens[row : row + 1, :count])[0])
    found.seen = f"{len(lengths)} lengths"
    return found


@check("batch of 1 = batch of 8")
def batch_of_one_is_batch_of_all(probe: Probe) -> Found:
    """A sequence's output does not depend on its company."""
    found = Found(probe.through)
    for row in range(len(probe.tokens)):
        found.add(probe.run(probe.tokens[row : row + 1])[0], probe.plain[row])
    found.seen = f"{len(probe.tokens)} sequences"
    return found


@check("restored after an error")
def restored_after_an_error(probe: Probe) -> Found:
    """An exception inside any of perpend's contexts leaves the model as it was: output, hooks, attention."""
    model, before = probe.model, _traces(probe.model)

    def fail(*anything: Any) -> None:
        raise _OnPurpose

    contexts = [lambda: contributions(model, fail, parts=_parts(probe))]
    if _hookable(model):
        contexts.append(lambda: attach(model, fail))
    for site in _sites(probe):
        contexts.append(lambda site=site: _failing_edit(model, site, fail))
    found = Found(0.0)
    probe.plain  # noqa: B018 - computed before anything fails
    for context in contexts:
        raised = False
        try:
            with context():
                probe.run()
        except _OnPurpose:
            raised = True
        found.errors.append(torch.tensor([float(not raised), float(_traces(model) != before)]))
        found.errors.append((probe.run() != probe.plain).float())
    found.seen = f"{len(contexts)} contexts"
    return found


class _OnPurpose(Exception):
    pass


@contextmanager
def _failing_edit(model: nn.Module, site: str, fail: Callable[..., None]) -> Iterator[None]:
    """An edit, with an error from the model's last layer inside it."""
    last = blocks(model)[-1].module
    handle = last.register_forward_hook(fail)
    try:
        with edit(model, site, parallel=0.5):
            yield
    finally:
        handle.remove()


def _decoding(probe: Probe, make: Callable[[str, int], dict[str, Any] | None]) -> Found:
    if not probe.causal:
        raise Skip(NO_DECODER)
    parameters = inspect.signature(probe.model.forward).parameters
    name = next((n for n in ("cache", "past_key_values") if n in parameters), None)
    if name is None:
        raise Skip("its forward takes no cache")
    tokens = probe.tokens[:2]
    start = tokens.shape[1] - DECODED
    found = Found(probe.through)
    changes = _changes(probe)
    for change in changes:
        with _edited(probe, change), torch.no_grad():
            whole = probe.run(tokens)
            inputs = {**model_inputs(probe.model, tokens[:, :start]), "use_cache": True}
            output = probe.model(**inputs, **(make(name, tokens.shape[1]) or {}))
            found.add(output_of(output), whole[:, :start])
            for at in range(start, tokens.shape[1]):
                one = {**model_inputs(probe.model, tokens[:, at : at + 1]), "use_cache": True}
                cache = getattr(output, name, None)
                if cache is None:
                    raise Skip("the model returns no cache")
                output = probe.model(**one, **{name: cache})
                found.add(output_of(output)[:, -1], whole[:, at])
    found.seen = f"{DECODED} tokens after {start}"
    found.detail = "" if len(changes) > 1 else "plain only: its values cannot be edited"
    return found


def _weights(call: AttentionCall) -> tuple[Tensor, Tensor]:
    """A [B, H, T, S] from the logits alone, a learned sink in the denominator, and the real rows [B, T]."""
    logits = row_logits(call)
    lse = logits.logsumexp(-1)
    if call.sinks is not None:
        lse = torch.logaddexp(lse, call.sinks.to(lse.dtype).view(1, -1, 1))
    real = valid_rows(call)
    return (logits - lse[..., None]).exp().masked_fill(~real[:, None, :, None], 0.0), real


def _allow_for_logits(found: Found, logits: Tensor) -> None:
    """Rounding of a logit in fp32 is a relative error of its weight: large logits need more room."""
    largest = float(logits[torch.isfinite(logits)].abs().max())
    found.tolerance = max(found.tolerance, 16 * torch.finfo(torch.float32).eps * largest)


def _own(call: AttentionCall) -> Tensor:
    """Which key is the row's own, [T, S]: in one pass without a cache, the diagonal."""
    length, keys = call.query.shape[2], call.key.shape[2]
    return torch.eye(length, keys, dtype=torch.bool, device=call.query.device)


@contextmanager
def _attached(model: nn.Module, hook: Callable[..., Any]) -> Iterator[Any]:
    sites = attention_sites(model)
    if not sites:
        raise Skip("no attention layers")
    if not _hookable(model):
        raise Skip("its attention is computed in its own code: probabilities alone can be observed")
    with attach(model, hook) as attached:
        yield attached


def _hookable(model: nn.Module) -> bool:
    sites = attention_sites(model)
    return bool(sites) and all(site.path != "probabilities" for site in sites)


def _sites(probe: Probe) -> list[str]:
    """The edit sites this model has."""
    residual = ["residual.block"] if family_or_none(probe.model) is None else list(SITES[:3])
    return residual + (list(SITES[3:]) if _hookable(probe.model) else [])


def _changes(probe: Probe) -> tuple[str | None, ...]:
    """The plain model, and an edit that needs every row's own key, where there is one."""
    return (None, "value.exclude_self") if _hookable(probe.model) else (None,)


@contextmanager
def _edited(probe: Probe, site: str | None) -> Iterator[None]:
    if site is None:
        yield
    else:
        with edit(probe.model, site, parallel=0.0):
            yield


def _parts(probe: Probe) -> tuple[str, ...]:
    return ("block",) if family_or_none(probe.model) is None else ("attn", "mlp", "block")


def _blocks_by_site(model: nn.Module) -> dict[int, Block]:
    """Site index -> its block; several sites of one repeated block are not told apart and raise Skip."""
    every = blocks(model)
    if len({id(block.module) for block in every}) != len(every):
        raise Skip("one block runs as several layers: its attention calls are not told apart")
    found = {}
    for site in attention_sites(model):
        for block in every:
            if site.name.startswith(block.name + "."):
                found[site.index] = block
    return found


def _tail(block: Block, projected: Tensor) -> Tensor:
    """What stands between W_O's output and the stream: a post-norm, a LayerScale, a dropout, or nothing."""
    last = block.find(block.family.attn_update)
    inside = any(module is block.out_proj for module in last.modules())
    return projected if inside else last(projected)


def _heads(sites: Any) -> str:
    return f"{len(sites)} layers, {sum(site.heads for site in sites)} heads"


def _traces(model: nn.Module) -> tuple[Any, ...]:
    """What a context could leave behind: hooks, replaced forwards, and the choice of attention function."""
    hooks = tuple(
        (len(module._forward_hooks), len(module._forward_pre_hooks), "forward" in vars(module))
        for module in model.modules()
    )
    chosen = tuple(
        getattr(getattr(module, "config", None), "_attn_implementation", None) for module in model.modules()
    )
    return hooks, chosen
