"""A smaller model made of a model's blocks, in a form that plain transformers saves and loads.

    smaller, notes = without(model, [(7, "block"), (3, "attn")])
    smaller.save_pretrained(folder)

A dropped block leaves the list of blocks, and the config with it (number of layers, per-layer lists, lists of
layer numbers). A dropped attention or MLP has no word in the config: the projections that write it are set
to zero, the module stays and costs what it cost, and the notes say so.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name
from perpend.models.layout import PARTS, blocks, family, locate, text_config
from perpend.models.placement import input_device, stored
from perpend.models.stream import Contribution, contributions

Drop = tuple[int, str]

# config entries that count layers from the front, and lists that name layers by number
COUNTS = ("first_k_dense_replace", "max_window_layers", "num_dense_layers")
NUMBERS = ("mlp_only_layers", "full_attn_idxs", "moe_layers")


@contextmanager
def dropped(model: nn.Module, drops: Iterable[Drop]) -> Iterator[None]:
    """The model without these contributions while the context lasts: (layer, "attn" | "mlp" | "block").

    The stream passes a dropped part unchanged. It is still computed, so this measures what dropping does to
    the output, not what it saves.
    """
    drops = _checked(model, drops)
    by_part = {part: {layer for layer, p in drops if p == part} for part in PARTS}
    parts = [part for part in PARTS if by_part[part]]
    if not parts:
        yield
        return

    def visit(c: Contribution) -> Tensor | None:
        return torch.zeros_like(c.update) if c.layer in by_part[c.part] else None

    layers = sorted({layer for layer, _ in drops})
    with contributions(model, visit, parts=parts, layers=layers):
        yield


def without(model: nn.Module, drops: Iterable[Drop]) -> tuple[nn.Module, list[str]]:
    """A new model without these parts, and what there is to know about it. `model` is left as it is.

    Before it is returned its output is compared with that of `dropped` on a few tokens. Raises InputError
    where the config cannot say what is left, or where the outputs differ (a family whose blocks depend on
    their number).
    """
    drops = _checked(model, drops)
    record, every = family(model), blocks(model)
    if getattr(model, "perpend_variant", None) is not None:
        raise InputError(
            f"a model trained as {model.perpend_variant!r} cannot be saved without some of its parts: its "
            "variant is said layer by layer; measure what dropping does without saving"
        )
    if record.repeats:
        raise InputError(f"{record.name} runs one block again and again: no block of it can be taken out")
    gone = {layer for layer, part in drops if part == "block"}
    kept = [block.index for block in every if block.index not in gone]
    if not kept:
        raise InputError(f"all {len(every)} blocks are dropped: nothing is left to save")
    config = _config(model, kept, len(every))
    smaller = _build(model, config)
    _load(smaller, model, kept)
    smaller = smaller.to(input_device(model)).eval()
    notes = []
    silenced = [(kept.index(layer), part) for layer, part in drops if layer in kept and part != "block"]
    for place, part in silenced:
        _silence(smaller, place, part)
    if silenced:
        notes.append(
            f"{len(silenced)} attention or MLP parts cannot be left out by this config: their output "
            "projections are zero, and they cost what they did"
        )
    if gone:
        saved = 1 - _parameters(smaller) / _parameters(model)
        notes.append(f"{len(gone)} of {len(every)} blocks left out, {saved:.1%} of the parameters")
    _prove(model, smaller, drops, silenced)
    return smaller, notes


def check_free(folder: str | Path) -> None:
    """InputError where `folder` is a file or holds anything: a model is never written over another one."""
    if not str(folder).strip():
        raise InputError("the folder to save in has no name")
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder} is not empty: name another folder to save to, or empty it")
    there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        raise InputError(f"{folder} cannot be made: {there} takes no files; name another folder to save to")


def _checked(model: nn.Module, drops: Iterable[Drop]) -> list[Drop]:
    drops = sorted({(int(layer), part) for layer, part in drops})
    count = len(blocks(model))
    for layer, part in drops:
        if part not in PARTS:
            raise unknown_name("part", part, PARTS)
        if not 0 <= layer < count:
            raise InputError(f"layer {layer} does not exist: the model has {count} blocks, 0 to {count - 1}")
    return drops


def _config(model: nn.Module, kept: Sequence[int], count: int) -> Any:
    """The config with the layers that are left, in the decoder's part of it."""
    config = copy.deepcopy(model.config)
    inner = config.get_text_config(decoder=True)
    for key, value in list(inner.to_dict().items()):
        if key in NUMBERS and isinstance(value, (list, tuple)):
            setattr(inner, key, [kept.index(layer) for layer in value if layer in kept])
        elif key in COUNTS and isinstance(value, int):
            setattr(inner, key, sum(layer < value for layer in kept))
        elif "layer" in key and isinstance(value, (list, tuple)) and len(value) == count:
            setattr(inner, key, [value[layer] for layer in kept])
    inner.num_hidden_layers = len(kept)
    # a backbone names its layers, one more than there are
    if len(getattr(inner, "stage_names", None) or ()) == count + 1:
        inner.stage_names = inner.stage_names[: len(kept) + 1]
        inner._out_features, inner._out_indices = inner.stage_names[-1:], [len(kept)]
    return config


def _build(model: nn.Module, config: Any) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(next(p.dtype for p in model.parameters() if p.is_floating_point()))
    state = torch.random.get_rng_state()
    try:
        built = type(model)(config)
    finally:
        torch.set_default_dtype(before)
        torch.random.set_rng_state(state)
    if getattr(model, "generation_config", None) is not None:
        built.generation_config = copy.deepcopy(model.generation_config)
    return built


def _load(smaller: nn.Module, model: nn.Module, kept: Sequence[int]) -> None:
    """The weights of the blocks that are left; what the model itself was made without (a pooler) goes."""
    try:
        report = smaller.load_state_dict(_weights(model, kept), strict=False)
    except RuntimeError as error:
        raise InputError(f"the config cannot say which blocks are left: {error}") from error
    for key in report.missing_keys:
        owner, _, _ = key.partition(".")
        if getattr(model, owner, model) is None:
            setattr(smaller, owner, None)
    wrong = [k for k in report.missing_keys if getattr(smaller, k.partition(".")[0], None) is not None]
    if wrong or report.unexpected_keys:
        raise InputError(f"the config cannot say what is left: {[*wrong, *report.unexpected_keys][:4]}")


def _weights(model: nn.Module, kept: Sequence[int]) -> dict[str, Tensor]:
    """The state without the dropped blocks, the others renumbered."""
    _, name, _ = locate(model, family(model))
    prefix = f"{name}."
    place = {old: new for new, old in enumerate(kept)}
    state = {}
    homes = dict(model.named_modules())
    for key, value in model.state_dict().items():
        if value.device.type == "meta":
            path, _, leaf = key.rpartition(".")
            value = stored(homes[path], leaf)
        if key.startswith(prefix):
            number, _, rest = key[len(prefix) :].partition(".")
            if int(number) not in place:
                continue
            key = f"{prefix}{place[int(number)]}.{rest}"
        state[key] = value
    return state


def _silence(model: nn.Module, layer: int, part: str) -> None:
    """Zero what writes a part's contribution."""
    block = blocks(model)[layer]
    if part == "attn":
        written = list(block.out_proj.parameters(recurse=False))
    else:
        named = dict(block.module.named_parameters())
        written = [named[path] for path in block.family.mlp_outputs if path in named]
    if not written:
        raise InputError(f"family {block.family.name!r} does not say which weights write its {part}")
    with torch.no_grad():
        for parameter in written:
            parameter.zero_()


def _prove(model: nn.Module, smaller: nn.Module, drops: Sequence[Drop], silenced: Sequence[Drop]) -> None:
    """The smaller model's output is that of the model with the parts dropped, on a few tokens."""
    from perpend.models.verify import output_of, probe_inputs

    inputs = probe_inputs(model, count=1, length=16)
    sizes: dict[Drop, float] = {}

    def look(c: Contribution) -> None:
        if (c.layer, c.part) in silenced:
            sizes[c.layer, c.part] = float(c.update.abs().max())

    with torch.no_grad():
        with dropped(model, drops):
            expected = output_of(model(**inputs)).float()
        with contributions(smaller, look):
            got = output_of(smaller(**inputs)).float()
    loud = [drop for drop, size in sizes.items() if size > 0]
    if loud:
        raise InputError(f"zeroed projections leave a contribution in {loud}: this part cannot be silenced")
    error = (got - expected).norm() / expected.norm()
    half = next(p.dtype for p in model.parameters() if p.is_floating_point()).itemsize < 4
    if not bool(error <= (5e-2 if half else 1e-4)):
        raise InputError(
            f"the smaller model's output differs from that with those parts dropped (by {float(error):.2g}): "
            f"blocks of {text_config(model).model_type} depend on their number, and cannot be taken out"
        )


def _parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())
