"""GLM-4: norms before and after both sub-layers, under names of its own; gate and up fused."""

from perpend.models.families import Family, ScaleGroup

GLM4 = Family(
    name="glm4",
    model_types=("glm4",),
    blocks="layers",
    form="sequential",
    attention="self_attn",
    mlp="mlp",
    attn_update="post_self_attn_layernorm",
    mid="post_attention_layernorm",
    mlp_update="post_mlp_layernorm",
    out_proj="self_attn.o_proj",
    scale_groups=(
        ScaleGroup("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_up_proj",)),
    ),
    mlp_outputs=("mlp.down_proj.weight",),
)
