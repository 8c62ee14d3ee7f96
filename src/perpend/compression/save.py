"""Write a compressed model to a folder that plain transformers loads, and prove that it does.

Masks and rounded weights are stored as ordinary dense weights in the model's dtype (fake quantization): the
folder is as large as the uncompressed model's. `perpend_compression.json` beside them says what was done.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from perpend.errors import PerpendError
from perpend.models.load import without_bars
from perpend.models.placement import as_placed, is_spread
from perpend.models.smaller import check_free
from perpend.models.weights import weights_hash
from perpend.runs.files import explained

RECORD = "perpend_compression.json"


@torch.no_grad()
def save(model: nn.Module, tokenizer: Any, folder: str | Path, record: Mapping[str, Any]) -> dict[str, Any]:
    """Save model, tokenizer and record into a new or empty folder; returns the record with the folder and
    hash.

    The folder is loaded again with the model's own transformers class and must have the same weights, bit for
    bit, or PerpendError. InputError for a folder that holds something.
    """
    from perpend.training.export import apply_if_variant, write_variant

    path = Path(folder)
    check_free(folder)
    with explained("create", path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
    digest = weights_hash(model)
    # written beside it and moved when complete: a folder of that name is always a whole model
    with TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as made, without_bars():
        part = Path(made) / "model"
        model.save_pretrained(part)
        write_variant(model, part)
        if tokenizer is not None:
            tokenizer.save_pretrained(part)
        placed = {}
        if is_spread(model):
            placed = {"device_map": "auto", "max_memory": as_placed(model)["max_memory"]}
            placed["offload_folder"] = Path(made) / "offload"
        again = type(model).from_pretrained(part, dtype=next(model.parameters()).dtype, **placed)
        apply_if_variant(again, part)
        if weights_hash(again) != digest:
            raise PerpendError(f"the model saved for {path} does not load with the same weights")
        del again
        full = {**record, "weights_sha256": digest, "dtype": str(next(model.parameters()).dtype)[6:]}
        text = json.dumps(full, indent=1, ensure_ascii=False, allow_nan=False)
        (part / RECORD).write_text(text + "\n", encoding="utf-8")
        if path.exists():
            path.rmdir()
        part.rename(path)
    return {**full, "folder": str(path)}
