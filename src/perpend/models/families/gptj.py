"""GPT-J: parallel block, one norm for both branches."""

from perpend.models.families import Family, ScaleGroup

GPTJ = Family(
    name="gptj",
    model_types=("gptj",),
    blocks="h",
    form="parallel",
    attention="attn",
    mlp="mlp",
    attn_update="attn",
    mlp_update="mlp",
    out_proj="attn.out_proj",
    scale_groups=(
        ScaleGroup("ln_1", ("attn.q_proj", "attn.k_proj", "attn.v_proj", "mlp.fc_in")),
        ScaleGroup("attn.v_proj", ("attn.out_proj",)),
    ),
    mlp_outputs=("mlp.fc_out.weight", "mlp.fc_out.bias"),
)
