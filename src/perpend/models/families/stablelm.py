"""StableLM: Llama's block with LayerNorm, in its sequential and its parallel form (one norm for both)."""

from dataclasses import replace

from perpend.models.families import ScaleGroup
from perpend.models.families.llama import LLAMA as _LLAMA

SEQUENTIAL = replace(
    _LLAMA,
    name="stablelm",
    model_types=("stablelm",),
    when={"use_parallel_residual": False},
    mlp_update="dropout",
)

PARALLEL = replace(
    SEQUENTIAL,
    name="stablelm_parallel",
    when={"use_parallel_residual": True},
    form="parallel",
    mid="",
    scale_groups=(
        ScaleGroup(
            "input_layernorm",
            ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"),
        ),
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",)),
    ),
)
