"""The weight matrices of a block: what a compression method may change, and what it must leave, by name.

A `Matrix` is a view [out, in] into a parameter, whatever the parameter's own layout: `nn.Linear` stores it as
it is, GPT-2's `Conv1D` transposed, a fused mixture of experts as one slice of a 3-D tensor per expert. A view
is written in place, so nothing has to be put back. A tensor of unknown layout is an error that names it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from perpend.errors import InputError

_ROUTERS = ("gate", "router", "shared_expert_gate", "wg")


@dataclass(frozen=True, eq=False)
class Matrix:
    """One weight matrix. `weight` is a live view [out, in]; `parts` says to which update it belongs."""

    name: str
    layer: int
    part: str  # "attn" or "mlp"
    parameter: nn.Parameter = field(repr=False)
    transposed: bool = False
    expert: int | None = None
    module: nn.Module | None = field(default=None, repr=False)

    @property
    def weight(self) -> Tensor:
        """The view [out, in]; writing into it writes into the parameter."""
        data = self.parameter.data if self.expert is None else self.parameter.data[self.expert]
        return data.T if self.transposed else data

    @property
    def key(self) -> int:
        """Address of the first element: how a matrix product tells which matrix it multiplies with."""
        data = self.parameter.data if self.expert is None else self.parameter.data[self.expert]
        return data.data_ptr()

    @property
    def width(self) -> int:
        """Number of input features."""
        return self.weight.shape[1]


def kept_name(name: str) -> str:
    """What `keep` calls a matrix: an expert's slice cannot be kept alone, its tensor is."""
    return name.partition("[")[0]


@dataclass(frozen=True)
class Matrices:
    """All matrices of one block, and every other tensor with two or more axes with the reason it is left."""

    matrices: tuple[Matrix, ...]
    left: dict[str, str]

    def __iter__(self):
        return iter(self.matrices)


def block_matrices(
    block: nn.Module,
    layer: int,
    *,
    prefix: str = "",
    attention: nn.Module | None = None,
    keep: Sequence[str] = (),
) -> Matrices:
    """The matrices of a block, in the order of its modules.

    prefix: the block's name in the model. attention: the block's attention module; matrices inside it belong
    to the part "attn", all others to "mlp". keep: shell patterns of names to leave as they are.
    InputError: a tensor whose layout is unknown (fused experts of a kind perpend does not know), by name.
    """
    inside = {id(m) for m in attention.modules()} if attention is not None else set()
    found: list[Matrix] = []
    left: dict[str, str] = {}
    seen: set[int] = set()
    for path, module in block.named_modules():
        for own, parameter in module.named_parameters(recurse=False):
            name = ".".join(filter(None, (prefix, path, own)))
            if parameter.ndim < 2 or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            part = "attn" if id(module) in inside else "mlp"
            reason = _reason(path, module, own, name, keep)
            if reason is not None:
                left[name] = reason
                continue
            if parameter.ndim == 3:
                turned = bool(module.is_transposed)
                found += [
                    Matrix(f"{name}[{e}]", layer, part, parameter, turned, e, module)
                    for e in range(parameter.shape[0])
                ]
            else:
                plain = name.removesuffix(".weight")
                found.append(Matrix(plain, layer, part, parameter, isinstance(module, Conv1D), None, module))
    return Matrices(tuple(found), left)


def _reason(path: str, module: nn.Module, own: str, name: str, keep: Iterable[str]) -> str | None:
    """Why a tensor is left as it is; None: it is a matrix to compress; InputError: nobody knows."""
    if any(fnmatch(name, pattern) or fnmatch(name.removesuffix(".weight"), pattern) for pattern in keep):
        return "kept on request"
    parameter = module._parameters[own]
    leaf = path.rsplit(".", 1)[-1]
    if leaf in _ROUTERS or "Router" in type(module).__name__:
        return "router"
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return "convolution"
    if isinstance(module, nn.Embedding):
        return "embedding"
    if isinstance(module, (nn.Linear, Conv1D)) and own == "weight":
        if not torch.is_floating_point(parameter):
            raise InputError(
                f"{name} is stored as {parameter.dtype}: the model is already quantized; load it dequantized"
            )
        return None
    if own.endswith("bias"):
        return "bias"
    if parameter.ndim == 3 and hasattr(module, "is_transposed"):
        return None
    raise InputError(
        f"{name} {tuple(parameter.shape)} in {type(module).__name__} is a tensor whose layout perpend does "
        f"not know (fused experts?): leave it uncompressed with keep={name!r}"
    )
