"""GPT-2: LayerNorm before each sub-layer, Conv1D for linear layers (weights stored transposed)."""

from perpend.models.families import Family, ScaleGroup

GPT2 = Family(
    name="gpt2",
    model_types=("gpt2",),
    blocks="h",
    form="sequential",
    attention="attn",
    mlp="mlp",
    attn_update="attn",
    mid="ln_2",
    mlp_update="mlp",
    out_proj="attn.c_proj",
    scale_groups=(ScaleGroup("ln_1", ("attn.c_attn",)), ScaleGroup("ln_2", ("mlp.c_fc",))),
    mlp_outputs=("mlp.c_proj.weight", "mlp.c_proj.bias"),
)
