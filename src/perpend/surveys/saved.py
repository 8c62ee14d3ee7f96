"""A survey of attention probabilities that already exist, in whichever form another tool left them.

    survey_saved("attention.npy")                    # [layers, heads, query, key], or with a batch axis
    survey_saved(model(ids, output_attentions=True)) # a transformers output
    survey_saved(cache)                              # a TransformerLens cache, or any mapping with its names

Forms are only unpacked here; `perpend.surveys.probabilities` checks rows, replaces zeros and counts them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from perpend.errors import InputError
from perpend.surveys.attention_result import AttentionSurvey
from perpend.surveys.probabilities import signatures_from_probabilities

ENDINGS = (".npy", ".npz", ".pt", ".pth", ".safetensors")
_TRANSFORMER_LENS = "hook_pattern"


def survey_saved(source: Any, **options: Any) -> AttentionSurvey:
    """A survey of `source`, one of the forms of `attentions_of`.

    options: those of `signatures_from_probabilities`: window, sink, queries, epsilon, block, sample. Raises
    InputError for a form, a file or rows it cannot take.
    """
    return signatures_from_probabilities(attentions_of(source), **options)


def attentions_of(source: Any) -> Any:
    """The probabilities in `source`, as `signatures_from_probabilities` takes them.

    A path to .npy, .npz, .pt or .safetensors (nothing in it is run); an object with `attentions`, such as a
    transformers output; a TransformerLens cache or a mapping with its names; a mapping of one array, or of
    one a layer with names that end in the layer's number; arrays and tensors as they are.
    """
    if isinstance(source, (str, os.PathLike)):
        return attentions_of(_read(Path(source)))
    if hasattr(source, "attentions"):
        return _without_gaps(source.attentions or ())
    if not isinstance(source, Mapping) and hasattr(source, "keys") and hasattr(source, "__getitem__"):
        source = {name: source[name] for name in source.keys()}  # noqa: SIM118
    if not isinstance(source, Mapping):
        return source
    if any(_TRANSFORMER_LENS in str(name) for name in source):
        return source
    if not source:
        raise InputError("the mapping of attention probabilities is empty")
    if len(source) == 1:
        return attentions_of(next(iter(source.values())))
    numbers = {name: re.search(r"(\d+)$", str(name)) for name in source}
    unclear = [str(name) for name, found in numbers.items() if found is None]
    if unclear:
        raise InputError(
            f"{', '.join(unclear[:3])} is no layer: give one array, or one a layer with names that end in "
            "its number, or TransformerLens' blocks.{layer}.attn.hook_pattern"
        )
    return [source[name] for name in sorted(source, key=lambda name: int(numbers[name][1]))]  # type: ignore[index]


def _without_gaps(attentions: Any) -> Any:
    if isinstance(attentions, (tuple, list)) and attentions:
        if isinstance(attentions[0], (tuple, list)):
            raise InputError(
                "these attentions are of one generated token each; run the model once on the whole text and "
                "give that output"
            )
        missing = [i for i, layer in enumerate(attentions) if layer is None]
        if missing:
            raise InputError(
                f"layer {missing[0]} has no attention probabilities: load the model with "
                "attn_implementation='eager', or give survey_attention the model itself"
            )
    return attentions


def _read(path: Path) -> Any:
    ending = path.suffix.lower()
    if ending not in ENDINGS:
        raise InputError(f"{path}: attention probabilities are read from {', '.join(ENDINGS)}")
    if not path.is_file():
        raise InputError(f"no file at {path}")
    from pickle import UnpicklingError
    from zipfile import BadZipFile

    from safetensors import SafetensorError

    failures = (OSError, ValueError, EOFError, RuntimeError, UnpicklingError, BadZipFile, SafetensorError)
    try:
        if ending in (".npy", ".npz"):
            import numpy as np

            held = np.load(path, allow_pickle=False)
            return dict(held) if ending == ".npz" else held
        if ending == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        import torch

        return torch.load(path, map_location="cpu", weights_only=True)
    except failures as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise InputError(
            f"{path} cannot be read as plain arrays or tensors ({said[0]}); save them again, as tensors and "
            "not as objects"
        ) from error
