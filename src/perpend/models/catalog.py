"""The models that perpend knows by a short name, with the facts that their measurements need.

    entry = find("pythia-160m")        # None for a name that is not here
    entry.hub, entry.layers, entry.window, entry.sink

The table itself is catalog.json. Its sizes are those of the published configurations; a test rebuilds each
model without weights from them and compares the parameter count.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from perpend.models._wheel import Wheel

DEFAULT = "smollm2-135m-instruct"
# the checkpoints of one training run that the attention paper reads, on the hub as branches of each Pythia
PYTHIA_REVISIONS = tuple(
    f"step{n}" for n in (512, 1000, 2000, 4000, 8000, 16000, 32000, 64000, 128000, 143000)
)


@dataclass(frozen=True)
class Entry:
    """One model. Counts are of query heads and of trained parameters, tied ones once."""

    name: str
    hub: str  # owner/name on the model hub
    family: str  # transformers' model_type
    architecture: str  # the class its weights are for
    parameters: int
    layers: int
    heads: int
    kv_heads: int
    width: int
    head_dim: int
    ffn: int  # of one expert, where there are several
    vocabulary: int  # 0: not a language model
    context: int  # positions the model was made for; of an image model: tokens of one image
    dtype: str  # what the paper ran it in where the paper says so, else the dtype of its checkpoint
    adds_bos: bool  # its tokenizer opens a text with a token of its own, as the model was trained
    sink: str = "first"
    window: int | None = 64  # keys of the fixed support; None: all
    length: int | None = 192  # tokens a sequence
    stack: str = "model.layers"  # path of the blocks that its numbers speak of
    licence: str = "apache-2.0"
    gated: bool = False  # the hub asks for an accepted licence and a token
    revisions: tuple[str, ...] = ()  # training checkpoints that a paper used, or that a second family has
    papers: tuple[str, ...] = ()  # "attention", "directional"
    wheel: Wheel | None = None  # the package that carries it: no hub is needed
    note: str = ""

    @property
    def modality(self) -> str:
        return "text" if self.vocabulary else "image"


def _entry(row: dict[str, Any]) -> Entry:
    """One row of the table, with what follows from the rest of it filled in."""
    row = {
        "kv_heads": row["heads"],
        "head_dim": row["width"] // row["heads"],
        "ffn": 4 * row["width"],
        "revisions": PYTHIA_REVISIONS if row["name"].startswith("pythia-") else (),
        **row,
    }
    wheel = row.pop("wheel", None)
    lists = {name: tuple(row.get(name, ())) for name in ("papers", "revisions")}
    return Entry(**row | lists, wheel=Wheel(**wheel) if wheel else None)


def _table() -> dict[str, Entry]:
    rows = json.loads(files("perpend.models").joinpath("catalog.json").read_text(encoding="utf-8"))
    return {row["name"]: _entry(row) for row in rows}


CATALOG: dict[str, Entry] = _table()


def find(name: str) -> Entry | None:
    """The entry of a short name, in any case, or of a hub name that is in the table."""
    wanted = name.lower()
    return CATALOG.get(wanted) or next((e for e in CATALOG.values() if e.hub.lower() == wanted), None)
