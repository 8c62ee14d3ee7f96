"""Phi (1, 1.5, 2): parallel block, one norm for both branches."""

from perpend.models.families import Family, ScaleGroup

PHI = Family(
    name="phi",
    model_types=("phi",),
    blocks="layers",
    form="parallel",
    attention="self_attn",
    mlp="mlp",
    attn_update="self_attn",
    mlp_update="mlp",
    out_proj="self_attn.dense",
    scale_groups=(
        ScaleGroup(
            "input_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.fc1")
        ),
        ScaleGroup("self_attn.v_proj", ("self_attn.dense",)),
    ),
    mlp_outputs=("mlp.fc2.weight", "mlp.fc2.bias"),
)
