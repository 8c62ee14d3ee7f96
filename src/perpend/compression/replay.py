"""Run a model block by block: what goes into the first block, and how each block is called.

    replay = capture(model, tokens)              # one light pass; no activation is kept but the first stream
    hidden = replay.hidden
    for layer in range(len(replay.blocks)):
        hidden = replay.run(layer, hidden)       # the same numbers as inside the model

Every block is called with the arguments the model gave it (rotary tables, its own layer's mask), so layers
that differ in window or rotary base are right. That nothing acts on the stream between blocks is checked on
the first batch, in the real model.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from perpend.errors import PerpendError
from perpend.models.placement import input_device
from perpend.models.stream import Block, blocks


class _Enough(BaseException):
    """The last block has been called: the rest of the forward pass is of no use."""


@dataclass(frozen=True)
class Call:
    """The arguments of a block besides the stream, and whether the stream came as a keyword."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    keyword: str | None

    def run(self, module: nn.Module, hidden: Tensor) -> Tensor:
        """The stream that the module makes of `hidden` under these arguments."""
        if self.keyword is None:
            out = module(hidden, *self.args, **self.kwargs)
        else:
            out = module(*self.args, **{self.keyword: hidden}, **self.kwargs)
        return out if isinstance(out, Tensor) else out[0]


@dataclass(frozen=True)
class Replay:
    """One batch. hidden: [batch, T, d] as it enters the first block; calls: one per block."""

    blocks: tuple[Block, ...]
    hidden: Tensor
    calls: tuple[Call, ...] = field(repr=False)

    def run(self, layer: int, hidden: Tensor) -> Tensor:
        """The stream after a block; hooks on the block and in it act as in the model."""
        return self.calls[layer].run(self.blocks[layer].module, hidden)


@torch.no_grad()
def capture(model: nn.Module, tokens: Tensor) -> Replay:
    """Everything needed to run the blocks on tokens [batch, T] or images [batch, 3, h, w] outside the model.

    The blocks themselves are passed over, so it costs little more than the embedding.
    """
    found = blocks(model)
    check_replay(model, found, tokens)
    calls: list[Call] = []
    first: list[Tensor] = []

    def stand_in(block: Block, template: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            call, hidden = split_call(args, kwargs)
            calls.append(call)
            if not first:
                first.append(hidden)
            if len(calls) == len(found):
                raise _Enough
            return hidden if template is None else (hidden, *template)

        return forward

    template = _TUPLES[type(found[0].module)]
    with ExitStack() as stack:
        for block in found:
            stack.enter_context(_forward(block.module, stand_in(block, template)))
        _call(model, tokens)
    return Replay(found, first[0], tuple(calls))


@contextmanager
def stand_ins(model: nn.Module, hidden: Tensor) -> Iterator[None]:
    """While inside, the blocks together make `hidden` of anything: only embedding and head are real."""
    found = blocks(model)
    check_replay(model, found)
    template = _TUPLES[type(found[0].module)]

    def forward(*args: Any, **kwargs: Any) -> Any:
        return hidden if template is None else (hidden, *template)

    with ExitStack() as stack:
        for block in found:
            stack.enter_context(_forward(block.module, forward))
        yield


# What a block class returns beside the stream; None: the stream alone. Learned by check_replay.
_TUPLES: dict[type, tuple[Any, ...] | None] = {}
_CHECKED: set[tuple[type, int]] = set()


@torch.no_grad()
def check_replay(
    model: nn.Module, found: Sequence[Block] | None = None, inputs: Tensor | None = None
) -> None:
    """PerpendError, naming the layer, if the stream changes between two blocks or blocks are called twice.

    Runs the real model once on a few tokens (an image model: on the first of `inputs`); a model class that
    passed is not run again.
    """
    found = found or blocks(model)
    kind = (type(model), len(found))
    if kind in _CHECKED:
        return
    if len({id(b.module) for b in found}) < len(found):
        raise PerpendError(
            f"{found[0].name}: layers share one block's weights; they cannot be compressed one by one"
        )
    entered: list[Tensor] = []
    left: list[Any] = []

    def enter(module: nn.Module, args: tuple, kwargs: dict) -> None:
        entered.append(split_call(args, kwargs)[1])

    def leave(module: nn.Module, args: tuple, output: Any) -> None:
        left.append(output)
        if len(left) == len(found):
            raise _Enough

    with ExitStack() as stack:
        for block in found:
            stack.callback(block.module.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(block.module.register_forward_hook(leave).remove)
        images = inputs is not None and torch.is_floating_point(inputs)
        _call(model, inputs[:1] if images else torch.arange(3, 19)[None] % _vocabulary(model))
    for block, here, out in zip(found[1:], entered[1:], left):
        stream = out if isinstance(out, Tensor) else out[0]
        if here.shape != stream.shape or not torch.equal(here, stream):
            raise PerpendError(
                f"{block.name}: its input is not the output of the block before it, so the model cannot be "
                "run block by block"
            )
    _TUPLES[type(found[0].module)] = None if isinstance(left[0], Tensor) else tuple(left[0][1:])
    _CHECKED.add(kind)


def _vocabulary(model: nn.Module) -> int:
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    return int(config.vocab_size)


def _call(model: nn.Module, tokens: Tensor) -> None:
    first = next(model.parameters())
    tokens = tokens.to(input_device(model))
    try:
        if torch.is_floating_point(tokens):
            model(pixel_values=tokens.to(first.dtype))
        elif getattr(model.config, "is_encoder_decoder", False) or hasattr(model, "pooler"):
            model(input_ids=tokens)
        else:
            model(input_ids=tokens, use_cache=False)
    except _Enough:
        return
    raise PerpendError(f"{type(model).__name__} did not call each of its blocks once")


def split_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, Tensor]:
    """The stream, which is a block's first tensor, and all other arguments."""
    if args:
        return Call(args[1:], dict(kwargs), None), args[0]
    rest = dict(kwargs)
    name = (
        "hidden_states"
        if "hidden_states" in rest
        else next(k for k, v in rest.items() if isinstance(v, Tensor))
    )
    hidden = rest.pop(name)
    return Call((), rest, name), hidden


class _forward:
    """While inside, a module's forward is another function and its hooks rest."""

    def __init__(self, module: nn.Module, function: Any) -> None:
        self.module, self.function = module, function

    def __enter__(self) -> None:
        self.before = self.module.__dict__.get("forward")
        self.hooks = (self.module._forward_pre_hooks, self.module._forward_hooks)
        self.module._forward_pre_hooks, self.module._forward_hooks = OrderedDict(), OrderedDict()
        self.module.forward = self.function

    def __exit__(self, *unused: Any) -> None:
        self.module._forward_pre_hooks, self.module._forward_hooks = self.hooks
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.forward = self.before
