"""Where a model keeps its blocks, and a block its parts, by the family records of `families/`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.families import Family, ScaleGroup, known
from perpend.models.placement import stored

PARTS = ("attn", "mlp", "block")


@dataclass(frozen=True)
class Block:
    """One block of a model and, where the family is known, its parts."""

    index: int
    name: str  # qualified name in the model
    module: nn.Module
    family: Family | None

    @property
    def attention(self) -> nn.Module | None:
        """The token mixer: attention, or linear attention in a hybrid."""
        return self.find(self.family.attention) if self.family else None

    @property
    def mlp(self) -> nn.Module | None:
        """The MLP where it is one module (OPT and BERT have two linears in the block itself)."""
        return self.find(self.family.mlp) if self.family else None

    @property
    def out_proj(self) -> nn.Module | None:
        """W_O, the projection that reads the value aggregate."""
        return self.find(self.family.out_proj) if self.family else None

    def projection(self, heads: int) -> Tensor | None:
        """W_O's weight as [d, heads, d_v], head by head; None where no known module holds it in that form."""
        module = self.out_proj
        if module is None or not hasattr(module, "weight") or module.weight.ndim != 2:
            return None
        weight = stored(module, "weight")
        weight = weight if isinstance(module, nn.Linear) else weight.T
        return None if weight.shape[1] % heads else weight.unflatten(1, (heads, -1))

    @property
    def linears(self) -> dict[str, nn.Module]:
        """Linear and Conv1D layers in the block by their path; fused expert tensors are not among them."""
        from transformers.pytorch_utils import Conv1D

        return {
            name: module
            for name, module in self.module.named_modules()
            if isinstance(module, (nn.Linear, Conv1D))
        }

    @property
    def scale_groups(self) -> tuple[ScaleGroup, ...]:
        """The family's scale groups with the names this block has; groups without any are left out."""
        found = []
        for group in self.family.scale_groups if self.family else ():
            present = tuple(path for path in group.linears if self.find(path) is not None)
            if present and self.find(group.source) is not None:
                found.append(ScaleGroup(group.source, present))
        return tuple(found)

    @property
    def multiplier(self) -> float:
        """What the block multiplies both contributions by before it adds them."""
        if self.family is None or not self.family.multiplier:
            return 1.0
        return float(getattr(self.module, self.family.multiplier))

    def find(self, path: str) -> nn.Module | None:
        """The submodule at a path, or at the first of its alternatives that exists; None if none does."""
        for alternative in path.split("|"):
            found = _descend(self.module, alternative)
            if found is not None:
                return found
        return None


def family(model: nn.Module) -> Family:
    """The family record of a model's text decoder (or encoder); its InputError says how to add one."""
    found = family_or_none(model)
    if found is None:
        raise InputError(how_to_add(model))
    return found


def blocks(model: nn.Module) -> tuple[Block, ...]:
    """The blocks of a model in the order in which the stream passes them.

    In a multimodal wrapper these are the decoder's, never the vision tower's. Without an adapter the longest
    list of like modules is taken, and the blocks have no parts. Raises InputError if there is no such list.
    """
    config = text_config(model)
    found = _record(config)
    _, name, modules = locate(model, found)
    count = getattr(config, found.repeats) if found and found.repeats else len(modules)
    return tuple(
        Block(i, f"{name}.{i % len(modules)}", modules[i % len(modules)], found) for i in range(count)
    )


def parts_of(model: nn.Module) -> tuple[str, ...]:
    """The parts that can be seen in this model: all three, or the block alone without an adapter."""
    return PARTS if family_or_none(model) is not None else ("block",)


def text_config(model: nn.Module) -> Any:
    """The config of the text decoder inside a wrapper, the model's own config otherwise, None without any."""
    config = getattr(model, "config", None)
    inner = getattr(config, "get_text_config", None)
    return inner(decoder=True) if inner is not None else config


def family_or_none(model: nn.Module) -> Family | None:
    """The family record that fits the model's config, None without one."""
    return _record(text_config(model))


def _record(config: Any) -> Family | None:
    """The family record that fits a text decoder's config, None without one."""
    kind = getattr(config, "model_type", None)
    for record in known():
        if kind in record.model_types and all(
            getattr(config, key, None) == value for key, value in record.when.items()
        ):
            return record
    return None


def locate(model: nn.Module, record: Family | None) -> tuple[nn.Module, str, list[nn.Module]]:
    """The module that owns the list of blocks, the list's qualified name, and the blocks."""
    if record is not None:
        for name, module in _text_modules(model):
            found = _descend(module, record.blocks)
            if isinstance(found, nn.ModuleList) and len(found):
                below = next(path for path, one in module.named_modules() if one is found)  # a wrapper's too
                return module, ".".join(filter(None, (name, below))), list(found)
        raise InputError(
            f"{type(model).__name__} is of family {record.name!r} but has no list of blocks {record.blocks!r}"
        )
    lists = [
        (name, list(module))
        for name, module in _text_modules(model)
        if isinstance(module, nn.ModuleList) and len({type(item) for item in module}) == 1
    ]
    # a list inside a block (experts, say) can be longer than the list of blocks: outermost ones only
    outer = [
        (name, items)
        for name, items in lists
        if not any(name.startswith(other + ".") for other, _ in lists if other != name)
    ]
    if not outer:
        raise InputError(f"{type(model).__name__} has no list of like modules to take for its blocks")
    name, items = max(outer, key=lambda pair: len(pair[1]))
    return model.get_submodule(name.rpartition(".")[0]), name, items


def _text_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Named modules, without those under another model's config (a vision tower, an audio encoder)."""
    config = getattr(model, "config", None)
    own: set[str | None] = set()

    def walk(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        # a module's own __getattr__ for a name it lacks is slow
        inner = getattr(module, "config", None) if _forwards(module) else vars(module).get("config")
        kind = None if inner is config else getattr(inner, "model_type", None)
        if kind is not None:
            if not own:
                own.update(getattr(c, "model_type", None) for c in (config, text_config(model)))
            if kind not in own:
                return
        yield name, module
        for child_name, child in module.named_children():
            yield from walk(f"{name}.{child_name}" if name else child_name, child)

    return walk("", model)


def how_to_add(model: nn.Module) -> str:
    config = text_config(model)
    kind = getattr(config, "model_type", type(model).__name__)
    return (
        f"perpend has no adapter for {kind!r}, so attention and MLP contributions are unknown. To add one, "
        "put one file with a Family record into perpend/models/families (llama.py there is the pattern): "
        "model_type and the names of the submodules whose outputs are added to the stream"
    )


def _forwards(module: nn.Module) -> bool:
    """Whether it is a wrapper that hands on what it is asked and does not have."""
    return type(module).__getattr__ is not nn.Module.__getattr__


def _descend(module: nn.Module, path: str) -> nn.Module | None:
    for name in path.split("."):
        found = module._modules.get(name)  # getattr raises, slowly, for a name that is not there
        if found is None and _forwards(module):
            found = getattr(module, name, None)
        if not isinstance(found, nn.Module):
            return None
        module = found
    return module
