"""Qwen3-Next: gated attention in some layers, gated delta rule (no attention rows) in the others; experts."""

from dataclasses import replace

from perpend.models.families import ScaleGroup
from perpend.models.families.mixture import MIXTURE as _MIXTURE

QWEN3_NEXT = replace(
    _MIXTURE,
    name="qwen3_next",
    model_types=("qwen3_next", "qwen3_5_moe_text", "qwen3_5_text"),
    attention="self_attn|linear_attn",
    attn_update="self_attn|linear_attn",
    out_proj="self_attn.o_proj|linear_attn.out_proj",
    gate="self_attn.q_proj",
    norm_offset=1.0,
    scale_groups=(
        ScaleGroup(
            "input_layernorm",
            (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "linear_attn.in_proj_qkvz",
                "linear_attn.in_proj_ba",
            ),
        ),
        # between v_proj and o_proj stands a gate, which a scale passes through
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",)),
    ),
)
