"""GPT-NeoX and Pythia: two norms, and either both branches on the block's input or one after the other."""

from dataclasses import replace

from perpend.models.families import Family, ScaleGroup

PARALLEL = Family(
    name="gpt_neox",
    model_types=("gpt_neox",),
    when={"use_parallel_residual": True},
    blocks="layers",
    form="parallel",
    attention="attention",
    mlp="mlp",
    attn_update="post_attention_dropout",
    mlp_update="post_mlp_dropout",
    out_proj="attention.dense",
    scale_groups=(
        ScaleGroup("input_layernorm", ("attention.query_key_value",)),
        ScaleGroup("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
    ),
    mlp_outputs=("mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.bias"),
)

SEQUENTIAL = replace(
    PARALLEL,
    name="gpt_neox_sequential",
    when={"use_parallel_residual": False},
    form="sequential",
    mid="post_attention_layernorm",
)
