"""Two devices that are not there: a model's layers on different ones, and every mixing of them an error.

    with TwoDevices() as devices:
        model = devices.place(tiny.build("llama"))       # layers in turn on cpu:0 and cpu:1
        perpend.survey_updates(model, tokens)

The values are ordinary ones on the CPU. Beside each tensor stands the device that it would be on, which is
what `tensor.device` answers and `tensor.to(device)` changes; an operation on tensors of two devices raises
what it raises on two GPUs. As there, a tensor without axes may come from the CPU, an index may lie on the
CPU, and copying into a tensor crosses devices.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from perpend.models.layout import blocks

HOST = torch.device("cpu")
DEVICES = torch.device("cpu", 0), torch.device("cpu", 1)

# what torch does across devices, or without reading a value
_FREE = {
    "_has_compatible_shallow_copy_type",
    "__repr__",
    "copy_",
    "dim",
    "element_size",
    "is_floating_point",
    "numel",
    "requires_grad_",
    "set_",
    "size",
}
_TO_HOST = {"tolist", "item", "__bool__", "__int__", "__float__", "__len__", "__index__"}


class TwoDevices(TorchFunctionMode):
    """While inside, tensors have the devices that they were given by `place` and `to`."""

    def __init__(self) -> None:
        super().__init__()
        self.of = WeakTensorKeyDictionary()
        self.moves = 0

    def __enter__(self) -> TwoDevices:
        self._disable = torch._C.DisableTorchFunction  # what hides from modes would hide from this one
        torch._C.DisableTorchFunction = nullcontext
        made = self._new = nn.Parameter.__new__  # the one way to a tensor that a mode does not see

        def new(kind: type, data: Any = None, requires_grad: bool = True) -> Any:
            parameter = made(kind, data, requires_grad)
            return parameter if data is None else self._tagged(parameter, self.device(data))

        nn.Parameter.__new__ = new
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        nn.Parameter.__new__ = self._new
        torch._C.DisableTorchFunction = self._disable
        super().__exit__(*error)

    def device(self, tensor: Tensor) -> torch.device:
        return self.of.get(tensor, HOST)

    def put(self, tensor: Tensor, device: torch.device) -> Tensor:
        """The tensor as one of that device: itself where it is there, else a copy."""
        if self.device(tensor) == device:
            return tensor
        self.moves += 1
        moved = tensor.clone()
        self.of[moved] = device
        return moved

    def place(self, model: nn.Module) -> nn.Module:
        """Blocks in turn on the two devices, what is around them on the first; inputs are moved to a block,
        and the model's output to where its input was, as accelerate's hooks do it.
        """
        for tensor in (*model.parameters(), *model.buffers()):
            self.of[tensor] = DEVICES[0]
        for block in blocks(model):
            here = DEVICES[block.index % 2]
            for tensor in (*block.module.parameters(), *block.module.buffers()):
                self.of[tensor] = here
            self._aligned(block.module, here)
        own = {id(m) for block in blocks(model) for m in block.module.modules()}
        for module in model.modules():
            if id(module) not in own and not any(id(m) in own for m in module.modules()):
                self._aligned(module, DEVICES[0])
        self._aligned(model, DEVICES[0], back=True)
        return model

    def _aligned(self, module: nn.Module, device: torch.device, back: bool = False) -> None:
        """As accelerate does it, so that a copy of the module runs the copy."""
        module._old_forward = module.forward
        run = functools.partial(_run_aligned, self, module, device, back)
        module.forward = functools.update_wrapper(run, module._old_forward)

    def __deepcopy__(self, memo: Any) -> TwoDevices:
        return self

    def _moved(self, value: Any, device: torch.device) -> Any:
        if isinstance(value, Tensor):
            return self.put(value, device)
        if isinstance(value, dict):
            made = {key: self._moved(item, device) for key, item in value.items()}
            return made if type(value) is dict else type(value)(**made)
        if isinstance(value, (tuple, list)):
            return type(value)(self._moved(item, device) for item in value)
        return value

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", str(func))
        if name == "__get__":
            prop = getattr(func, "__self__", None)
            if prop is Tensor.device:
                return self.device(args[0])
            made = func(*args, **kwargs)
            return self._tagged(made, self.device(args[0]))
        if name in ("to", "type_as", "cpu", "new_zeros", "new_tensor"):
            return self._to(func, name, args, kwargs)
        if name == "__deepcopy__":
            return self._tagged(func(*args, **kwargs), self.device(args[0]))
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            func(*args, **kwargs)
            self.of[args[0]] = self.device(args[1])
            return None
        if func is torch.autograd.grad:
            made = func(*args, **kwargs)
            return tuple(self._tagged(one, self.device(leaf)) for one, leaf in zip(made, args[1]))
        wanted = kwargs.pop("device", None)
        given = list(_tensors((args, kwargs)))
        if name == "numpy" and any(self.device(t) != HOST for t in given):
            raise RuntimeError("can't convert a tensor of a device to numpy: use Tensor.cpu() first")
        here = self._common(name, args, kwargs, given)
        if wanted is not None:
            made = func(*args, **kwargs)
            return self._tagged(made, torch.device(wanted))
        made = func(*args, **kwargs)
        return made if name in _TO_HOST else self._tagged(made, here)

    def _to(self, func: Any, name: str, args: tuple, kwargs: dict[str, Any]) -> Any:
        tensor = args[0]
        device = self.device(tensor)
        rest = []
        if name == "cpu":
            return self.put(tensor, HOST)
        for value in args[1:]:
            if isinstance(value, Tensor) and name in ("to", "type_as"):
                device, value = self.device(value), value.dtype
            elif isinstance(value, (str, torch.device)):
                device = torch.device(value)
                continue
            if isinstance(value, torch.dtype) or name in ("new_zeros", "new_tensor"):
                rest.append(value)
        if "device" in kwargs and kwargs["device"] is not None:
            device = torch.device(kwargs.pop("device"))
        kwargs.pop("non_blocking", None)
        method = Tensor.to if name == "type_as" else func
        made = method(tensor, *rest, **kwargs) if rest or kwargs else tensor
        if made is tensor:
            return self.put(tensor, device)
        return self._tagged(made, device)

    def _common(self, name: str, args: tuple, kwargs: dict[str, Any], given: list[Tensor]) -> torch.device:
        if name in _FREE:
            return self.device(args[0]) if args and isinstance(args[0], Tensor) else HOST
        if name in ("__getitem__", "__setitem__", "index_put_", "index_put"):
            indices = list(_tensors(args[1]))
            given = [args[0], *(t for t in indices if self.device(t) != HOST)]
        places = {self.device(t) for t in given if t.ndim or self.device(t) != HOST}
        if len(places) > 1:
            raise RuntimeError(
                f"expected all tensors of {name} on one device, found {sorted(map(str, places))}"
            )
        return places.pop() if places else HOST

    def _tagged(self, made: Any, device: torch.device) -> Any:
        if device != HOST:
            for tensor in _tensors(made):
                self.of[tensor] = device
        return made


def _run_aligned(
    devices: TwoDevices, module: nn.Module, device: torch.device, back: bool, *args: Any, **kwargs: Any
) -> Any:
    given = next(_tensors((args, kwargs)))
    args, kwargs = devices._moved((args, kwargs), device)
    made = module._old_forward(*args, **kwargs)
    return devices._moved(made, devices.device(given)) if back else made


def _tensors(value: Any) -> Any:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(item)
