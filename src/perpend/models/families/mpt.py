"""MPT: its MLP returns the stream after the addition, so the projection inside it is read."""

from perpend.models.families import Family, ScaleGroup

MPT = Family(
    name="mpt",
    model_types=("mpt",),
    blocks="blocks",
    form="sequential",
    attention="attn",
    mlp="ffn",
    attn_update="resid_attn_dropout",
    mid="norm_2",
    mlp_update="ffn.down_proj",
    out_proj="attn.out_proj",
    scale_groups=(ScaleGroup("norm_1", ("attn.Wqkv",)), ScaleGroup("norm_2", ("ffn.up_proj",))),
    mlp_outputs=("ffn.down_proj.weight", "ffn.down_proj.bias"),
)
