"""Cohere and Cohere2: parallel block, one norm for both branches, gated MLP."""

from perpend.models.families import Family, ScaleGroup

COHERE = Family(
    name="cohere",
    model_types=("cohere", "cohere2"),
    blocks="layers",
    form="parallel",
    attention="self_attn",
    mlp="mlp",
    attn_update="self_attn",
    mlp_update="mlp",
    out_proj="self_attn.o_proj",
    scale_groups=(
        ScaleGroup(
            "input_layernorm",
            (
                "self_attn.q_proj",
                "self_attn.k_proj",
                "self_attn.v_proj",
                "mlp.gate_proj",
                "mlp.up_proj",
            ),
        ),
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",)),
    ),
    mlp_outputs=("mlp.down_proj.weight",),
)
