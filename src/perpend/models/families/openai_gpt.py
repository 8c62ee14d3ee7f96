"""GPT-1: LayerNorm after each addition."""

from perpend.models.families import Family

OPENAI_GPT = Family(
    name="openai_gpt",
    model_types=("openai-gpt",),
    blocks="h",
    form="post_norm",
    attention="attn",
    mlp="mlp",
    attn_update="attn",
    mid="mlp",
    mlp_update="mlp",
    sums=("ln_1", "ln_2"),
    out_proj="attn.c_proj",
    mlp_outputs=("mlp.c_proj.weight", "mlp.c_proj.bias"),
)
