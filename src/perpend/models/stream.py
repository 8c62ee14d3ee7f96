"""The residual stream: what attention, MLP and block add to it, seen or replaced as the model runs.

    with contributions(model, visit):
        model(tokens)            # visit(Contribution) is called for each layer and part, in order

Equations, x the block's input and y its output (families/__init__.py has the three forms of block):

    x + Delta_attn + Delta_mlp = y           sequential and parallel blocks; Delta_block = y - x
    reference z: attn and block x; mlp the stream just before its addition (x in parallel blocks)

Post-norm blocks keep the identity at each addition, before its norm; the reference of their MLP is the first
norm's output. Contribution, not module output: after a post-norm, a residual multiplier or a LayerScale, and
without an inner residual.

The identity is checked on the first forward pass after attaching, on every layer and token, with whatever
runs through the model; a model for which it fails is refused with the layer's name.
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from perpend.errors import InputError, PerpendError, unknown_name
from perpend.models.attention.patches import as_written, patched
from perpend.models.attention.sites import path_to
from perpend.models.families import Family, ScaleGroup
from perpend.models.layout import PARTS, Block, blocks, family, how_to_add, locate, parts_of, text_config

# ||x + sum of contributions - y|| of a token may be this many machine epsilons of the sum of all norms:
# adding three vectors rounds twice, by half an epsilon of the result each.
IDENTITY_TOLERANCE = 8.0

__all__ = [
    "IDENTITY_TOLERANCE",
    "PARTS",
    "Block",
    "Contribution",
    "Family",
    "ScaleGroup",
    "Visit",
    "blocks",
    "contributions",
    "family",
    "identity_error",
    "parts_of",
    "text_config",
]


@dataclass(frozen=True)
class Contribution:
    """What one part of one layer adds to the stream.

    `update` and `reference` are [batch, tokens, width]. Those of attn and mlp are the model's own tensors in
    its dtype; the update of a block is y - x, in float32 where the model is in half precision.
    """

    layer: int
    part: str
    update: Tensor
    reference: Tensor


Visit = Callable[[Contribution], "Tensor | None"]


@contextmanager
def contributions(
    model: nn.Module,
    visit: Visit,
    parts: Sequence[str] | None = None,
    layers: Sequence[int] | None = None,
    *,
    every: tuple[Block, ...] | None = None,
) -> Iterator[tuple[Block, ...]]:
    """See, or replace, what each part of each layer adds to the stream while the context lasts.

    `visit` gets a `Contribution`, attn before mlp before block in every layer. A tensor that it returns is
    added in place of the update: an edited attention changes the mid-stream that the MLP reads. When it
    returns None the model's own tensors go on untouched, so the pass is bit-identical to one without hooks.

    parts   which of "attn", "mlp", "block"; None: all that the model's family has
    layers  block indices, negative ones from the end; None: all
    every   what `blocks` has just said of the model, for a caller that has asked

    Yields the blocks watched. Raises InputError for unknown parts and layers, and PerpendError from inside
    the model's forward when x + sum of contributions is not y within IDENTITY_TOLERANCE, on the first pass.
    """
    every = blocks(model) if every is None else every
    chosen = _chosen_parts(model, every, parts)
    watched = _chosen_blocks(every, layers)
    if not watched:
        yield watched
        return
    turns: dict[nn.Module, list[Block]] = {}
    for block in every:
        turns.setdefault(block.module, []).append(block)
    wanted = {block.module for block in watched}
    handles: list[Any] = []
    state = _STATE.setdefault(model, _State({}, []))
    scope = _Scope(frozenset(block.index for block in watched), chosen)
    state.scopes.append(scope)
    try:
        for module, run in turns.items():
            if module in wanted:
                watch = _Watch(run, visit, scope, state, handles)
                watch.attach()
                if len(run) > 1:
                    owner, _, _ = locate(model, watched[0].family)
                    handles.append(owner.register_forward_pre_hook(watch.restart))
        passed = [(*path_to(model, block.name), *block.module.children()) for block in watched]
        with patched(as_written(chain.from_iterable(passed))):
            yield watched
    finally:
        for handle in handles:
            handle.remove()
        state.scopes.remove(scope)


@dataclass(frozen=True, eq=False)
class _Scope:
    """One `contributions` context: the layers and parts it watches."""

    layers: frozenset[int]
    parts: tuple[str, ...]

    @property
    def splits(self) -> bool:
        """Whether it sees attn or mlp: of a block alone there is no sum to check."""
        return self.parts != ("block",)


@dataclass
class _State:
    """What is known of one model: layers, with the dtypes in which their identity was seen to hold, and open
    contexts."""

    proved: dict[int, set[torch.dtype]]
    scopes: list[_Scope]
    replaced: set[int] = field(default_factory=set)  # layers whose output a context has changed in this pass

    def to_prove(self, scope: _Scope, layer: int, dtype: torch.dtype) -> bool:
        """Whether `scope` is the one to check this layer now.

        Of nested contexts the innermost, whose hooks run last: what an outer one sees may still be edited.
        """
        if layer not in scope.layers or not scope.splits or dtype in self.proved.get(layer, ()):
            return False
        inner = self.scopes[self.scopes.index(scope) + 1 :]
        return not any(other.splits and layer in other.layers for other in inner)


_STATE: WeakKeyDictionary[nn.Module, _State] = WeakKeyDictionary()  # as long as the model lives


class _Watch:
    """The hooks of one module. State lives from the block's entry to its exit, so memory stays flat.

    `run` is the blocks this module plays in one forward pass: itself, or several where a model repeats it.
    Handles of the hooks go to `handles`, whose owner removes them.
    """

    def __init__(
        self, run: Sequence[Block], visit: Visit, scope: _Scope, state: _State, handles: list[Any]
    ) -> None:
        self.run, self.visit, self.scope, self.state, self.handles = run, visit, scope, state, handles
        self.block, self.turn = run[0], 0
        self.parts: Sequence[str] = ()
        self.entry: Tensor | None = None
        self.mid: Tensor | None = None
        self.added: dict[str, Tensor] = {}
        self.proving = self.whole = False  # checking now; with the hooks of the check

    def attach(self) -> None:
        self._before(self.block.module, _Watch._enter)
        if self.scope.splits:
            self._see(self.scope.parts)
            layers = [block.index for block in self.run if block.index in self.scope.layers]
            if not all(layer in self.state.proved for layer in layers):
                self._see_sums()
        self._after(self.block.module, _Watch._leave)

    def _see(self, parts: Sequence[str]) -> None:
        record = self.block.family
        for part, path in (("attn", record.attn_update), ("mlp", record.mlp_update)):
            if part in parts:
                self._after(self._part(path), _Watch._add, part)
        if record.mid and "mlp" in parts:
            self._before(self._part(record.mid), _Watch._middle)

    def _see_sums(self) -> None:
        """Hooks on what only the check reads: left out, for they take time, where it was already made."""
        record, self.whole = self.block.family, True
        self._see([part for part in PARTS if part not in self.scope.parts])
        for part, path in zip(("attn", "mlp"), record.sums if record.form == "post_norm" else ()):
            self._before(self._part(path), _Watch._sum, part)

    def _before(self, module: nn.Module, method: Callable[..., Any], *given: str) -> None:
        hook = partial(method, self, *given)
        self.handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))

    def _after(self, module: nn.Module, method: Callable[..., Any], *given: str) -> None:
        self.handles.append(module.register_forward_hook(partial(method, self, *given)))

    def restart(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        self.turn = 0

    def _part(self, path: str) -> nn.Module:
        found = self.block.find(path)
        if found is None:
            raise PerpendError(
                f"{self.block.name} has no {path!r}: the adapter of family {self.block.family.name!r} "
                "does not fit this model (perpend/models/families)"
            )
        return found

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.block = self.run[self.turn % len(self.run)]
        self.turn += 1
        layer = self.block.index
        self.parts = self.scope.parts if layer in self.scope.layers else ()
        self.entry, self.mid, self.added = _first_tensor(args, kwargs), None, {}
        self.state.replaced.discard(layer)
        self.proving = self.state.to_prove(self.scope, layer, self.entry.dtype)
        if self.proving and not self.whole:
            self._see_sums()  # a dtype in which this layer has not run yet

    def _middle(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.mid = _first_tensor(args, kwargs).view(self.entry.shape)

    def _reference(self, part: str, like: Tensor) -> Tensor:
        reference = self.mid if part == "mlp" and self.mid is not None else self.entry
        return reference if reference.device == like.device else reference.to(like.device)

    def _add(self, part: str, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if part not in self.parts and not self.proving:
            return None
        multiplier = self.block.multiplier
        own, shape = _output_tensor(output), self.entry.shape
        update = own if own.shape == shape else own.view(shape)
        if multiplier != 1.0:
            update = update * multiplier
        edited = None
        if part in self.parts:
            edited = self.visit(Contribution(self.block.index, part, update, self._reference(part, update)))
        if self.proving:
            self.added[part] = (update if edited is None else edited.to(update.dtype)).detach()
        if edited is None:
            return None
        if multiplier == 0.0:
            raise PerpendError(f"{self.block.name}: its multiplier is 0, no edit of {part} can act")
        if multiplier != 1.0:
            edited = edited / multiplier
        if edited.dtype is not own.dtype or edited.shape != own.shape:
            edited = edited.to(own.dtype).reshape(own.shape)
        return _with_output(output, edited)

    def _sum(self, part: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.proving:
            total = _first_tensor(args, kwargs).view(self.entry.shape)
            self._prove(self._reference(part, total), [self.added[part]], total, part)

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        entry, own = self.entry, _output_tensor(output)
        if own.shape != entry.shape:
            raise InputError(
                f"{self.block.name} maps {tuple(entry.shape)} to {tuple(own.shape)}: a block that changes "
                "the shape of the stream has no update"
            )
        if self.proving and self.block.index not in self.state.replaced:
            record = self.block.family
            if record is not None and record.form != "post_norm":
                self._prove(entry, [self.added["attn"], self.added["mlp"]], own, "attn + mlp")
            self.state.proved.setdefault(self.block.index, set()).add(entry.dtype)
        self.entry, self.mid, self.added = None, None, {}
        if "block" not in self.parts:
            return None
        reference = entry.to(own.device)
        update = (
            own - reference
            if own.dtype in (torch.float32, torch.float64)
            else own.float() - reference.float()
        )
        edited = self.visit(Contribution(self.block.index, "block", update, reference))
        if edited is None:
            return None
        self.state.replaced.add(self.block.index)
        return _with_output(output, (reference.to(update.dtype) + edited).to(own.dtype))

    def _prove(self, start: Tensor, updates: list[Tensor], end: Tensor, which: str) -> None:
        error, bound = identity_error(start, updates, end)
        bad = (error > bound) & torch.isfinite(error)
        if bool(bad.any()):
            worst = float((error / bound)[bad].max()) * IDENTITY_TOLERANCE
            training = " It is in training mode: call model.eval(), for dropout is outside the sum." * int(
                self.block.module.training
            )
            raise PerpendError(
                f"{self.block.name}: stream + contribution of {which} is not what the block makes of it (off "
                f"by {worst:.3g} machine epsilons, {int(bad.sum())} of {bad.numel()} tokens).{training} The "
                f"adapter of family {self.block.family.name!r} does not fit this model; ask for "
                "parts=('block',)"
            )


def identity_error(start: Tensor, updates: Sequence[Tensor], end: Tensor) -> tuple[Tensor, Tensor]:
    """||start + sum of updates - end|| per token and the error allowed for it, both [batch, tokens].

    The bound is IDENTITY_TOLERANCE machine epsilons of the stream's dtype, times the sum of all norms.
    """
    wide = torch.float64 if start.device.type != "mps" else torch.float32
    total = start.to(wide)
    size = torch.linalg.vector_norm(total, dim=-1)
    for update in updates:
        update = update.to(start.device, wide)
        total = total + update
        size = size + torch.linalg.vector_norm(update, dim=-1)
    error = torch.linalg.vector_norm(total - end.to(start.device, wide), dim=-1)
    return error, IDENTITY_TOLERANCE * torch.finfo(start.dtype).eps * size + torch.finfo(torch.float32).tiny


def _chosen_parts(model: nn.Module, every: tuple[Block, ...], parts: Sequence[str] | None) -> tuple[str, ...]:
    available = PARTS if every[0].family is not None else ("block",)
    if parts is None:
        if available != PARTS:
            warnings.warn(f"block updates only: {how_to_add(model)}", stacklevel=4)
        return available
    parts = (parts,) if isinstance(parts, str) else tuple(parts)
    if not parts:
        raise InputError(f"no part is chosen; give some of {', '.join(PARTS)}")
    for part in parts:
        if part not in PARTS:
            raise unknown_name("part", part, PARTS)
        if part not in available:
            raise InputError(f"part {part!r} is not known here: {how_to_add(model)}")
    return parts


def _chosen_blocks(all_blocks: tuple[Block, ...], layers: Sequence[int] | None) -> tuple[Block, ...]:
    return tuple(all_blocks[i] for i in chosen_layers(layers, len(all_blocks)))


def chosen_layers(layers: Sequence[int] | None, count: int) -> list[int]:
    """Indices of `count` layers, ascending, without repeats; None: all, negative: from the last.

    Raises InputError for one that is not there, and for what is no list of whole numbers.
    """
    if layers is None:
        return list(range(count))
    try:
        wanted = [operator.index(layer) for layer in layers]
    except TypeError as problem:
        raise InputError(f"layers is a list of whole numbers such as [0, 3], not {layers!r}") from problem
    for layer in wanted:
        if not -count <= layer < count:
            raise InputError(f"layer {layer} does not exist: the model has {count} blocks, 0 to {count - 1}")
    return sorted({layer % count for layer in wanted})


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    for value in (*args, kwargs.get("hidden_states"), *kwargs.values()):
        if isinstance(value, Tensor):
            return value
    raise PerpendError("a block was called without a tensor: its input cannot be told")


def _output_tensor(output: Any) -> Tensor:
    return output[0] if isinstance(output, (tuple, list)) else output


def _with_output(output: Any, tensor: Tensor) -> Any:
    if isinstance(output, tuple):
        return (tensor, *output[1:])
    if isinstance(output, list):
        return [tensor, *output[1:]]
    return tensor
