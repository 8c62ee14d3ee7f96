"""Which of an image model's tokens are what: class token, registers, patches, found by changing parameters.

    roles = find_roles(model, images)
    roles.positions("cls"), roles.positions("registers"), roles.found       # {"cls": "embeddings.cls_token"}

No position is assumed. A learned token is a parameter; where its values change, exactly the tokens made from
it have other queries in the first attention layer, and those positions are its role's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.attention import AttentionCall, attach
from perpend.models.placement import held

NAMES = {
    "cls": re.compile(r"(^|[._])(cls_token|class_token|class_embedding|cls_embedding)s?$"),
    "registers": re.compile(r"(^|[._])(register_tokens?|registers?|reg_token|storage_tokens)$"),
    "distillation": re.compile(r"(^|[._])(distillation_token|dist_token)$"),
}


class _Seen(Exception):
    """Ends a pass at the first attention layer: nothing after it is needed."""


@dataclass(frozen=True)
class Roles:
    """Positions of each role among `length` tokens; `found`: role → the parameter that makes it.

    Every position without a learned token is a patch.
    """

    length: int
    roles: Mapping[str, tuple[int, ...]]
    found: Mapping[str, str]

    @property
    def patches(self) -> tuple[int, ...]:
        taken = {position for places in self.roles.values() for position in places}
        return tuple(position for position in range(self.length) if position not in taken)

    def positions(self, names: str) -> tuple[int, ...]:
        """Positions of one role or of several by comma; InputError where the model has none of them."""
        chosen: set[int] = set()
        for name in (part.strip() for part in names.split(",")):
            places = self.patches if name == "patches" else self.roles.get(name, ())
            if not places:
                raise InputError(f"this model has no {name}; {self.words}")
            chosen |= set(places)
        return tuple(sorted(chosen))

    @property
    def words(self) -> str:
        """What was found, in a sentence."""
        told = [f"{name} at {_span(places)} (from {self.found[name]})" for name, places in self.roles.items()]
        return f"found: {'; '.join([*told, f'{len(self.patches)} patches'])}"

    def describe(self) -> dict[str, object]:
        """Plain values for a run."""
        return {
            "length": self.length,
            "positions": {name: list(places) for name, places in self.roles.items()},
            "parameters": dict(self.found),
            "patches": len(self.patches),
        }


def find_roles(model: nn.Module, pixels: Tensor) -> Roles:
    """Roles of the tokens that `model` makes of images like `pixels` [n, C, H, W]; the first image is used.

    Parameters are put back, bit for bit. Raises InputError where the model's first attention layer does not
    see one sequence of tokens.
    """
    image = pixels[:1]
    before = _queries(model, image)
    roles: dict[str, tuple[int, ...]] = {}
    found: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name, _ in model.named_parameters()]:
        role = next((role for role, pattern in NAMES.items() if pattern.search(name)), None)
        if role is None:
            continue
        path, _, leaf = name.rpartition(".")
        with held(owner := model.get_submodule(path)):
            parameter = getattr(owner, leaf)
            kept = parameter.detach().clone()
            try:
                with torch.no_grad():  # noise, not a constant: a norm before the queries would take that out
                    noise = torch.randn(parameter.shape, generator=generator)
                    parameter += noise.to(parameter.device, parameter.dtype)
                after = _queries(model, image)
            finally:
                with torch.no_grad():
                    parameter.copy_(kept)
        moved = (after != before).any(-1).nonzero()[:, 0].tolist()
        if moved and len(moved) < len(before):
            roles[role] = tuple(sorted({*roles.get(role, ()), *moved}))
            found[role] = name
    return Roles(len(before), roles, found)


def _queries(model: nn.Module, image: Tensor) -> Tensor:
    """The first attention layer's queries, (tokens, heads · width)."""
    from perpend.models.inputs import run_trunk

    seen: list[Tensor] = []

    def look(call: AttentionCall, output: Tensor) -> None:
        seen.append(call.query[0].transpose(0, 1).flatten(1).clone())
        raise _Seen

    with torch.no_grad(), suppress(_Seen), attach(model, look):
        run_trunk(model, image)
    if not seen:
        raise InputError("the model called none of its attention layers on this image")
    return seen[0]


def _span(places: tuple[int, ...]) -> str:
    if len(places) == 1:
        return f"token {places[0]}"
    if places == tuple(range(places[0], places[-1] + 1)):
        return f"tokens {places[0]} to {places[-1]}"
    return f"tokens {', '.join(map(str, places))}"
