"""Llama's block, shared by most decoders: RMSNorm before attention and before a gated MLP."""

from perpend.models.families import Family, ScaleGroup

LLAMA = Family(
    name="llama",
    model_types=(
        "llama",
        "mistral",
        "ministral",
        "ministral3",
        "qwen2",
        "qwen3",
        "smollm3",
        "bitnet",
        "cwm",
        "ernie4_5",
        "glm",
        "helium",
        "hunyuan_v1_dense",
        "nanochat",
        "olmo",
        "qwen2_vl_text",
        "qwen2_5_vl_text",
        "qwen3_vl_text",
        "seed_oss",
        "starcoder2",
    ),
    blocks="layers",
    form="sequential",
    attention="self_attn",
    mlp="mlp",
    attn_update="self_attn",
    mid="post_attention_layernorm",
    mlp_update="mlp",
    out_proj="self_attn.o_proj",
    scale_groups=(
        ScaleGroup("input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",)),
    ),
    mlp_outputs=("mlp.down_proj.weight", "mlp.down_proj.bias", "mlp.c_proj.weight", "mlp.c_proj.bias"),
)
