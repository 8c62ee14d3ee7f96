"""A model's tensors, one after the other: their hash, and whether every value in them is a number.

weights_hash(model)      # the same weights give the same hash on every machine and device
check_finite(model)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.placement import stored

PIECE = 1 << 24  # values moved to the CPU at a time, so that hashing needs no second copy of a large tensor


def named_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers in the order of their names; tied tensors once, under their first name.

    Tensors that accelerate has moved out of memory are read back one at a time, and those that it has put on
    several devices because they are tied are one still.
    """
    homes = dict(model.named_modules())
    kept = set(model.state_dict(keep_vars=True))
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= {k: v for k, v in model.named_buffers(remove_duplicate=False) if k in kept}
    apart = _tied_apart(model, tensors)
    seen: set[object] = set()
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        place: object = apart.get(name)
        if place is None and tensor.device.type != "meta" and tensor.numel():
            place = (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
        if place is not None and place in seen:
            continue
        seen.add(place)
        path, _, leaf = name.rpartition(".")
        yield name, stored(homes[path], leaf)


def _tied_apart(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, str]:
    """Name → the name it is tied to, of weights that share no storage because they were moved apart."""
    found: dict[str, str] = {}
    for name, source in (getattr(model, "all_tied_weights_keys", None) or {}).items():
        pair = [tensors[key].device for key in (name, source) if key in tensors]
        if len(pair) == 2 and (pair[0] != pair[1] or pair[0].type == "meta"):
            root = found.get(source, source)
            found[name] = found[source] = root
    return found


def weights_hash(model: nn.Module) -> str:
    """sha256 over the name, dtype, shape and bytes of every weight, in the order of `named_weights`.

    The same weights in another dtype hash differently, as they are other numbers; and so do the same weights
    in a variant that perpend trained, whose pass is another one: its name and gates are hashed with them.
    """
    total = hashlib.sha256()
    variant = getattr(model, "perpend_variant", None)
    own = sorted((getattr(model, "perpend_variant_gates", None) or {}).items())
    if variant is not None:
        total.update(f"variant:{variant}\n".encode())
    for name, tensor in (*own, *named_weights(model)):
        total.update(f"{name}:{str(tensor.dtype).removeprefix('torch.')}:{list(tensor.shape)}\n".encode())
        flat = tensor.contiguous().flatten()
        for start in range(0, flat.numel(), PIECE):
            total.update(flat[start : start + PIECE].cpu().view(torch.uint8).numpy().data)
    return total.hexdigest()


def check_finite(model: nn.Module) -> None:
    """Raise InputError naming each weight that holds a NaN or an infinity."""
    bad = []
    for name, tensor in named_weights(model):
        if tensor.numel() and tensor.is_floating_point():
            wide = (
                tensor.float() if tensor.element_size() == 1 else tensor
            )  # float8 has no extremes of its own
            low, high = torch.aminmax(wide)  # a NaN comes out as both; one pass, no copy
            if not (torch.isfinite(low) and torch.isfinite(high)):
                bad.append(f"{name} ({int((~torch.isfinite(wide)).sum())} of {tensor.numel()} values)")
    if bad:
        more = f" and {len(bad) - 5} more tensors" if len(bad) > 5 else ""
        raise InputError(
            f"the model has NaN or infinite weights in {', '.join(bad[:5])}{more}: the checkpoint is "
            "damaged, or its values do not fit the dtype it was loaded in (try dtype=float32)"
        )
