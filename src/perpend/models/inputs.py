"""Running a model on a batch: token ids or images, padded or not, with the positions that padding needs."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from perpend.models.placement import input_device


def model_inputs(model: nn.Module, tokens: Tensor, mask: Tensor | None = None) -> dict[str, Any]:
    """Keyword arguments of `model.forward` for `tokens` [B, T] (ids) or [B, 3, height, width] (images).

    With a `mask` [B, T] (True = real) positions count real tokens alone, so that a padded sequence is read as
    an unpadded one: GPT-2 and BERT, whose positions are embedded, need to be told. RoBERTa's kind counts its
    own pad tokens and is left alone.
    """
    device = input_device(model)
    accepted = inspect.signature(model.forward).parameters
    if torch.is_floating_point(tokens):
        dtype = next(model.parameters()).dtype
        return {_named("pixel_values", accepted): tokens.to(device, dtype)}
    inputs: dict[str, Any] = {_named("input_ids", accepted): tokens.to(device)}
    if "use_cache" in accepted:
        inputs["use_cache"] = False
    if mask is not None:
        inputs["attention_mask"] = mask.to(device).long()
        if "position_ids" in accepted and not _counts_its_padding(model):
            inputs["position_ids"] = (mask.to(device).long().cumsum(-1) - 1).clamp(min=0)
    return inputs


def _named(usual: str, accepted: Mapping[str, inspect.Parameter]) -> str:
    """What a forward calls its input: the usual name, or that of its first argument in a plain module."""
    if usual in accepted or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values()):
        return usual
    return next(iter(accepted), usual)


def trunk(model: nn.Module) -> nn.Module:
    """The model without its head, where transformers tells them apart; the stream is all there."""
    base = getattr(model, "base_model", model)
    return base if isinstance(base, nn.Module) else model


def run_trunk(model: nn.Module, tokens: Tensor, mask: Tensor | None = None) -> Any:
    """One pass of the stream over a batch, without the head's logits."""
    base = trunk(model)
    return base(**model_inputs(base, tokens, mask))


def _counts_its_padding(model: nn.Module) -> bool:
    return any(hasattr(module, "create_position_ids_from_input_ids") for module in model.modules())
