"""ModernBERT: norms before both sub-layers (none before the first attention), gate and up fused."""

from perpend.models.families import Family, ScaleGroup

MODERNBERT = Family(
    name="modernbert",
    model_types=("modernbert",),
    blocks="layers",
    form="sequential",
    attention="attn",
    mlp="mlp",
    attn_update="attn",
    mid="mlp_norm",
    mlp_update="mlp",
    out_proj="attn.Wo",
    scale_groups=(ScaleGroup("mlp_norm", ("mlp.Wi",)),),
    mlp_outputs=("mlp.Wo.weight", "mlp.Wo.bias"),
)
