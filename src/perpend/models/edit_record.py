"""An edit as data, and as JSON: which site, how far each part is scaled, where.

Edit("value.exclude_self", parallel=0.0, layers=(3, 4)).save("shared.json")
Edit.load("shared.json")
"""

from __future__ import annotations

import json
import operator
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from perpend.errors import InputError, unknown_name

RESIDUAL_SITES = ("residual.attn", "residual.mlp", "residual.block")
VALUE_SITES = ("value.full", "value.exclude_self")
SITES = RESIDUAL_SITES + VALUE_SITES
REFERENCES = ("head", "token")

LARGEST = torch.finfo(torch.float32).max

Scale = float | Sequence[float] | Sequence[Sequence[float]]
"""One number; one per layer; or one per layer and head (value sites)."""


def _numbers(name: str, value: Any) -> torch.Tensor:
    """A scale as a tensor; InputError for what is none."""
    try:
        return torch.as_tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError) as problem:
        raise InputError(
            f"`{name}` is a number, a list by layer, or lists of one length by layer and head; not {value!r}"
        ) from problem


def _indices(name: str, value: Any) -> tuple[int, ...]:
    """Layers or heads; InputError for what is no list of whole numbers, or an empty one."""
    try:
        chosen = tuple(operator.index(index) for index in value)
    except TypeError as problem:
        raise InputError(f"`{name}` is a list of whole numbers such as [0, 3], not {value!r}") from problem
    if not chosen:
        raise InputError(f"`{name}` is empty, so nothing would be edited; leave it out for all {name}")
    return chosen


@dataclass(frozen=True)
class Edit:
    """One edit, as data: what `perpend.edit` takes and what is saved and shared as JSON.

    `parallel`, `perpendicular`: s∥ and s⊥, a number, a list by layer, or a list of lists by layer and
    head (value sites). `layers`, `heads`: those edited, None for all. `reference` (value sites): `head`,
    each query head against the value of its own KV head, or `token`, all heads concatenated; with `heads`,
    `token` applies the common coefficient to those heads only.
    """

    site: str
    parallel: Scale = 1.0
    perpendicular: Scale = 1.0
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    reference: str = "head"

    def __post_init__(self) -> None:
        if not isinstance(self.site, str):
            raise InputError(f"`site` is one of {', '.join(SITES)}, not {self.site!r}")
        if self.site not in SITES:
            if "cross" in self.site:
                raise InputError(
                    f"{self.site}: cross-attention cannot be edited, its keys are another sequence's, so no "
                    f"value is a query's own; sites are {', '.join(SITES)}"
                )
            raise unknown_name("edit site", self.site, SITES)
        if self.reference not in REFERENCES:
            raise unknown_name("reference", self.reference, REFERENCES)
        if self.heads is not None and self.site in RESIDUAL_SITES:
            raise InputError(
                f"{self.site} has no heads: attention's heads are summed before they reach the stream; "
                "use value.full or value.exclude_self, or leave `heads` out"
            )
        for name in ("parallel", "perpendicular"):
            if type(getattr(self, name)) is float and abs(getattr(self, name)) <= LARGEST:
                continue  # the usual case, without a tensor
            scale = _numbers(name, getattr(self, name))
            if scale.ndim > (2 if self.site in VALUE_SITES else 1):
                raise InputError(
                    f"`{name}` has {scale.ndim} axes; {self.site} takes at most layers and heads"
                )
            if not scale.isfinite().all():
                raise InputError(f"`{name}` holds a value that is not finite: {getattr(self, name)}")
            if (scale.abs() > LARGEST).any():
                raise InputError(f"`{name}` holds a value beyond {LARGEST:.2g}, float32's largest")
            object.__setattr__(self, name, scale.tolist())
        for name in ("layers", "heads"):
            chosen = getattr(self, name)
            if chosen is not None:
                object.__setattr__(self, name, _indices(name, chosen))

    @property
    def is_identity(self) -> bool:
        """Whether every scale is 1, so that the model's own path stays untouched."""
        return all(
            scale == 1.0 if isinstance(scale, float) else bool((torch.as_tensor(scale) == 1).all())
            for scale in (self.parallel, self.perpendicular)
        )

    def to_json(self) -> str:
        """The edit as a JSON object with every field."""
        return json.dumps(asdict(self), sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> Edit:
        """Read `to_json`'s form. Raises InputError for anything else, unknown keys included."""
        try:
            document = json.loads(text)
        except json.JSONDecodeError as problem:
            raise InputError(f"an edit is a JSON object, and this is not JSON: {problem}") from problem
        if not isinstance(document, dict):
            raise InputError(f"an edit is a JSON object such as {cls('value.exclude_self', 0.0).to_json()}")
        fields = cls.__dataclass_fields__
        for key in document:
            if key not in fields:
                raise unknown_name("key of an edit", key, fields)
        if "site" not in document:
            raise InputError(f"an edit needs a `site`: one of {', '.join(SITES)}")
        return cls(**document)

    def save(self, path: str | Path) -> None:
        """Write the edit to a JSON file."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Edit:
        """Read an edit from a JSON file."""
        try:
            return cls.from_json(Path(path).read_text(encoding="utf-8"))
        except OSError as problem:
            raise InputError(f"cannot read the edit {path}: {problem.strerror or problem}") from problem
        except UnicodeDecodeError as problem:
            raise InputError(
                f"{path} is no text: an edit is a JSON file, as Edit.save writes it"
            ) from problem
