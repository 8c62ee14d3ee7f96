"""Where a model's weights lie when accelerate has spread it: over devices, in memory and on the disk.

    model, tokenizer = load("owner/large", device="auto")
    input_device(model)                      # where its tokens go, though its own weights may be elsewhere
    stored(block.out_proj, "weight")         # a weight's values, wherever they are kept
    with held(block.module):                 # a block's weights in memory for as long as the `with` lasts
        ...
    with held(block.module, write=True):     # and what is changed in them goes back to where they came from
        ...

A weight that accelerate keeps elsewhere is on the meta device between two calls of its module: it has a shape
and no values. A forward pass brings it back by itself; only what reads or writes weights outside of one, or
asks a weight for the device, needs this module. A model that is not spread passes through unchanged.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError

_SIZE = re.compile(r"\d+(\.\d+)?[KMG]i?B")


def input_device(model: nn.Module) -> torch.device:
    """Where a model takes its inputs: the device of its first weight, or the one it is brought to for a call.

    Raises InputError for a model on the meta device, which has no values.
    """
    first = next(model.parameters(), None)
    if first is None:
        return torch.device("cpu")
    if first.device.type != "meta":
        return first.device
    for module in model.modules():
        for hook in _hooks(module):
            if getattr(hook, "execution_device", None) is not None:
                return torch.device(hook.execution_device)
    raise InputError(f"{type(model).__name__} has no values (it is on the meta device): load it with weights")


def is_spread(model: nn.Module) -> bool:
    """Whether accelerate has placed the model's parts by themselves: on several devices, or out of memory."""
    return len(set(getattr(model, "hf_device_map", {}).values()) - {None}) > 1 or any(
        getattr(hook, "offload", False) for module in model.modules() for hook in _hooks(module)
    )


def places(model: nn.Module) -> str:
    """The devices that hold the weights, in words: `cpu`, or `cuda:0, cuda:1, disk`."""
    found = getattr(model, "hf_device_map", None) if is_spread(model) else None
    if not found:
        return str(input_device(model))
    words = {f"cuda:{place}" if isinstance(place, int) else str(place) for place in found.values()}
    return ", ".join(sorted(words))


def as_placed(model: nn.Module) -> dict[str, Any]:
    """`device` and `max_memory` for `load`, so that another model is placed as this one is."""
    if is_spread(model):
        return {"device": "auto", "max_memory": getattr(model, "perpend_max_memory", None)}
    return {"device": str(input_device(model))}


def stored(module: nn.Module, name: str) -> Tensor:
    """The values of a module's own parameter or buffer, read from where accelerate keeps it if it has moved.

    Raises InputError where there are no values at all.
    """
    tensor = getattr(module, name)
    if tensor.device.type != "meta":
        return tensor.detach()
    for hook in _hooks(module):
        if getattr(hook, "weights_map", None) is not None:
            return torch.as_tensor(hook.weights_map[name])
    raise InputError(f"{name} has no values (it is on the meta device): load the model with weights")


@contextmanager
def held(*modules: nn.Module, write: bool = False) -> Iterator[None]:
    """The weights of modules, and of all in them, in memory and at the device that runs them, inside the
    `with`.

    With `write`, what the block has changed is kept: weights that came from memory go back there, those from
    the disk into new files that live as long as the model or a copy of it (the file that the model was loaded
    from is never written). Without it, and after an exception, nothing that was changed is kept. Parameters
    are other objects inside, so they are to be looked up there. Nests: an outer `with` is in charge.
    """
    taken: list[_Taken] = []
    done = False
    try:
        for module in modules:
            for part in module.modules():
                for hook in _hooks(part):
                    if getattr(hook, "offload", False):
                        taken.append(_take(part, hook, write))
        yield
        done = True
    finally:
        for each in reversed(taken):
            _give_back(each, write and done)


@dataclass(frozen=True)
class _Taken:
    """What one hook looks after: name in its map -> (owner, leaf, the parameter without values)."""

    hook: Any
    tensors: dict[str, tuple[nn.Module, str, Tensor]] = field(default_factory=dict)


def _hooks(module: nn.Module) -> tuple[Any, ...]:
    """accelerate's hooks of a module; several where they were chained."""
    hook = getattr(module, "_hf_hook", None)
    return () if hook is None else tuple(getattr(hook, "hooks", (hook,)))


def _take(module: nn.Module, hook: Any, write: bool) -> _Taken:
    from accelerate.utils import named_module_tensors

    taken = _Taken(hook)
    names = named_module_tensors(
        module,
        include_buffers=hook.offload_buffers,
        recurse=hook.place_submodules,
        remove_non_persistent=True,
    )
    for name, tensor in list(names):
        path, _, leaf = name.rpartition(".")
        owner = module.get_submodule(path)
        # a copy, so that the stored one changes only when it is meant to
        value = torch.as_tensor(hook.weights_map[name]).to(hook.execution_device, copy=True)
        taken.tensors[name] = owner, leaf, tensor
        _put(owner, leaf, value, tensor)
    hook.offload = False  # its calls leave the weights where they are now
    return taken


def _put(owner: nn.Module, leaf: str, value: Tensor, like: Tensor) -> None:
    if leaf in owner._parameters:
        owner._parameters[leaf] = nn.Parameter(value, requires_grad=like.requires_grad)
    else:
        owner._buffers[leaf] = value


def _give_back(taken: _Taken, write: bool) -> None:
    for name, (owner, leaf, before) in taken.tensors.items():
        now = getattr(owner, leaf).detach()
        if write:
            _store(taken.hook.weights_map, name, now)
            before = before if now.shape == before.shape else torch.empty_like(now, device="meta")
        if leaf in owner._parameters:
            same = isinstance(before, nn.Parameter)
            owner._parameters[leaf] = before if same else nn.Parameter(before, requires_grad=False)
        else:
            owner._buffers[leaf] = before
    taken.hook.offload = True


def _store(weights: Any, name: str, value: Tensor) -> None:
    """Put a value where a map of accelerate's finds it."""
    prefix, kept = "", weights
    while hasattr(kept, "prefix"):  # a view of one module's names in the map of the whole model
        prefix, kept = kept.prefix + prefix, kept.dataset
    key = prefix + name
    memory = getattr(kept, "state_dict", kept)
    if key in memory:
        memory[key] = value.to(memory[key].device, copy=True)
        return
    from safetensors.torch import save_file

    file = Scratch.of(kept).file()
    save_file({key: value.cpu().contiguous()}, file)
    kept.index[key] = {
        "safetensors_file": str(file),
        "weight_name": key,
        "dtype": str(value.dtype).removeprefix("torch."),
    }


class Scratch:
    """A temporary folder for weights on the disk, shared by a model and its copies, gone with the last."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="perpend-weights-"))
        self._count = 0
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)

    def __deepcopy__(self, memo: Any) -> Scratch:
        return self

    def file(self) -> Path:
        """A path that was not given before: a model and its copy never write the same one."""
        self._count += 1
        return self.folder / f"held-{self._count}.safetensors"

    def keep_with(self, model: nn.Module) -> None:
        """Let the folder live as long as the model's own look-up of what it has on the disk."""
        for module in model.modules():
            for hook in _hooks(module):
                kept = getattr(hook, "weights_map", None)
                while hasattr(kept, "prefix"):
                    kept = kept.dataset
                if hasattr(kept, "index"):
                    kept.perpend_scratch = self
                    return

    @classmethod
    def of(cls, loader: Any) -> Scratch:
        """The folder of a map of weights on the disk, made on first use."""
        if not hasattr(loader, "perpend_scratch"):
            loader.perpend_scratch = cls()
        return loader.perpend_scratch


def max_memory(given: str | Mapping[Any, Any] | None) -> dict[int | str, int] | None:
    """Bytes that each device may hold under `device="auto"`, of `0=20GiB,cpu=64GiB` or a mapping of that.

    What is left over goes to the disk. Devices that are not named keep what accelerate finds free there; None
    for None. Raises InputError for anything else.
    """
    if given is None:
        return None
    from accelerate.utils import convert_file_size_to_int, get_max_memory

    form = "write devices and sizes as 0=20GiB,cpu=64GiB (a CUDA device by its number)"
    if isinstance(given, str):
        pairs = [tuple(word.strip() for word in part.partition("=")[::2]) for part in given.split(",")]
    else:
        pairs = list(given.items())
    free = get_max_memory()
    for place, size in pairs:
        key = int(place) if str(place).isdecimal() else place
        if not isinstance(size, int) and not _SIZE.fullmatch(str(size)):
            raise InputError(f"max_memory: {size!r} for {place!r} is no size; {form}")
        if key not in free:
            known = ", ".join(map(str, free))
            raise InputError(f"max_memory: there is no device {place!r} here, there are {known}; {form}")
        free[key] = convert_file_size_to_int(size)
    return free
