"""Take heads out of a model: their value aggregate is zero where the output projection reads it.

    with perpend.ablate(model, heads=[(3, 0), (3, 5)]) as ablation:
        model.generate(...)                 # prefill, cached decoding, padded batches, any attention backend
    ablation.unused_kv_heads                # keys and values that no remaining query head reads
    ablation.checked                        # layers where the zero was seen at W_O's own input

A head is one *query* head of one attention layer, numbered as in `attention_sites(model)`. The zero is not
taken on trust: wherever the output projection is known (by the family's record, or as the one layer of the
attention module that can be it), its input is looked at in every forward pass, and an aggregate that is not
zero there is an error. A family that computes its attention by itself is ablated at that input.

Source: redundancy pruning of "Which Question Is Your Attention Metric Answering?", Appendix E.5 (3).
"""

from __future__ import annotations

import json
import operator
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError, PerpendError
from perpend.models.attention import AttentionCall, AttentionSite, attach, attention_sites, module_of
from perpend.models.attention.patches import as_written, patched
from perpend.models.attention.sites import path_to
from perpend.models.placement import stored
from perpend.models.stream import blocks

Head = tuple[int, int]
# what families call W_O, where no record says it; matched within the attention module itself
OUTPUT_NAMES = frozenset(
    {"o_proj", "out_proj", "c_proj", "dense", "proj", "o", "wo", "out_lin", "to_out", "W_O"}
)


@dataclass
class Ablation:
    """What an ablation removes, and what was seen while it held.

    `heads`: (layer, head), sorted, without repeats. `unused_kv_heads`: (layer, KV head) that no remaining
    query head reads. `zero_anyway`: removed heads that added nothing before they were removed: their
    aggregate was zero in every pass, or W_O's columns for it are. `checked`: layers whose output projection
    was seen to read zeros; `unchecked`: those whose projection perpend cannot name.
    """

    heads: tuple[Head, ...]
    unused_kv_heads: tuple[Head, ...] = ()
    unchecked: tuple[int, ...] = ()
    checked: set[int] = field(default_factory=set)
    _alive: set[Head] = field(default_factory=set)
    _seen: set[int] = field(default_factory=set)
    _unread: set[Head] = field(default_factory=set)

    @property
    def zero_anyway(self) -> tuple[Head, ...]:
        return tuple(
            head
            for head in self.heads
            if head in self._unread or (head[0] in self._seen and head not in self._alive)
        )


@contextmanager
def ablate(model: nn.Module, heads: Iterable[Head] | str | os.PathLike[str]) -> Iterator[Ablation]:
    """Zero the aggregates of `heads`, pairs (layer, query head), for as long as the `with` lasts.

    `heads` may be a file that `read_heads` reads. An empty list leaves the model untouched. Raises InputError
    for a layer or head that is not there, and PerpendError from inside the forward pass if an aggregate is
    not zero where W_O reads it.
    """
    if isinstance(heads, (str, os.PathLike)):
        heads = read_heads(heads)
    sites = attention_sites(model)
    removed = heads_by_layer(sites, heads)
    ablation = Ablation(
        tuple((layer, head) for layer, chosen in removed.items() for head in chosen),
        tuple(unused_kv_heads(sites, removed)),
    )
    with zeroing(model, sites, removed, ablation):
        yield ablation


@contextmanager
def zeroing(
    model: nn.Module,
    sites: tuple[AttentionSite, ...],
    removed: Mapping[int, Sequence[int]],
    ablation: Ablation,
) -> Iterator[None]:
    """Zero the aggregates that `removed` (layer -> heads) names *at the time of each call*, in its layers.

    `sites` are the model's. The mapping may change between calls (one walk through many sets), its keys may
    not. `ablation` keeps what is seen: which heads were alive, and where the zero was checked or could not
    be. Raises as `ablate` does.
    """
    projections = _output_projections(model, [sites[layer] for layer in removed])
    ablation.unchecked = tuple(layer for layer in removed if layer not in projections)
    ablation._unread |= {
        (layer, head)
        for layer, head in ablation.heads
        if layer in projections and not _any(_columns(projections[layer], sites[layer], head))
    }
    alone = [layer for layer in removed if sites[layer].path == "probabilities"]
    lost = [sites[layer].name for layer in alone if layer not in projections]
    if lost:
        raise InputError(
            f"{lost[0]} computes its attention by itself, and perpend cannot name its output projection, so "
            "its heads cannot be removed; where the family offers attn_implementation='sdpa', load it with "
            "that"
        )

    def without(layer: int, aggregate: Tensor) -> Tensor:
        """The aggregate [..., heads, d_v] of a layer with the chosen heads zero."""
        ablation._seen.add(layer)
        for head in removed[layer]:
            if (layer, head) not in ablation._alive and _any(aggregate[..., head, :]):
                ablation._alive.add((layer, head))
        kept = aggregate.clone()
        kept[..., _index(removed[layer]), :] = 0
        return kept

    def zero(call: AttentionCall, output: Tensor) -> Tensor | None:
        return without(call.layer, output) if removed[call.layer] else None

    def zero_at(layer: int) -> Any:
        """The same for a layer that hooks cannot reach: on the input of its output projection."""
        site = sites[layer]

        def act(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
            if not removed[layer]:
                return None
            aggregate = args[0].unflatten(-1, (site.heads, site.value_dim))
            return (without(layer, aggregate).flatten(-2), *args[1:])

        return act

    if not removed:
        yield
        return
    hooked = [layer for layer in removed if layer not in alone]
    # The check comes last: an adapter may itself act on the projection's input.
    acts = [(layer, zero_at(layer)) for layer in alone]
    acts += [(layer, _zero_check(ablation, sites[layer], removed)) for layer in projections]
    passed = chain.from_iterable(path_to(model, sites[layer].name) for layer in alone)
    with patched(as_written(passed)), attach(model, zero, hooked, sites=sites):
        handles = [projections[layer].register_forward_pre_hook(act) for layer, act in acts]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def read_heads(path: str | os.PathLike[str]) -> tuple[Head, ...]:
    """The (layer, head) pairs of a file of heads, sorted: `{"heads": [[0, 3], ...]}`, or the list alone.

    Raises InputError for a file that is not there or holds something else.
    """
    file = Path(path).expanduser()
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"there is no file of heads {file} ({error.strerror})") from error
    except ValueError as error:
        raise InputError(f"{file} is no JSON ({error}); {_FILE_FORM}") from error
    pairs = content.get("heads") if isinstance(content, dict) else content
    if not isinstance(pairs, list) or not all(_is_pair(pair) for pair in pairs):
        raise InputError(f"{file} holds no list of heads; {_FILE_FORM}")
    return tuple(sorted({(pair[0], pair[1]) for pair in pairs}))


_FILE_FORM = 'a file of heads is {"heads": [[layer, head], ...]}, as `perpend prune` writes into masks/'


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(type(index) is int for index in pair)


def unused_kv_heads(sites: Iterable[AttentionSite], removed: Mapping[int, Iterable[int]]) -> list[Head]:
    """(layer, KV head) all of whose query heads are in `removed`, a layer → heads mapping."""
    unused = []
    for site in sites:
        gone = set(removed.get(site.index, ()))
        if not gone:
            continue
        groups = site.heads // site.kv_heads
        for kv in range(site.kv_heads):
            if gone.issuperset(range(kv * groups, (kv + 1) * groups)):
                unused.append((site.index, kv))
    return unused


def as_head(pair: Any) -> Head:
    """(layer, head) as whole numbers; InputError for anything else."""
    try:
        layer, head = map(operator.index, pair)
    except (TypeError, ValueError):
        raise InputError(f"a head is a pair (layer, head) of whole numbers, not {pair!r}") from None
    return layer, head


def heads_by_layer(sites: tuple[AttentionSite, ...], heads: Iterable[Head]) -> dict[int, list[int]]:
    chosen: dict[int, set[int]] = defaultdict(set)
    for pair in heads:
        layer, head = as_head(pair)
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


def _output_projections(model: nn.Module, sites: Sequence[AttentionSite]) -> dict[int, nn.Module]:
    """Layer → the module that reads its aggregate, by the family's record or as the one candidate."""
    found = {}
    every = blocks(model) if sites else ()
    for site in sites:
        known = [block.out_proj for block in every if site.name.startswith(block.name + ".")]
        module = (known and known[-1]) or _likely_projection(module_of(model, site), site)
        if module is not None:
            found[site.index] = module
    return found


def _likely_projection(attention: nn.Module, site: AttentionSite) -> nn.Module | None:
    """The one linear layer of an attention module that has W_O's name and reads all its heads' values."""
    fitting = [
        child
        for name, child in attention.named_children()
        if name in OUTPUT_NAMES and _inputs(child) == site.heads * site.value_dim
    ]
    return fitting[0] if len(fitting) == 1 else None


def _inputs(module: nn.Module) -> int | None:
    """How many inputs a linear layer reads; Conv1D keeps its weight the other way round."""
    weight = getattr(module, "weight", None)
    if weight is None or weight.ndim != 2:
        return None
    return weight.shape[0] if _is_conv1d(module) else weight.shape[1]


def _is_conv1d(module: nn.Module) -> bool:
    return type(module).__name__ == "Conv1D"


def _columns(module: nn.Module, site: AttentionSite, head: int) -> Tensor:
    """W_O's weights for one head, [outputs, d_v]; ones where they cannot be read (quantized layers)."""
    weight = getattr(module, "weight", None)
    if _inputs(module) != site.heads * site.value_dim or not weight.is_floating_point():
        return torch.ones(1, 1)
    weight = stored(module, "weight")
    columns = weight.T if _is_conv1d(module) else weight
    return columns[:, head * site.value_dim : (head + 1) * site.value_dim]


def _any(values: Tensor) -> bool:
    """Whether any of values [..., rows, d_v] is not zero, which the first row nearly always says."""
    return bool(torch.count_nonzero(values[..., :1, :]) or torch.count_nonzero(values))


def _index(heads: Sequence[int]) -> int | list[int]:
    """What picks heads on an axis: one by its number, which is a view, several by a list."""
    return heads[0] if len(heads) == 1 else list(heads)


def _zero_check(ablation: Ablation, site: AttentionSite, removed: Mapping[int, Sequence[int]]) -> Any:
    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        heads = removed[site.index]
        if not heads:
            return
        aggregate = args[0].unflatten(-1, (site.heads, site.value_dim))
        if torch.count_nonzero(aggregate[..., _index(heads), :]):
            raise PerpendError(
                f"{site.name}: an ablated head still reaches the output projection: an edit or hook inside "
                "this ablation changes it (ablate innermost), or this model's attention takes a path that "
                "perpend does not see (then please report the model and transformers' version)"
            )
        ablation.checked.add(site.index)

    return look
