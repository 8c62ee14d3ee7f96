"""What a model can be given: token ids inside its vocabulary, sequences within its positions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from perpend.errors import InputError

if TYPE_CHECKING:
    import torch


def _text_config(model: Any) -> Any:
    """The config of the part that reads text; None for a model without one."""
    config = getattr(model, "config", None)
    return config.get_text_config() if config is not None and hasattr(config, "get_text_config") else config


def check_vocabulary(model: Any, tokenizer: Any, tokens: torch.Tensor) -> None:
    """Raise InputError where a tokenizer cannot be this model's."""
    rows = vocabulary(model)
    if rows is None:
        return
    highest = int(tokens.max())
    known = len(tokenizer)
    if highest >= rows:
        raise InputError(
            f"the tokenizer ({known} tokens) does not belong to this model (vocabulary {rows}): token id "
            f"{highest} is outside; load both from the same place"
        )
    if known < rows / 2:  # vocabularies are padded by a few percent at most
        raise InputError(
            f"the tokenizer knows {known} tokens and the model's vocabulary has {rows}: it is another "
            "model's; load both from the same place"
        )


def check_ids(model: Any, tokens: Any) -> None:
    """Raise InputError for what are no token ids [n, T] of this model; pixel values are let through."""
    if not hasattr(tokens, "dtype") or not hasattr(tokens, "is_floating_point"):
        raise InputError(f"tokens is a tensor of token ids [n, T], not {type(tokens).__name__}")
    if tokens.is_floating_point() and tokens.ndim == 4:
        return
    if tokens.ndim != 2 or not tokens.numel():
        raise InputError(f"tokens have shape {tuple(tokens.shape)}; give token ids [n, T]")
    kind = str(tokens.dtype).removeprefix("torch.")
    if kind not in ("int64", "int32"):
        raise InputError(f"token ids are int64 or int32, not {kind}; convert them, tokens.long()")
    rows, lowest, highest = vocabulary(model), int(tokens.min()), int(tokens.max())
    if lowest < 0 or (rows is not None and highest >= rows):
        raise InputError(
            f"token {lowest if lowest < 0 else highest} lies outside the model's vocabulary of {rows}: the "
            "tokens come from another tokenizer, or hold padding that a mask must leave out"
        )


def vocabulary(model: Any) -> int | None:
    """Rows of the model's token embedding; None for a model that takes no tokens."""
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        raise InputError("this is an image model: it reads a folder of images, not text")
    config = _text_config(model)
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError, TypeError):
        size = getattr(config, "vocab_size", None)
        return None if size is None else int(size)


def positions(model: Any) -> int | None:
    """The longest sequence the model was made for; None where it has no limit (ALiBi, relative positions)."""
    config = _text_config(model)
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        return None
    for name, module in getattr(model, "named_modules", lambda: ())():
        padding = getattr(module, "padding_idx", None)
        if name.endswith("position_embeddings") and padding is not None:
            return limit - padding - 1  # RoBERTa counts positions from after its padding index
    return limit


def check_positions(model: Any, length: int, name: str = "length") -> None:
    """Raise InputError for sequences longer than the model's positions; `name` is the parameter to change."""
    limit = positions(model)
    if limit is not None and length > limit:
        raise InputError(
            f"{name} {length} is beyond the {limit} positions of this model; set {name}={limit} or less"
        )
