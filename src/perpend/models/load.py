"""Pretrained models, ready to be read: weights checked, evaluation mode, and no pickle ever opened.

model, tokenizer = load()                                  # the default, from a package registry
model, tokenizer = load("pythia-160m", revision="step1000")
model, tokenizer = load("some/folder");  load("model.gguf");  load("owner/name", device="cuda:1")
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch

from perpend import distributed
from perpend.errors import InputError, unknown_name
from perpend.models._failures import explained
from perpend.models._gguf import mend_digits, plain, read_once
from perpend.models._source import TOKENIZER_FILES, Source, hub_reachable, resolve
from perpend.models.placement import Scratch
from perpend.models.placement import max_memory as bytes_of
from perpend.models.weights import check_finite, weights_hash

__all__ = ["load", "weights_hash"]

DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
# weights that a checkpoint may lack: nothing that perpend reads passes through them
HARMLESS = re.compile(r"(^|\.)pooler\.|(^|\.)mask_token$|(^|\.)position_ids$")
_HEAD = re.compile(r"^(cls\.predictions|lm_head|vocab_projector|vocab_transform)\.")


def load(
    name: str | os.PathLike[str] | None = None,
    *,
    revision: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attn_implementation: str | None = None,
    trust_remote_code: bool = False,
    max_memory: str | Mapping[int | str, int | str] | None = None,
) -> tuple[Any, Any]:
    """A model in evaluation mode and its tokenizer (an image model's image processor; None if it has none).

    `name`: a short name (`perpend models` lists them; `short@revision` too), a hub name, a local folder, a
    .gguf file; None is SmolLM2-135M-Instruct, which needs a package registry once and no model hub.
    `dtype`: float32 on a CPU and the checkpoint's own on an accelerator unless given ("auto": its own).
    `device`: the accelerator if there is one; "auto" spreads a large model with accelerate over all devices,
    then memory, then the disk. `max_memory` limits what "auto" may use of each, as "0=20GiB,cpu=64GiB".
    `attn_implementation`: None leaves the model its own. `trust_remote_code` runs Python from the model's
    repository: only for repositories you trust.

    Raises InputError or PerpendError, with what to do, for anything that cannot be loaded whole: weights that
    are missing, NaN or infinite included.
    """
    place = _device(device)
    if max_memory is not None and place != "auto":
        raise InputError("max_memory limits what device=auto may use; ask for that as well")
    kind, limits = _dtype(dtype, place), bytes_of(max_memory)
    source = resolve(name, revision, _convert)
    scratch = Scratch() if place == "auto" else None
    spread = {"device_map": "auto", "max_memory": limits, "offload_folder": scratch.folder} if scratch else {}
    with _quiet(source), explained(source):
        model = _read(source, kind, spread, attn_implementation, trust_remote_code)
        tokenizer = _tokenizer(source, model, trust_remote_code)
        if scratch is None:
            model = model.to(place)
        else:
            scratch.keep_with(model)
            model.perpend_max_memory = limits
    check_finite(model)
    if model.dtype == torch.float64:
        _experts_one_by_one(model)
    model.eval()
    model.perpend_source = source
    if source.kind == "folder":
        from perpend.training.export import apply_if_variant

        apply_if_variant(model, source.place)
    return model, tokenizer


def _experts_one_by_one(model: Any) -> None:
    """A mixture's experts by their loop over plain products: the grouped kernel has no float64."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) not in (None, "eager"):
            config._experts_implementation = "eager"


def check_place(name: str | os.PathLike[str] | None) -> None:
    """InputError for what `load` would refuse without reading a weight: no such folder or name, no config,
    files cut short. A study of several models asks it of each before it measures the first.
    """
    resolve(name, None, _convert)


def _device(device: str | torch.device | None) -> str | torch.device:
    """A device that is there, or "auto" as it is."""
    if device is None:
        device = distributed.local_device() or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "auto":
        return "auto"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"unknown device {device!r}: cpu, cuda, cuda:N, mps or auto") from error
    if place.type == "cuda" and (place.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no device {device}: torch sees {torch.cuda.device_count()} CUDA devices here"
        )
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise InputError("torch sees no Apple GPU (mps) here; use device=cpu")
    return place


def _dtype(dtype: str | torch.dtype | None, place: str | torch.device) -> str | torch.dtype:
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype is None:
        on_cpu = not torch.cuda.is_available() if place == "auto" else torch.device(place).type == "cpu"
        return torch.float32 if on_cpu else "auto"
    if dtype == "auto":
        return "auto"
    found = DTYPES.get(str(dtype).lower().removeprefix("torch."))
    if found is None:
        raise unknown_name("dtype", dtype, ["auto", *DTYPES])
    return found


def _hub_options(source: Source, trust: bool) -> dict[str, Any]:
    options: dict[str, Any] = {"trust_remote_code": trust}
    if source.kind == "hub":
        options["revision"] = source.revision or "main"
        options["local_files_only"] = not hub_reachable()
    else:
        options["local_files_only"] = True
    if source.file:
        options["gguf_file"] = source.file
    return options


def _read(source: Source, dtype: Any, spread: Mapping[str, Any], attention: str | None, trust: bool) -> Any:
    """The model from the class its config names, else from the first class that all its weights fill."""
    from transformers import AutoConfig

    options = _hub_options(source, trust)
    config = AutoConfig.from_pretrained(source.place, **options)
    options |= {"dtype": dtype, "output_loading_info": True, "config": config, **spread}
    if source.kind != "gguf":
        options["use_safetensors"] = True
    if attention is not None:
        options["attn_implementation"] = attention

    named = _named_class(config, trust)
    lacking: list[str] = []
    for position, cls in enumerate([named] if named else _likely_classes(config, source)):
        model, info = cls.from_pretrained(source.place, **options)
        missing = _missing(info)
        if not missing and named and any(_HEAD.match(k) for k in info["unexpected_keys"]):
            model = _with_head(model, config, source, options)
        if not missing:
            return plain(model) if source.kind == "gguf" else model
        if position == 0:
            lacking = missing
    raise InputError(
        f"{source.label} lacks {len(lacking)} weights that {type(model).__name__} needs, first "
        f"{', '.join(lacking[:4])}: they would be random. The checkpoint is incomplete, or its config.json "
        'names the wrong class under "architectures"'
    )


def _missing(info: dict[str, Any]) -> list[str]:
    return sorted(k for k in info["missing_keys"] if not HARMLESS.search(k))


def _named_class(config: Any, trust: bool) -> Any:
    """The class under "architectures" in the config; with trusted code, the automatic class that it maps."""
    import transformers

    remote = getattr(config, "auto_map", None) or {}
    if trust and remote:
        for auto in ("AutoModelForCausalLM", "AutoModelForMaskedLM", *sorted(remote)):
            if auto in remote and auto.startswith("AutoModel"):
                return getattr(transformers, auto)
    for name in getattr(config, "architectures", None) or ():
        cls = getattr(transformers, name, None)
        if isinstance(cls, type) and hasattr(cls, "from_pretrained"):
            return cls
    return None


def _likely_classes(config: Any, source: Source) -> list[Any]:
    """Classes for a config without "architectures", those with a head first; masked before causal, because an
    encoder's weights fill its causal class as well."""
    import transformers as t

    autos = [
        t.AutoModelForImageClassification,
        t.AutoModelForMaskedLM,
        t.AutoModelForCausalLM,
        t.AutoModelForImageTextToText,
        t.AutoModelForSeq2SeqLM,
        t.AutoModel,
    ]
    if source.kind == "gguf":
        autos = [t.AutoModelForCausalLM, t.AutoModelForSeq2SeqLM, t.AutoModel]
    classes = [auto for auto in autos if type(config) in (auto._model_mapping or ())]
    if not classes:
        raise InputError(f"{source.label}: transformers has no model class for {type(config).__name__}")
    return classes


def _with_head(model: Any, config: Any, source: Source, options: dict[str, Any]) -> Any:
    """The class with the head whose weights the file holds, where a bare model was named."""
    for cls in _likely_classes(config, source):
        whole, info = cls.from_pretrained(source.place, **options)
        if not _missing(info) and not any(_HEAD.match(k) for k in info["unexpected_keys"]):
            return whole
    return model


def _convert(gguf: Path, target: Path) -> None:
    """A GGUF file as a folder of fp32 safetensors with its tokenizer."""
    source = Source(gguf.name, "gguf", str(gguf.parent), file=gguf.name)
    with _quiet(source):
        with explained(source):
            model = _read(source, torch.float32, {}, None, False)
            tokenizer = _tokenizer(source, model, False)
        check_finite(model)
        model.save_pretrained(target)  # a full disk here is the cache's to explain
        tokenizer.save_pretrained(target)


def _tokenizer(source: Source, model: Any, trust: bool) -> Any:
    """The tokenizer, the image processor of an image model, or None where the model has none."""
    import transformers

    options = _hub_options(source, trust)
    if getattr(model, "main_input_name", "input_ids") == "pixel_values":
        if not _has_file(source, ("preprocessor_config.json",), options):
            return None
        try:
            return transformers.AutoImageProcessor.from_pretrained(source.place, **options)
        except ImportError:
            warnings.warn(
                f"{source.label}: its image processor needs pillow (pip install 'perpend[vision]'); the "
                "model is loaded without it and takes pixel tensors only",
                stacklevel=3,
            )
            return None
    if source.kind != "gguf" and not _has_file(source, TOKENIZER_FILES, options):
        return None
    tokenizer = transformers.AutoTokenizer.from_pretrained(source.place, **options)
    if source.kind == "gguf":
        mend_digits(tokenizer, Path(source.place) / str(source.file))
    return tokenizer


def _has_file(source: Source, names: tuple[str, ...], options: dict[str, Any]) -> bool:
    if source.kind != "hub":
        return any((Path(source.place) / name).is_file() for name in names)
    from transformers.utils import cached_file

    where = {key: options[key] for key in ("revision", "local_files_only")}
    return any(
        cached_file(source.place, name, _raise_exceptions_for_missing_entries=False, **where) is not None
        for name in names
    )


@contextmanager
def without_bars() -> Iterator[None]:
    """transformers draws progress bars on stderr wherever it is; perpend shows its own."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def _quiet(source: Source) -> Iterator[None]:
    """No progress bars and load reports while reading: what matters in them is checked and raised here."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with without_bars(), read_once() if source.kind == "gguf" else nullcontext():
            yield
    finally:
        logging.set_verbosity(level)
