"""Step values on the disk: nested dicts, lists, numbers, strings, arrays, tensors, tables, exactly as given.

One safetensors file a value: the arrays as its tensors, all the rest as JSON in its header, and a checksum,
so that a file cut short or altered is noticed. Nothing is pickled or unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from perpend.errors import InputError
from perpend.runs.files import is_tensor


def pack(value: Any, name: str) -> tuple[bytes, Any]:
    """The file for `value`, and the value as `unpack` will return it: a resumed run sees the same."""
    arrays: dict[str, Any] = {}
    shape = _encode(value, arrays)
    return _file(shape, arrays, name), _decode(shape, arrays)


def _file(shape: Any, arrays: dict[str, Any], name: str) -> bytes:
    value = json.dumps(shape)
    header = {"name": name, "value": value, "sha256": _digest(value, arrays)}
    if any(is_tensor(array) for array in arrays.values()):
        import torch
        from safetensors.torch import save

        return save(
            {k: a if is_tensor(a) else torch.from_numpy(a.copy()) for k, a in arrays.items()}, metadata=header
        )
    from safetensors.numpy import save as save_arrays

    return save_arrays(arrays, metadata=header)


def unpack(path: Path, name: str) -> Any:
    """The value that `pack` stored; a ValueError says how the file is damaged."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            header = file.metadata() or {}
            if header.get("name") != name:
                raise ValueError(f"it holds the step {header.get('name')!r}")
            shape = json.loads(header["value"])
            kinds: dict[str, str] = {}
            _kinds(shape, kinds)
            if set(kinds) != set(file.keys()):
                raise ValueError("its arrays are not those of its header")
            arrays: dict[str, Any] = {k: file.get_tensor(k) for k, kind in kinds.items() if kind == "array"}
        if "tensor" in kinds.values():
            with safe_open(path, framework="pt") as file:
                arrays |= {k: file.get_tensor(k) for k, kind in kinds.items() if kind == "tensor"}
        if _digest(header["value"], arrays) != header.get("sha256"):
            raise ValueError("its checksum does not match")
        return _decode(shape, arrays)
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError, OSError) as error:
        raise ValueError(str(error)) from error


def _encode(value: Any, arrays: dict[str, Any]) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, np.generic):
        value = np.asarray(value)
    elif isinstance(value, float):
        return value if math.isfinite(value) else {"$float": repr(value)}
    if is_tensor(value) or isinstance(value, np.ndarray):
        kind, key = ("$tensor" if is_tensor(value) else "$array"), f"a{len(arrays)}"
        if kind == "$array" and value.dtype.kind not in "fiub":
            return {"$items": [value.shape, [_encode(item, arrays) for item in value.ravel().tolist()]]}
        arrays[key] = (
            value.detach().cpu().contiguous().clone() if kind == "$tensor" else np.array(value, order="C")
        )
        return {kind: key}
    if isinstance(value, Mapping):
        return {"$map": [[_encode(key, arrays), _encode(item, arrays)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"$tuple": [_encode(item, arrays) for item in value]}
    if isinstance(value, list):
        return [_encode(item, arrays) for item in value]
    if hasattr(value, "to_dict") and hasattr(value, "columns"):
        columns = [[name, _encode(_column(value[name]), arrays)] for name in value.columns]
        return {"$table": columns}
    raise InputError(
        f"a step cannot store a {type(value).__name__}; return numbers, arrays, tables, lists or dicts"
    )


def _decode(shape: Any, arrays: dict[str, Any]) -> Any:
    if isinstance(shape, list):
        return [_decode(item, arrays) for item in shape]
    if not isinstance(shape, dict):
        return shape
    ((kind, content),) = shape.items()
    if kind in ("$tensor", "$array"):
        return arrays[content]
    if kind == "$map":
        return {_key(_decode(key, arrays)): _decode(item, arrays) for key, item in content}
    if kind == "$tuple":
        return tuple(_decode(item, arrays) for item in content)
    if kind == "$float":
        return float(content)
    if kind == "$items":
        out = np.empty(len(content[1]), dtype=object)
        out[:] = [_decode(item, arrays) for item in content[1]]
        return out.reshape(content[0])
    if kind == "$table":
        import pandas as pd

        return pd.DataFrame({name: _decode(column, arrays) for name, column in content})
    raise ValueError(f"it holds an unknown kind of value {kind!r}")


def _kinds(shape: Any, out: dict[str, str]) -> None:
    if isinstance(shape, list):
        for item in shape:
            _kinds(item, out)
    elif isinstance(shape, dict):
        for kind, content in shape.items():
            if kind in ("$tensor", "$array"):
                out[content] = kind[1:]
            else:
                _kinds(content, out)


def _column(column: Any) -> Any:
    """A table's column: numbers as an array, the rest item by item."""
    values = column.to_numpy()
    return values if values.dtype.kind in "fiub" else column.tolist()


def _key(key: Any) -> Any:
    return key.item() if isinstance(key, np.ndarray) else key


def _digest(value: str, arrays: Mapping[str, Any]) -> str:
    """Over the header's JSON and the arrays' bytes, so that neither can change unnoticed."""
    digest = hashlib.sha256(value.encode())
    for key in sorted(arrays):
        array = arrays[key]
        digest.update(f"{key} {tuple(array.shape)} {str(array.dtype).removeprefix('torch.')};".encode())
        digest.update(_bytes(array))
    return digest.hexdigest()


def _bytes(array: Any) -> bytes:
    if is_tensor(array):
        import torch

        return array.reshape(-1).view(torch.uint8).numpy().tobytes()
    return array.tobytes()
