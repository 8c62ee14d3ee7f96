"""Phi-3: Llama's block with q, k, v and gate, up fused, and dropout of its own after each sub-layer."""

from dataclasses import replace

from perpend.models.families import ScaleGroup
from perpend.models.families.llama import LLAMA as _LLAMA

PHI3 = replace(
    _LLAMA,
    name="phi3",
    model_types=("phi3",),
    attn_update="resid_attn_dropout",
    mlp_update="resid_mlp_dropout",
    scale_groups=(
        ScaleGroup("input_layernorm", ("self_attn.qkv_proj",)),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_up_proj",)),
    ),
)
