"""Sequences as a model takes them, a batch at a time: left padding turned into right padding, nothing else
changed.

With causal attention and with position-fixed sinks alike, a row's support is counted from its sequence's
first real token. Moving the padding to the right puts that token at position 0, where an unpadded run has it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.attention import AttentionSite
from perpend.models.attention.sites import path_to
from perpend.models.inputs import trunk
from perpend.models.placement import input_device


@dataclass(frozen=True)
class Sequences:
    """Model inputs with a leading sequence axis, and each sequence's number of real tokens (None: all
    whole)."""

    inputs: dict[str, Tensor]
    lengths: Tensor | None
    count: int
    length: int

    def batch(self, start: int, stop: int) -> tuple[dict[str, Tensor], Tensor | None]:
        """Inputs and lengths of sequences start..stop-1."""
        part = {name: value[start:stop] for name, value in self.inputs.items()}
        if self.lengths is None:
            return part, None
        lengths = self.lengths[start:stop]
        if bool((lengths == self.length).all()):  # whole sequences need no mask, and run faster without
            part.pop("attention_mask", None)
            return part, None
        return part, lengths


def sequences(tokens: Tensor | Mapping[str, Tensor], attention_mask: Tensor | None = None) -> Sequences:
    """Token ids [n, T], pixel values [n, C, H, W], or a mapping of a model's inputs, all with n first.

    Raises InputError for inputs of different counts, for a mask of another shape, for an empty sequence, and
    for padding between real tokens.
    """
    inputs = dict(tokens) if isinstance(tokens, Mapping) else {_name(tokens): tokens}
    if attention_mask is not None:
        inputs["attention_mask"] = attention_mask
    counts = {name: len(value) for name, value in inputs.items()}
    if len(set(counts.values())) != 1 or not min(counts.values()):
        raise InputError(f"inputs must hold the same number of sequences, at least one; they hold {counts}")
    count = next(iter(counts.values()))
    ids = inputs.get("input_ids")
    length = ids.shape[1] if ids is not None else 0
    if ids is not None and not length:
        raise InputError("the sequences have no token; give ids [sequences, length]")
    mask = inputs.get("attention_mask")
    if mask is None or ids is None:
        return Sequences(inputs, None, count, length)
    if mask.shape != ids.shape:
        raise InputError(
            f"attention_mask {tuple(mask.shape)} must have the shape of the tokens {tuple(ids.shape)}"
        )
    real = mask.bool()
    lengths = real.sum(1)
    if not bool(lengths.all()):
        raise InputError(f"sequence {int((lengths == 0).nonzero()[0])} has no real token")
    start = real.int().argmax(1)  # the first real token
    gaps = (length - real.int().flip(1).argmax(1) - start) != lengths  # from the first real token to the last
    if bool(gaps.any()):
        raise InputError(
            f"the attention_mask of sequence {int(gaps.nonzero()[0])} has padding between real tokens; pad "
            "at one end, or at both"
        )
    index = (torch.arange(length, device=ids.device)[None] + start[:, None]) % length
    for name, value in inputs.items():
        if value.ndim >= 2 and value.shape[:2] == ids.shape:
            inputs[name] = value.gather(1, index.to(value.device))
    return Sequences(inputs, lengths, count, length)


def _name(tokens: Tensor) -> str:
    if not isinstance(tokens, Tensor):
        raise InputError(f"tokens is a tensor or a mapping of tensors, not {type(tokens).__name__}")
    if tokens.is_floating_point():
        return "pixel_values"
    if tokens.ndim != 2:
        raise InputError(f"tokens has shape {tuple(tokens.shape)}; give ids [sequences, length]")
    return "input_ids"


def runner(model: nn.Module, names: set[str], sites: Iterable[AttentionSite]) -> Callable[..., Any]:
    """The part of a model that runs these of its layers and no language-model head, as a function of inputs.

    An encoder-decoder without decoder inputs runs its encoder. No cache is kept.
    """
    base = trunk(model)
    config = getattr(model, "config", None)
    if getattr(config, "is_encoder_decoder", False) and not names & {
        "decoder_input_ids",
        "decoder_inputs_embeds",
    }:
        base = model.get_encoder()
    elif any(base not in path_to(model, site.name) for site in sites):
        base = model
    if config is None:
        return lambda inputs: base(next(iter(inputs.values())))
    caches = hasattr(config, "use_cache") or "use_cache" in inspect.signature(base.forward).parameters
    extra = {"use_cache": False} if caches else {}
    device = input_device(model)
    dtype = next(model.parameters()).dtype

    def run(inputs: dict[str, Tensor]) -> Any:
        ready = {n: v.to(device, dtype) if v.is_floating_point() else v.to(device) for n, v in inputs.items()}
        return base(**ready, **extra)

    return run
