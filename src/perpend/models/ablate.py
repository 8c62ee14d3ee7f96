"""Take heads out of a model: their value aggregate is zero where the output projection reads it.

    with perpend.ablate(model, heads=[(3, 0), (3, 5)]) as ablation:
        model.generate(...)                 # prefill, cached decoding, padded batches, any attention backend
    ablation.unused_kv_heads                # keys and values that no remaining query head reads
    ablation.checked                        # layers where the zero was seen at W_O's own input

A head is one *query* head of one attention layer, numbered as in `attention_sites(model)`. The zero is not
taken on trust: wherever the output projection is known, its input is looked at in every forward pass, and an
aggregate that is not zero there is an error.

Source: redundancy pruning of "Which Question Is Your Attention Metric Answering?", Appendix E.5 (3).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from perpend.errors import InputError, PerpendError
from perpend.models.attention import AttentionCall, AttentionSite, attach, attention_sites
from perpend.models.stream import blocks

Head = tuple[int, int]


@dataclass
class Ablation:
    """What an ablation removes, and what was seen while it held.

    `heads`: (layer, head), sorted, without repeats. `unused_kv_heads`: (layer, KV head) that no remaining
    query head reads. `zero_anyway`: removed heads whose aggregate was zero in every pass before it was
    removed.
    `checked`: layers whose output projection was seen to read zeros; `unchecked`: those whose projection this
    family's record does not name.
    """

    heads: tuple[Head, ...]
    unused_kv_heads: tuple[Head, ...]
    unchecked: tuple[int, ...]
    checked: set[int] = field(default_factory=set)
    _alive: set[Head] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)

    @property
    def zero_anyway(self) -> tuple[Head, ...]:
        return tuple(head for head in self.heads if head[0] in self._seen and head not in self._alive)


@contextmanager
def ablate(model: nn.Module, heads: Iterable[Head]) -> Iterator[Ablation]:
    """Zero the aggregates of `heads`, pairs (layer, query head), for as long as the `with` lasts.

    An empty list leaves the model untouched. Raises InputError for a layer or head that is not there, and
    PerpendError from inside the forward pass if an aggregate is not zero where W_O reads it.
    """
    sites = attention_sites(model)
    removed = _by_layer(sites, heads)
    projections = _output_projections(model, sites)
    ablation = Ablation(
        tuple((layer, head) for layer, chosen in removed.items() for head in chosen),
        tuple(unused_kv_heads(sites, removed)),
        tuple(layer for layer in removed if layer not in projections),
    )

    def zero(call: AttentionCall, output: Tensor) -> Tensor:
        chosen = removed[call.layer]
        ablation._seen.add(call.layer)
        for head in chosen:
            if (call.layer, head) not in ablation._alive and bool(output[:, :, head].any()):
                ablation._alive.add((call.layer, head))
        kept = output.clone()
        kept[:, :, chosen] = 0
        return kept

    with ExitStack() as stack:
        if removed:
            # The check comes last: an adapter may itself act on the projection's input.
            stack.enter_context(attach(model, zero, layers=list(removed)))
            for layer, chosen in removed.items():
                if layer in projections:
                    look = _zero_check(ablation, sites[layer], chosen)
                    handle = projections[layer].register_forward_pre_hook(look)
                    stack.callback(handle.remove)
        yield ablation


def unused_kv_heads(sites: Iterable[AttentionSite], removed: Mapping[int, Iterable[int]]) -> list[Head]:
    """(layer, KV head) all of whose query heads are in `removed`, a layer → heads mapping."""
    unused = []
    for site in sites:
        gone = set(removed.get(site.index, ()))
        groups = site.heads // site.kv_heads
        for kv in range(site.kv_heads):
            if gone.issuperset(range(kv * groups, (kv + 1) * groups)):
                unused.append((site.index, kv))
    return unused


def _by_layer(sites: tuple[AttentionSite, ...], heads: Iterable[Head]) -> dict[int, list[int]]:
    chosen: dict[int, set[int]] = defaultdict(set)
    for pair in heads:
        try:
            layer, head = (int(index) for index in pair)
        except (TypeError, ValueError):
            raise InputError(f"a head is a pair (layer, head), not {pair!r}") from None
        if not 0 <= layer < len(sites):
            raise InputError(
                f"layer {layer} is out of range: the model has attention layers 0 to {len(sites) - 1}"
            )
        if not 0 <= head < sites[layer].heads:
            raise InputError(
                f"head {head} is out of range: layer {layer} has heads 0 to {sites[layer].heads - 1}"
            )
        chosen[layer].add(head)
    return {layer: sorted(chosen[layer]) for layer in sorted(chosen)}


def _output_projections(model: nn.Module, sites: tuple[AttentionSite, ...]) -> dict[int, nn.Module]:
    """Layer → the module that reads its aggregate, where a family record names it."""
    names = {id(module): name for name, module in model.named_modules()}
    found = {}
    for block in blocks(model):
        if block.family is None or block.out_proj is None:
            continue
        prefix = names[id(block.module)] + "."
        for site in sites:
            if site.name.startswith(prefix):
                found[site.index] = block.out_proj
    return found


def _zero_check(ablation: Ablation, site: AttentionSite, heads: list[int]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        aggregate = args[0].unflatten(-1, (site.heads, site.value_dim))
        if bool(aggregate[..., heads, :].any()):
            raise PerpendError(
                f"{site.name}: an ablated head still reaches the output projection; this model's attention "
                "takes a path that perpend does not see (please report the model and transformers' version)"
            )
        ablation.checked.add(site.index)

    return look
