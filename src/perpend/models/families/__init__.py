"""What a family of models adds to its stream, and where: data, one small file per family.

**Adding a family is adding one file here** that holds one or more `Family` records; nothing else changes.
Every module of this folder is imported and its public records are collected. A path names a submodule
relative to the block ("self_attn.o_proj"); alternatives for blocks that differ within one model are written
"self_attn|linear_attn".

Three forms of block, x the block's input, y its output, a and m what attention and MLP add:

    sequential   mid = x + a(norm(x));       y = mid + m(norm(mid))     Llama, GPT-2, ViT, Gemma, ...
    parallel     mid = x;                    y = x + a + m              GPT-J, Phi, Cohere, GPT-NeoX
    post_norm    mid = norm(x + a(x));       y = norm(mid + m(mid))     BERT, GPT-1, OPT-350m

A contribution is always the output of one submodule (a projection, a post-norm, a LayerScale, a dropout),
times `multiplier` where the block has one. In training mode dropout that the block applies after that
submodule is not in it; the check that runs on attaching says so.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

FORMS = ("sequential", "parallel", "post_norm")


@dataclass(frozen=True)
class ScaleGroup:
    """Linear layers that read one tensor, and the submodule that makes it.

    A per-channel scale of the linears' inputs can be folded into `source` when nothing else reads its output;
    names that a given block lacks are left out when the group is looked up on it.
    """

    source: str
    linears: tuple[str, ...]


@dataclass(frozen=True)
class Family:
    """Where a family's blocks keep what perpend needs. Paths are relative to the block; see the module."""

    name: str
    model_types: tuple[str, ...]  # the config's model_type, of the text decoder in a multimodal wrapper
    blocks: str  # the ModuleList of blocks, relative to the module that owns it
    form: str  # one of FORMS
    attention: str  # the token mixer
    attn_update: str  # the submodule whose output attention adds to the stream
    mlp_update: str  # the submodule whose output the MLP adds to the stream
    out_proj: str  # W_O
    gate: str = ""  # the linear whose upper half in each head, through a sigmoid, multiplies what W_O reads
    mlp: str = ""  # the MLP as one module, where there is one
    mid: str = ""  # the submodule that reads the mid-stream; empty in parallel blocks (mid = block input)
    sums: tuple[str, str] = ("", "")  # post_norm: the norms that read x + a and mid + m
    multiplier: str = ""  # attribute of the block that multiplies both contributions
    when: Mapping[str, object] = field(default_factory=dict)  # config values this record holds for
    scale_groups: tuple[ScaleGroup, ...] = ()
    repeats: str = ""  # config key: the listed blocks are run over and over, this many blocks in all (ALBERT)
    norm_offset: float = 0.0  # norms multiply by (norm_offset + weight): 1 in Gemma and Qwen3-Next
    mlp_outputs: tuple[str, ...] = ()  # parameters of the block that, zeroed, zero the MLP's contribution

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"family {self.name}: form {self.form!r} is none of {FORMS}")
        if (self.form == "parallel") == bool(self.mid):
            raise ValueError(f"family {self.name}: `mid` belongs to every form but parallel")
        if (self.form == "post_norm") != all(self.sums):
            raise ValueError(f"family {self.name}: `sums` belongs to post_norm and to no other form")


@cache
def known() -> tuple[Family, ...]:
    """All family records, in the order of file and record names."""
    found: list[Family] = []
    for entry in sorted(pkgutil.iter_modules(__path__), key=lambda item: item.name):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        found += [
            value
            for key, value in vars(module).items()
            if isinstance(value, Family) and not key.startswith("_")
        ]
    return tuple(found)
