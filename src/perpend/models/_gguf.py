"""What transformers leaves to do for a model in a GGUF file: its digits, its marks, and the time it takes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from perpend.progress import progress

# pre-tokenizers that cut single digits before GPT-2's pattern
DIGITS_FIRST = ("smollm", "starcoder")


def plain(model: Any) -> Any:
    """The model as one of ordinary tensors, which it is once read: without these marks it saves as such."""
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.hf_quantizer = None
    for mark in ("is_quantized", "_is_quantized"):
        if getattr(model, mark, False):
            setattr(model, mark, False)
    return model


def mend_digits(tokenizer: Any, path: Path) -> None:
    """Cut single digits first where the file's pre-tokenizer does.

    transformers rebuilds these tokenizers with GPT-2's pattern alone, which joins the spaces before a number
    in another way.
    """
    import gguf
    from tokenizers import pre_tokenizers as pre

    field = gguf.GGUFReader(str(path)).fields.get("tokenizer.ggml.pre")
    if field is not None and bytes(field.parts[field.data[0]]).decode() in DIGITS_FIRST:
        tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
            [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False, use_regex=True)]
        )


@contextmanager
def read_once() -> Iterator[None]:
    """Inside, a GGUF file's header is parsed once, not once each for config, weights, tokenizer and digits,
    and transformers' bar over its tensors, which floods a log, gives way to perpend's progress.

    The header holds the vocabulary, and gguf parses it in Python: seconds each time.
    """
    import gguf as module
    import transformers.modeling_gguf_pytorch_utils as utils

    gguf: Any = module
    bar = utils.tqdm
    reader, names = gguf.GGUFReader, gguf.get_tensor_name_map
    gguf.GGUFReader = functools.lru_cache(maxsize=1)(reader)
    gguf.get_tensor_name_map = functools.lru_cache(maxsize=4)(names)
    utils.tqdm = _tensors
    try:
        yield
    finally:
        utils.tqdm = bar
        gguf.GGUFReader, gguf.get_tensor_name_map = reader, names


def _tensors(tensors: Any, **told: Any) -> Iterator[Any]:
    """The tensors of a file, with progress."""
    with progress(total=len(tensors), unit="tensors", description="reading GGUF") as advance:
        for tensor in tensors:
            yield tensor
            advance()
