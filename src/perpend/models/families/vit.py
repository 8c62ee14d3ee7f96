"""ViT, DeiT: LayerNorm before each sub-layer, all tokens visible."""

from perpend.models.families import Family, ScaleGroup

VIT = Family(
    name="vit",
    model_types=("vit", "deit", "vit_msn", "ijepa"),
    blocks="layers",
    form="sequential",
    attention="attention",
    mlp="mlp",
    attn_update="attention",
    mid="layernorm_after",
    mlp_update="mlp",
    out_proj="attention.o_proj",
    scale_groups=(
        ScaleGroup("layernorm_before", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
        ScaleGroup("attention.v_proj", ("attention.o_proj",)),
        ScaleGroup("layernorm_after", ("mlp.fc1",)),
    ),
    mlp_outputs=("mlp.fc2.weight", "mlp.fc2.bias"),
)
