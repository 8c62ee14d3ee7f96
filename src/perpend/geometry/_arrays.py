"""The border between arrays and formulas: NumPy or torch in, the same kind out, input checked once.

Every formula of perpend.geometry is written once, in torch. A public function takes its arguments through
`Kind`, checks them (`positive`, `closed_logs`, `probabilities`) and gives the result back in the kind it got.

Precision: integers and lists become float64, half precision is raised to float32, float32 and float64 stay.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InputError

Array = Any  # numpy.ndarray | torch.Tensor | nested lists of numbers
Sink = int | Sequence[int]

# How far the sum of a row may lie from one before the row is refused: rounding of a softmax in that
# precision, with room. Within it a row is re-closed, so identities hold to float64 rounding all the same.
SUM_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Kind:
    """Whether the caller speaks NumPy or torch, and on which device."""

    is_torch: bool
    device: torch.device | None = None
    room: float = SUM_TOLERANCE[torch.float64]  # for the sum of a row, by the coarsest precision given

    @classmethod
    def of(cls, *arrays: Array) -> Kind:
        """torch if any argument is a tensor, else NumPy."""
        tensors = [array for array in arrays if isinstance(array, Tensor)]
        rooms = [SUM_TOLERANCE.get(_as_tensor(array).dtype, 0.0) for array in arrays]
        room = max(rooms, default=0.0) or SUM_TOLERANCE[torch.float64]
        return cls(bool(tensors), tensors[0].device if tensors else None, room)

    def take(self, array: Array, dtype: torch.dtype | None = None) -> Tensor:
        """`array` as a floating tensor of at least single precision, sharing memory where it can."""
        tensor = _as_tensor(array).to(self.device or "cpu")
        if dtype is None:
            dtype = tensor.dtype if tensor.dtype in (torch.float32, torch.float64) else None
            if dtype is None:
                dtype = torch.float32 if tensor.is_floating_point() else torch.float64
        return tensor.to(dtype)

    def give(self, value: Any) -> Any:
        """A tensor, or a tuple of them, in the caller's kind."""
        if self.is_torch:
            return value
        if isinstance(value, Tensor):
            return value.detach().numpy()[()]
        if isinstance(value, tuple):
            return (
                type(value)(*map(self.give, value))
                if hasattr(value, "_fields")
                else tuple(map(self.give, value))
            )
        return value


def _as_tensor(array: Array) -> Tensor:
    if isinstance(array, Tensor):
        if array.is_complex():
            raise InputError(f"expected an array of real numbers, got {array.dtype}")
        return array
    try:
        values = np.asarray(array)
    except ValueError as error:
        raise InputError(f"expected an array of real numbers, all rows of one length ({error})") from error
    if values.dtype.kind not in "fiub":
        raise InputError(f"expected an array of real numbers, got {values.dtype} (shape {values.shape})")
    if values.dtype.kind != "f" or values.dtype.itemsize > 8:
        values = values.astype(np.float64)
    # What torch can share. One entry that runs backwards is contiguous for NumPy, and not for torch.
    shared = values.flags.carray and values.dtype.isnative and min(values.strides, default=0) >= 0
    if not shared:
        values = np.array(values, dtype=values.dtype.newbyteorder("="), order="C")
    return torch.from_numpy(values)


def parts(rows: Tensor, least: int = 1, name: str = "rows") -> int:
    """The number of parts (last axis) of `rows`, which must be at least `least`."""
    if rows.ndim == 0 or rows.shape[-1] < least:
        raise InputError(
            f"{name} must have shape (..., parts) with at least {least} part{'s' if least > 1 else ''}, "
            f"got shape {tuple(rows.shape)}"
        )
    return rows.shape[-1]


def sink_parts(sink: Sink, count: int) -> tuple[list[int], list[int]]:
    """The sink's indices and the content's, both ascending, out of `count` parts.

    Raises InputError for an index out of range, a repeated one, or a block that leaves no content.
    """
    if isinstance(sink, (bool, str)) or sink is None:
        raise InputError(f"sink must be an index or a list of indices, got {sink!r}")
    try:
        given = [operator.index(index) for index in (sink if isinstance(sink, Iterable) else [sink])]
    except TypeError:  # 1.5 is no index, and is not rounded to one
        raise InputError(f"sink must be an index or a list of indices, got {sink!r}") from None
    indices = sorted({index % count for index in given if -count <= index < count})
    if len(indices) != len(given) or not indices:
        raise InputError(f"sink {sink!r} must name distinct parts out of {count} (0..{count - 1})")
    if len(indices) == count:
        raise InputError(f"sink {sink!r} takes all {count} parts and leaves no content")
    return indices, [index for index in range(count) if index not in set(indices)]


def probabilities(
    rows: Tensor, *, log: bool = False, name: str = "rows", room: float | None = None
) -> Tensor:
    """Non-negative rows, re-closed. With `room`, rows whose sum lies farther than that from one are refused.

    With `log` the rows are log-probabilities or logits: any constant per row is removed by the closure.
    """
    parts(rows, name=name)
    if log:
        return torch.softmax(_check_logs(rows, name), dim=-1)
    _check_non_negative(rows, name)
    total = rows.sum(-1, keepdim=True)
    _refuse(total == 0, name, *_MASSLESS)
    if room is not None:
        off = (total.detach() - 1).abs()
        remedy = "close them first (perpend.geometry.closure), or pass log=True for logits; largest deviation"
        worst = float(off.max()) if off.numel() else 0.0
        _refuse(off > room, name, "row that does", "rows that do", f"{remedy} {worst:.3g}", " not sum to one")
    return rows / total


def positive(rows: Tensor, *, log: bool = False, name: str = "rows") -> Tensor:
    """`rows` if every part is positive (every log finite), as log-ratios need; else InputError."""
    parts(rows, name=name)
    remedy = (
        "log-ratios need positive parts: keep a support on which every part is positive, pass "
        "log-probabilities with log=True, or replace the zeros (perpend.geometry.replace_zeros)"
    )
    if log:
        _refuse(torch.isneginf(_check_logs(rows, name)), name, "zero", "zeros", remedy, " (log = -inf)")
        return rows
    if _within(rows, 0.0, strictly=True):
        return rows
    _check_non_negative(rows, name)
    _refuse(rows == 0, name, "zero", "zeros", remedy)
    return rows


def log_ratios(rows: Tensor, *, log: bool = False) -> Tensor:
    """log(xᵢ/x₀) of positive rows: their logs on a scale of their own, for functions of log-ratios.

    Near the first part log1p((xᵢ − x₀)/x₀) keeps the digits that log xᵢ − log x₀ would lose, so a nearly
    uniform row keeps its direction.
    """
    first = rows[..., :1]
    if log:
        return rows - first
    ratios = rows.log().sub_(first.log())
    near = _near_zero(ratios.detach(), 1 / 64)
    if len(near):
        x, x0 = rows.take(near), first.expand_as(rows).take(near)
        ratios.put_(near, torch.log1p((x - x0) / x0))
    return ratios


def _near_zero(values: Tensor, room: float) -> Tensor:
    """Where |values| < room, counted in order; on the processor by NumPy, in a quarter of torch's time."""
    if values.is_cpu and values.dtype in (torch.float32, torch.float64):
        with suppress(RuntimeError):  # under torch.func a tensor has no numbers to show
            array = values.numpy()
            return torch.from_numpy(np.flatnonzero((array < room) & (array > -room)))
    return (values.abs() < room).flatten().nonzero()[:, 0]


def closed_logs(
    rows: Tensor, *, log: bool = False, name: str = "rows", room: float | None = None
) -> tuple[Tensor, Tensor]:
    """(p, log p) of re-closed rows; where p = 0 the log is given as 0, so p·log p = 0, with a gradient."""
    p = probabilities(rows, log=log, name=name, room=room)
    if log:
        log_p = torch.log_softmax(rows, dim=-1)
        return p, torch.where(torch.isneginf(log_p), 0.0, log_p)
    return p, torch.where(p > 0, p, 1.0).log()


def check_numbers(values: Tensor, name: str) -> None:
    """Refuse NaN and infinity, with their number and the place of the first."""
    if _within(values, -torch.inf, strictly=True):
        return
    what = "NaN or infinite value"
    _refuse(~torch.isfinite(values), name, what, f"{what}s", "find where they arise before comparing rows")


_MASSLESS = ("row with no mass", "rows with no mass", "leave such rows out and count them")


def _within(values: Tensor, low: float, *, strictly: bool = False) -> bool:
    """Whether all values are finite and ≥ low (> low), in one pass: the case that every good input takes."""
    if not values.numel():
        return True
    least, most = map(float, values.detach().aminmax())  # NaN passes neither comparison
    return (least > low if strictly else least >= low) and most < torch.inf


def _check_non_negative(rows: Tensor, name: str) -> None:
    if _within(rows, 0.0):
        return
    check_numbers(rows, name)
    remedy = "a composition has none; pass log=True if these are log-probabilities"
    _refuse(rows < 0, name, "negative part", "negative parts", remedy)


def _check_logs(rows: Tensor, name: str) -> Tensor:
    bad = torch.isnan(rows) | torch.isposinf(rows)
    _refuse(bad, name, "NaN or +inf", "NaN or +inf", "find where they arise", " among the log-probabilities")
    _refuse(torch.isneginf(rows).all(-1, keepdim=True), name, *_MASSLESS)
    return rows


def _refuse(bad: Tensor, name: str, one: str, many: str, remedy: str, rest: str = "") -> None:
    """InputError if any entry of `bad` is true: how many, where the first, and what to do."""
    if not bool(bad.any()):
        return
    count = int(bad.sum())
    first = tuple(bad.nonzero()[0].tolist())
    raise InputError(
        f"{name}: {count} {one if count == 1 else many}{rest} (first at index {first}); {remedy}"
    )
