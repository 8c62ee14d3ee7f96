"""Attach hooks to a model's attention layers for as long as a `with` lasts.

    with attach(model, hook) as sites:
        model(tokens)            # hook(call, output) runs in every layer; the logits are the model's own

Leaving the `with`, by an exception too, leaves the model as it was. Attaches nest: the outer hook runs first,
the inner one on what it left.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from perpend.errors import InputError, PerpendError
from perpend.models.attention import kernel, registry
from perpend.models.attention.call import AttentionCall, AttentionSite, Hook, Tap
from perpend.models.attention.patches import as_written, patched
from perpend.models.attention.sites import adapter_of, attention_sites, path_to


def choose_sites(sites: tuple[AttentionSite, ...], layers: Iterable[int] | None) -> tuple[AttentionSite, ...]:
    """The sites with these indices (None: all), in model order; InputError for one that is not there."""
    if layers is None:
        return sites
    try:
        wanted = {operator.index(layer) for layer in layers}
    except TypeError as problem:
        raise InputError(f"layers is a list of whole numbers such as [0, 3], not {layers!r}") from problem
    outside = sorted(wanted - set(range(len(sites))))
    if outside:
        raise InputError(
            f"layer {', '.join(map(str, outside))} is not there: the model has attention layers "
            f"0 to {len(sites) - 1}"
        )
    return tuple(site for site in sites if site.index in wanted)


@contextmanager
def attach(
    model: nn.Module,
    hook: Hook,
    layers: Iterable[int] | None = None,
    *,
    need_lse: bool = False,
    tower: str = "text",
    sites: tuple[AttentionSite, ...] | None = None,
) -> Iterator[tuple[AttentionSite, ...]]:
    """Run `hook(call, output)` in the attention layers of a model; yields the sites it is attached to.

    `layers`: indices in `attention_sites(model)`, None for all. `need_lse`: fill `call.lse` from the kernel
    call that gives the output, where the kernel gives it away with bit-identical output (else `call.lse` is
    computed beside it). `tower`: `text`, `vision` or `all` of a multimodal model. `sites`: what
    `attention_sites` has just said of the model, for a caller that has asked; without `layers`, some of them.

    Raises InputError for layers that are not there and for layers that can be observed only as probabilities.
    """
    sites = choose_sites(attention_sites(model, tower) if sites is None else sites, layers)
    groups: dict[object, dict[nn.Module, Tap]] = {}
    passed: set[nn.Module] = set()
    for site in sites:
        path = path_to(model, site.name)
        passed.update(path)
        module = path[-1]
        if site.path == "probabilities":
            raise InputError(
                f"{site.name} ({type(module).__name__}) computes its attention by itself: perpend sees only "
                "its probabilities (surveys can use them), and cannot hook its queries and keys; where the "
                "family offers attn_implementation='sdpa', load it with that"
            )
        home = {"registry": registry, "sdpa": kernel}.get(site.path) or adapter_of(type(module))
        groups.setdefault(home, {})[module] = Tap(site, hook, need_lse)
    with ExitStack() as stack:
        stack.enter_context(patched(as_written(passed)))
        for home, taps in groups.items():
            stack.enter_context(home.tapped(taps))
        yield sites


def _logits(output: object) -> Tensor:
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "last_hidden_state"):
        found = getattr(output, name, None)
        if isinstance(found, Tensor):
            return found
    return output[0]  # type: ignore[index]


def check_parity(model: nn.Module, tokens: Tensor, *, tower: str = "text", **inputs: object) -> int:
    """Run the model with and without an observing hook: the logits must be bit-identical.

    `tokens`: ids [B, T], or pixel values [B, C, H, W] for a vision model; further inputs by name. Returns the
    number of layers whose hook ran. Raises PerpendError where a logit differs or a layer was not seen.
    """
    seen: set[int] = set()

    def look(call: AttentionCall, output: Tensor) -> None:
        seen.add(call.layer)

    name = "pixel_values" if tokens.is_floating_point() else "input_ids"
    arguments = {name: tokens, **inputs} if hasattr(model, "config") else inputs
    positional = () if hasattr(model, "config") else (tokens,)
    with torch.no_grad():
        plain = _logits(model(*positional, **arguments))
        with attach(model, look, tower=tower) as sites:
            watched = _logits(model(*positional, **arguments))
    if not torch.equal(plain, watched):
        same = plain.nan_to_num().eq(watched.nan_to_num()).double().mean().item()
        raise PerpendError(
            f"observing the attention of {type(model).__name__} changes its logits ({1 - same:.2%} of them): "
            "this family takes another path when it is observed; please report the transformers version"
        )
    missing = [site.name for site in sites if site.index not in seen]
    if missing:
        raise PerpendError(
            f"the hook did not run in {', '.join(missing[:3])}{' and others' if len(missing) > 3 else ''}: "
            "the model did not call these layers on this input"
        )
    return len(seen)
