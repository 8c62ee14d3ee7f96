"""Gemma 2 and 3: norms before and after both sub-layers; what is added comes out of the second one."""

from perpend.models.families import Family, ScaleGroup

GEMMA_SANDWICH = Family(
    name="gemma_sandwich",
    model_types=("gemma2", "gemma3_text"),
    blocks="layers",
    form="sequential",
    attention="self_attn",
    mlp="mlp",
    attn_update="post_attention_layernorm",
    mid="pre_feedforward_layernorm",
    mlp_update="post_feedforward_layernorm",
    out_proj="self_attn.o_proj",
    norm_offset=1.0,
    scale_groups=(
        ScaleGroup("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)),
        ScaleGroup("pre_feedforward_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",)),
    ),
    mlp_outputs=("mlp.down_proj.weight",),
)
