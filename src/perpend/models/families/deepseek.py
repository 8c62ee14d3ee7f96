"""DeepSeek-V2 and V3: latent attention (keys and values differ in width) and experts beside shared ones."""

from dataclasses import replace

from perpend.models.families import ScaleGroup
from perpend.models.families.mixture import MIXTURE as _MIXTURE

DEEPSEEK = replace(
    _MIXTURE,
    name="deepseek",
    model_types=("deepseek_v3", "deepseek_v2", "glm4_moe_lite", "youtu"),
    scale_groups=(
        ScaleGroup(
            "input_layernorm",
            ("self_attn.q_proj", "self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"),
        ),
        ScaleGroup("self_attn.q_a_layernorm", ("self_attn.q_b_proj",)),
        ScaleGroup("self_attn.kv_a_layernorm", ("self_attn.kv_b_proj",)),
        ScaleGroup("post_attention_layernorm", ("mlp.gate_proj", "mlp.up_proj")),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",)),
    ),
)
