"""Llama's block with a mixture of experts for its MLP: Qwen3-MoE, Mixtral, OLMoE and their like.

The experts' weights are fused tensors, so the scale groups of the MLP hold for the dense layers alone.
"""

from dataclasses import replace

from perpend.models.families.llama import LLAMA as _LLAMA

MIXTURE = replace(
    _LLAMA,
    name="mixture",
    model_types=(
        "qwen3_moe",
        "qwen2_moe",
        "mixtral",
        "olmoe",
        "dots1",
        "ernie4_5_moe",
        "glm4_moe",
        "hunyuan_v1_moe",
        "minimax_m2",
        "phimoe",
        "qwen3_vl_moe_text",
    ),
    mlp_outputs=(
        "mlp.down_proj.weight",
        "mlp.experts.down_proj",
        "mlp.shared_expert.down_proj.weight",
        "mlp.shared_experts.down_proj.weight",
        "mlp.shared_mlp.down_proj.weight",
    ),
)
