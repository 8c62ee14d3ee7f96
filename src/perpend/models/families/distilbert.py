"""DistilBERT: BERT's block with plainer names."""

from perpend.models.families import Family, ScaleGroup

DISTILBERT = Family(
    name="distilbert",
    model_types=("distilbert",),
    blocks="layer",
    form="post_norm",
    attention="attention",
    mlp="ffn",
    attn_update="attention",
    mid="ffn",
    mlp_update="ffn",
    sums=("sa_layer_norm", "output_layer_norm"),
    out_proj="attention.out_lin",
    scale_groups=(ScaleGroup("attention.v_lin", ("attention.out_lin",)),),
    mlp_outputs=("ffn.lin2.weight", "ffn.lin2.bias"),
)
