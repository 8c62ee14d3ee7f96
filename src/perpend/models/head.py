"""A causal language model in two halves: tokens -> last hidden states, hidden states -> logits.

Logits of a whole batch are the largest tensor of an evaluation (8 x 2048 tokens x 256k words in fp32 are 16
GB). With the two halves apart the second runs on a slice of the tokens at a time. The second half is the
model's own forward with its trunk answering from memory, so that soft-caps, logit scales and biases of any
family are in it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perpend.errors import InputError

PROBE = 8  # tokens on which the two halves are compared with the whole before they are trusted


@dataclass(frozen=True)
class Halves:
    """`trunk(tokens [B, T]) -> hidden [B, T, d]` and `head(hidden [B, t, d]) -> logits [B, t, V]`.

    `after(prefix [1, P], rows [n, T]) -> hidden [n, T, d]` reads the prefix once, caches it and continues it
    with every row; None where the model is not in halves.
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


def _whole(model: nn.Module) -> Halves:
    return Halves(lambda tokens: logits_of(_call(model, tokens)), lambda logits: logits, chunked=False)


def _call(module: nn.Module, tokens: Tensor) -> object:
    """Run without a cache where the module knows the word: evaluation never reads the keys again."""
    if hasattr(module, "config"):
        return module(tokens, use_cache=False)
    return module(tokens)


def _apart(model: nn.Module, trunk: nn.Module) -> Halves | None:
    """The halves around one candidate trunk, or None where model and trunk do not fit together this way."""
    # the type of the trunk's own output: some heads read more fields of it than the hidden states
    kind: list[type] = []

    def run_trunk(tokens: Tensor) -> Tensor:
        return _call(trunk, tokens).last_hidden_state

    def run_after(prefix: Tensor, rows: Tensor) -> Tensor:
        first = trunk(prefix, use_cache=True)
        # transformers has called it both ways
        name = "cache" if getattr(first, "cache", None) is not None else "past_key_values"
        kept = getattr(first, name)
        kept.batch_repeat_interleave(len(rows))
        return trunk(rows, use_cache=True, **{name: kept}).last_hidden_state

    def run_head(hidden: Tensor) -> Tensor:
        own = trunk.__dict__.get("forward")
        trunk.forward = lambda *args, **kwargs: kind[0](last_hidden_state=hidden)
        try:
            tokens = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
            return logits_of(_call(model, tokens))
        finally:
            if own is None:
                del trunk.forward
            else:
                trunk.forward = own

    vocabulary = int(getattr(model.config, "vocab_size", PROBE) or PROBE)
    device = next(model.parameters()).device
    probe = (torch.arange(PROBE, device=device) % vocabulary)[None]
    with torch.no_grad():
        whole = logits_of(_call(model, probe))
        try:
            output = _call(trunk, probe)
            kind.append(type(output))
            logits = run_head(output.last_hidden_state)
        except (AttributeError, TypeError, ValueError):  # other arguments, or another shape of output
            return None
    if logits.shape != whole.shape or not torch.allclose(logits.float(), whole.float(), rtol=1e-3, atol=1e-3):
        return None
    return Halves(run_trunk, run_head, chunked=True, after=run_after)


def halves(model: nn.Module) -> Halves:
    """Take a causal language model apart; a model that cannot be stays whole (`chunked` False).

    The halves are compared with the whole model on a few tokens first, so a family whose forward does more
    than trunk and head (a second stream, a logit that reads the tokens) is never silently mis-scored.
    """
    if not hasattr(model, "config") or not hasattr(model, "base_model"):
        return _whole(model)
    base = model.base_model
    # most causal classes call `base_model`; OPT the decoder inside it, image-text models their text half
    for trunk in (base, getattr(base, "decoder", None), getattr(base, "language_model", None)):
        if isinstance(trunk, nn.Module) and trunk is not model:
            found = _apart(model, trunk)
            if found is not None:
                return found
    return _whole(model)
