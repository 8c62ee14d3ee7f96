"""A causal language model in two halves: tokens -> last hidden states, hidden states -> logits.

Logits of a whole batch are the largest tensor of an evaluation (8 x 2048 tokens x 256k words in fp32 are 16
GB). With the two halves apart the second runs on a slice of the tokens at a time. The second half is the
model's own forward with its trunk answering from memory, so that soft-caps, logit scales and biases of any
family are in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.placement import input_device

PROBE = 8  # tokens on which the two halves are compared with the whole before they are trusted


@dataclass(frozen=True)
class Halves:
    """`trunk(tokens [B, T]) -> hidden [B, T, d]` and `head(hidden [B, t, d]) -> logits [B, t, V]`.

    `after(prefix [1, P], rows [n, T]) -> hidden [n, T, d]` reads the prefix once, caches it and continues it
    with every row; None where the model is not in halves. Each answers on the device of its argument,
    whatever devices the model is spread over.
    """

    trunk: Callable[[Tensor], Tensor]
    head: Callable[[Tensor], Tensor]
    chunked: bool  # False: the model cannot be taken apart, and `trunk` already returns logits
    after: Callable[[Tensor, Tensor], Tensor] | None = None


def logits_of(output: object) -> Tensor:
    """The logits in what a language model returned: a tensor, a tuple that starts with it, or `.logits`."""
    if isinstance(output, Tensor):
        return output
    logits = getattr(output, "logits", None)
    if logits is None and isinstance(output, tuple) and isinstance(output[0], Tensor):
        logits = output[0]
    if logits is None:
        raise InputError(
            f"the model returned {type(output).__name__} without logits: evaluation needs a language model "
            "(a ...ForCausalLM class, or a module whose forward returns logits [batch, tokens, vocabulary])"
        )
    return logits


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode (no dropout) inside; each model's own mode afterwards."""
    modes = [model.training for model in models]
    try:
        for model in models:
            model.eval()
        yield
    finally:
        for model, mode in zip(models, modes):
            model.train(mode)


def _whole(model: nn.Module) -> Halves:
    def run(tokens: Tensor) -> Tensor:
        return logits_of(_call(model, tokens)).to(tokens.device)

    return Halves(run, lambda logits: logits, chunked=False)


def _call(module: nn.Module, tokens: Tensor) -> object:
    """Run without a cache where the module knows the word: evaluation never reads the keys again."""
    if hasattr(module, "config"):
        return module(tokens, use_cache=False)
    return module(tokens)


def _probe(model: nn.Module) -> Tensor:
    """A few different tokens, [1, PROBE]."""
    vocabulary = int(getattr(getattr(model, "config", None), "vocab_size", None) or PROBE)
    return (torch.arange(PROBE, device=input_device(model)) % vocabulary)[None]


def _same(one: Tensor, other: Tensor) -> bool:
    """Equal up to the rounding of the model's dtype, on the scale of the logits themselves."""
    if one.shape != other.shape:
        return False
    scale = float(one.float().nan_to_num().std())
    close = (1e-3 if one.dtype in (torch.float32, torch.float64) else 3e-2) * scale
    return torch.allclose(one.float(), other.float(), rtol=0, atol=close, equal_nan=True)


@torch.no_grad()
def _refuse_foresight(model: nn.Module) -> None:
    probe = _probe(model)
    altered = probe.clone()
    altered[0, -1] = probe[0, 0]
    before, after = (logits_of(_call(model, tokens))[:, :-1] for tokens in (probe, altered))
    if not _same(before, after):
        raise InputError(
            f"{type(model).__name__} is not causal: changing a token changes the logits before it, so they "
            "are no predictions of the next token; evaluation needs a causal language model"
        )


def _built(model: nn.Module, trunk: nn.Module, kind: type) -> Halves:
    """The halves around a trunk whose output is of type `kind`: some heads read more than its states."""

    def run_trunk(tokens: Tensor) -> Tensor:
        return _call(trunk, tokens).last_hidden_state.to(tokens.device)

    def run_after(prefix: Tensor, rows: Tensor) -> Tensor:
        first = trunk(prefix, use_cache=True)
        # transformers has called it both ways
        name = "cache" if getattr(first, "cache", None) is not None else "past_key_values"
        kept = getattr(first, name)
        kept.batch_repeat_interleave(len(rows))
        return trunk(rows, use_cache=True, **{name: kept}).last_hidden_state.to(rows.device)

    def run_head(hidden: Tensor) -> Tensor:
        own = trunk.__dict__.get("forward")
        trunk.forward = lambda *args, **kwargs: kind(last_hidden_state=hidden)
        try:
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            return logits_of(_call(model, tokens)).to(hidden.device)
        finally:
            if own is None:
                del trunk.forward
            else:
                trunk.forward = own

    return Halves(run_trunk, run_head, chunked=True, after=run_after)


@torch.no_grad()
def _fits(model: nn.Module, trunk: nn.Module) -> type | None:
    """The type of the trunk's output where trunk and head give the whole model's logits, else None."""
    probe = _probe(model)
    whole = logits_of(_call(model, probe))
    try:
        output = _call(trunk, probe)
        logits = _built(model, trunk, type(output)).head(output.last_hidden_state.to(probe.device))
    except (AttributeError, TypeError, ValueError):  # other arguments, or another shape of output
        return None
    return type(output) if _same(logits, whole) else None


# how a model comes apart is found once: (name of the trunk, type of its output), or None for a whole one
_seen: weakref.WeakKeyDictionary[nn.Module, tuple[str, type] | None] = weakref.WeakKeyDictionary()
# most causal classes call `base_model`; OPT the decoder inside it, image-text models their text half
_TRUNKS = ("base_model", "base_model.decoder", "base_model.language_model")


def _trunk(model: nn.Module, path: str) -> nn.Module | None:
    found: object = model
    for name in path.split("."):
        found = getattr(found, name, None)
    return found if isinstance(found, nn.Module) and found is not model else None


def halves(model: nn.Module) -> Halves:
    """Take a causal language model apart; a model that cannot be stays whole (`chunked` False).

    The halves are compared with the whole model on a few tokens first, so a family whose forward does more
    than trunk and head (a second stream, a logit that reads the tokens) is never silently mis-scored. Raises
    InputError for a model whose logits depend on later tokens: they are no next-token predictions.
    """
    if model not in _seen:
        _refuse_foresight(model)
        _seen[model] = None
        for path in _TRUNKS if hasattr(model, "config") else ():
            trunk = _trunk(model, path)
            kind = _fits(model, trunk) if trunk is not None else None
            if kind is not None:
                _seen[model] = (path, kind)
                break
    known = _seen[model]
    trunk = _trunk(model, known[0]) if known else None
    return _whole(model) if known is None or trunk is None else _built(model, trunk, known[1])
