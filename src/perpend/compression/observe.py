"""See what every weight matrix of a block is multiplied with, fused experts included.

Module hooks see an `nn.Linear` but not the slice `experts.gate_up_proj[3]` that an expert multiplies with.
The product itself is the one place all of them pass, so a torch function mode watches products and knows
each matrix by the address of its first element. Experts are run by their eager loop while it watches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from perpend.compression.matrices import Matrix

Watch = Callable[
    [Matrix, Tensor, Tensor], None
]  # matrix, its input [tokens, in], its output [tokens, out] or wider

# name of the torch function -> positions of (input, weight) among its arguments
_PRODUCTS = {"linear": (0, 1), "matmul": (0, 1), "__matmul__": (0, 1), "mm": (0, 1), "addmm": (1, 2)}


class _Products(TorchFunctionMode):
    def __init__(self, matrices: dict[int, Matrix], watch: Watch) -> None:
        super().__init__()
        self.matrices, self.watch = matrices, watch

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        places = _PRODUCTS.get(getattr(func, "__name__", ""))
        if places is not None:
            source = _argument(args, kwargs, places[0], ("input", "mat1"))
            weight = _argument(args, kwargs, places[1], ("weight", "other", "mat2"))
            if isinstance(weight, Tensor) and isinstance(source, Tensor) and weight.ndim == 2:
                matrix = self.matrices.get(weight.data_ptr())
                if matrix is not None and source.shape[-1] == matrix.width:
                    # outside of the mode's reach: what watch multiplies is nobody's business
                    with torch._C.DisableTorchFunction():
                        self.watch(
                            matrix, source.reshape(-1, source.shape[-1]), result.reshape(-1, result.shape[-1])
                        )
        return result


def _argument(args: tuple, kwargs: dict, place: int, names: tuple[str, ...]) -> Any:
    if place < len(args):
        return args[place]
    return next((kwargs[name] for name in names if name in kwargs), None)


@contextmanager
def observe(matrices: Iterable[Matrix], watch: Watch) -> Iterator[None]:
    """While inside, `watch(matrix, input, output)` sees each product with one of the matrices.

    input: [tokens, in]; output: [tokens, out], with the bias where the product adds it (`linear`, `addmm`).
    """
    matrices = list(matrices)
    modules = {id(m.module): m.module for m in matrices if m.expert is not None}
    with _eager_experts(modules.values()), _Products({m.key: m for m in matrices}, watch):
        yield


@contextmanager
def _eager_experts(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Experts loop over slices, one product per expert, instead of one grouped kernel."""
    before = []
    for module in modules:
        config = getattr(module, "config", None)
        if config is not None and all(config is not known for known, _ in before):
            before.append((config, config._experts_implementation))
            config._experts_implementation = "eager"
    try:
        yield
    finally:
        for config, implementation in before:
            config._experts_implementation = implementation
