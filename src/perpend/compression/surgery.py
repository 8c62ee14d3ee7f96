"""Error surgery: run the base model with only a chosen part of a compressed model's error.

    with injection(base, other, "perpendicular"):
        token_nll(base, tokens)                     # the base model, with only e⊥ at every site

At each site the other model's layer is run on the very input that the base layer has in this run, its error
is split along the base update there, and the chosen part is added. With "both" at every site the base model
turns into the other one exactly (where they share embeddings, norms outside blocks, and head). `match`
rescales the chosen part per token, so that e⊥ and e∥ can be compared at one norm.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from perpend.batching import batches
from perpend.compression.error import check_comparable
from perpend.compression.replay import Replay, capture, split_call, stand_ins
from perpend.errors import InputError, PerpendError, unknown_name
from perpend.models.head import Halves, halves
from perpend.models.limits import check_ids
from perpend.models.placement import input_device
from perpend.models.stream import blocks, chosen_layers, contributions
from perpend.progress import Progress, silent

if TYPE_CHECKING:
    import pandas as pd

COMPONENTS = ("both", "perpendicular", "parallel", "random")
MATCHES = ("own", "error", "parallel", "perpendicular")
Site = tuple[int, str]


def component(
    error: Tensor, update: Tensor, which: str, match: str = "own", generator: torch.Generator | None = None
) -> Tensor:
    """The part of an error [..., d] that surgery injects, along the base update [..., d].

    which: "both" (e), "perpendicular" (e⊥), "parallel" (e∥), "random" (a random direction, at ‖e‖ unless
    matched). match: the norm it is given per token, "own", or that of the whole "error", of the "parallel" or
    of the "perpendicular" part. A part that is zero stays zero.
    """
    if which not in COMPONENTS:
        raise unknown_name("component", which, COMPONENTS)
    if match not in MATCHES:
        raise unknown_name("match", match, MATCHES)
    energy = update.square().sum(-1, keepdim=True)
    along = (error * update).sum(-1, keepdim=True) / torch.where(energy > 0, energy, 1.0) * update
    across = error - along
    parts = {"both": error, "parallel": along, "perpendicular": across}
    if which == "random":
        noise = torch.randn(error.shape, generator=generator, dtype=torch.float32).to(error)
        part, match = noise, "error" if match == "own" else match
    else:
        part = parts[which]
    if match == "own":
        return part
    wanted = {"error": error, "parallel": along, "perpendicular": across}[match].norm(dim=-1, keepdim=True)
    size = part.norm(dim=-1, keepdim=True)
    return torch.where(size > 0, part * (wanted / torch.where(size > 0, size, 1.0)), part)


class _Stop(BaseException):
    """The other model's contribution is known; the rest of its block is of no use."""


@contextmanager
def injection(
    base: nn.Module,
    other: nn.Module,
    which: str = "both",
    *,
    match: str = "own",
    sites: Iterable[Site] | None = None,
    seed: int = 0,
) -> Iterator[None]:
    """While inside, `base` runs with a part of `other`'s error at the sites; see the module.

    sites: (layer, "attn" | "mlp" | "block"); None: attn and mlp of every layer. A layer takes block or its
    parts, not both. Leaving restores both models.
    """
    if which not in COMPONENTS:
        raise unknown_name("component", which, COMPONENTS)
    if match not in MATCHES:
        raise unknown_name("match", match, MATCHES)
    check_comparable(base, other)
    ours, theirs = blocks(base), blocks(other)
    chosen = _sites(sites, len(ours))
    layers = sorted({layer for layer, _ in chosen})
    generator = torch.Generator().manual_seed(seed)
    calls: dict[int, tuple[Any, Any]] = {}
    added: dict[int, Tensor] = {}
    # the embedding's dtype: a quantized model's first parameter may be integers
    place, dtype = input_device(other), other.get_input_embeddings().weight.dtype
    wanted: dict[str, Any] = {}

    def entered(layer: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            args = tuple(_no_cache(a) for a in args)
            calls[layer] = split_call(args, {name: _no_cache(value) for name, value in kwargs.items()})

        return hook

    def answer(seen: Any) -> Tensor | None:
        if seen.part == wanted["part"]:
            wanted["update"] = seen.update
            raise _Stop
        if seen.part == "attn" and wanted["part"] == "mlp":
            return added[seen.layer].to(seen.update.device, seen.update.dtype)
        return None

    def theirs_at(layer: int, part: str) -> Tensor:
        call, hidden = calls[layer]
        wanted.update(part=part, update=None)
        with suppress(_Stop):
            call.run(theirs[layer].module, hidden.to(place, dtype))
        return wanted["update"]

    def visit(seen: Any) -> Tensor | None:
        result = None
        if (seen.layer, seen.part) in chosen:
            goal = theirs_at(seen.layer, seen.part).to(seen.update.device)
            if which == "both" and match == "own":
                result = goal.to(seen.update.dtype)  # the update plus its error, without the sum's rounding
            else:
                wide = torch.promote_types(torch.promote_types(seen.update.dtype, goal.dtype), torch.float32)
                update = seen.update.to(wide)
                part = component(goal.to(wide) - update, update, which, match, generator)
                result = (update + part).to(seen.update.dtype)
        if seen.part == "attn":
            added[seen.layer] = seen.update if result is None else result
        return result

    with ExitStack() as stack:
        stack.callback(base.register_forward_pre_hook(_no_past, with_kwargs=True).remove)
        for layer in layers:
            handle = ours[layer].module.register_forward_pre_hook(entered(layer), with_kwargs=True)
            stack.callback(handle.remove)
        parts = ("attn", "mlp", "block") if any(p == "block" for _, p in chosen) else ("attn", "mlp")
        stack.enter_context(contributions(other, answer, parts, layers))
        stack.enter_context(contributions(base, visit, parts, layers))
        yield


def _no_cache(value: Any) -> Any:
    """The cache is the base model's: the other one must not write into it, and needs none."""
    return None if hasattr(value, "get_seq_length") else value


def _no_past(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if hasattr(value, "get_seq_length") and value.get_seq_length() > 0:
            raise PerpendError("surgery runs whole sequences, it cannot go on from a cache: use_cache=False")


def _sites(sites: Iterable[Site] | None, count: int) -> set[Site]:
    if sites is None:
        return {(layer, part) for layer in range(count) for part in ("attn", "mlp")}
    chosen = set()
    for layer, part in sites:
        if part not in ("attn", "mlp", "block"):
            raise unknown_name("part", part, ("attn", "mlp", "block"))
        if not -count <= layer < count:
            raise InputError(f"layer {layer} is outside the model's {count} layers")
        chosen.add((layer % count, part))
    both = [layer for layer, part in chosen if part == "block" and {(layer, "attn"), (layer, "mlp")} & chosen]
    if both:
        raise InputError(f"layer {min(both)}: inject at the block or at its parts, not at both")
    if not chosen:
        raise InputError("no site to inject at")
    return chosen


@torch.no_grad()
def sensitivity(
    base: nn.Module,
    other: nn.Module,
    tokens: Tensor,
    *,
    components: Sequence[tuple[str, str]] = (("both", "own"), ("perpendicular", "own"), ("parallel", "own")),
    parts: Sequence[str] = ("attn", "mlp"),
    layers: Sequence[int] | None = None,
    batch: int = 4,
    seed: int = 0,
    progress: Progress = silent,
) -> pd.DataFrame:
    """The sensitivity map: change of the base model's loss when one part of one layer errs, all else exact.

    components: pairs (component, match). Columns layer, part, component, match, change (nats a token), se
    (its standard error over sequences, paired). Each run starts at its own layer, from the base stream.
    """
    import pandas as pd

    check_ids(base, tokens)
    check_comparable(base, other)
    found = blocks(base)
    chosen = chosen_layers(layers, len(found))
    head = halves(base)
    changes: dict[tuple[int, str, str, str], list[Tensor]] = {}
    with progress(len(tokens) * len(chosen), "sequence-layers", "sensitivity") as advance:
        for some in batches(tokens, batch):
            replay = capture(base, some[:, :-1])
            x = replay.hidden
            plain = _tail(base, head, replay, some, 0, x)
            for layer in range(len(found)):
                following = replay.run(layer, x)
                for part in parts if layer in chosen else ():
                    for which, match in components:
                        with injection(base, other, which, match=match, sites=[(layer, part)], seed=seed):
                            here = replay.run(layer, x)
                        loss = _tail(base, head, replay, some, layer + 1, here)
                        changes.setdefault((layer, part, which, match), []).append((loss - plain).mean(1))
                if layer in chosen:
                    advance(len(some))
                x = following
    rows = []
    for (layer, part, which, match), values in changes.items():
        change = torch.cat(values)
        spread = float(change.std() / len(change) ** 0.5) if len(change) > 1 else None
        rows.append(
            {"layer": layer, "part": part, "component": which, "match": match,
             "change": float(change.mean()), "se": spread}
        )  # fmt: skip
    return pd.DataFrame(rows)


@torch.no_grad()
def layer_changes(
    base: nn.Module, other: nn.Module, tokens: Tensor, *, batch: int = 4, progress: Progress = silent
) -> pd.DataFrame:
    """Change of the base model's loss when one block is the other model's: columns layer, change, se."""
    table = sensitivity(
        base, other, tokens, components=[("both", "own")], parts=("block",), batch=batch, progress=progress
    )
    return table[["layer", "change", "se"]]


def _tail(
    model: nn.Module, head: Halves, replay: Replay, tokens: Tensor, layer: int, hidden: Tensor
) -> Tensor:
    """Losses [batch, T - 1] in nats when the blocks from `layer` on read `hidden`."""
    for later in range(layer, len(replay.blocks)):
        hidden = replay.run(later, hidden)
    tokens = tokens.to(hidden.device)
    with stand_ins(model, hidden):
        last = head.trunk(tokens[:, :-1])
    out = []
    for part, goal in zip(last.split(256, 1), tokens[:, 1:].split(256, 1)):
        logits = head.head(part).float()
        out.append(torch.logsumexp(logits, -1) - logits.gather(-1, goal[..., None])[..., 0])
    return torch.cat(out, 1).double().cpu()
