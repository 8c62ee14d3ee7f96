"""Arcee: Llama's block with an MLP that has no gate and squares its activation."""

from dataclasses import replace

from perpend.models.families import ScaleGroup
from perpend.models.families.llama import LLAMA as _LLAMA

ARCEE = replace(
    _LLAMA,
    name="arcee",
    model_types=("arcee",),
    # a scale of up_proj does not pass through the squared activation, so none is folded there
    scale_groups=(*_LLAMA.scale_groups[:2], ScaleGroup("post_attention_layernorm", ("mlp.up_proj",))),
)
