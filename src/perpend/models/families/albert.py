"""ALBERT: one block, run again and again. Each pass through it is a layer of its own here."""

from perpend.models.families import Family, ScaleGroup

ALBERT = Family(
    name="albert",
    model_types=("albert",),
    when={"num_hidden_groups": 1, "inner_group_num": 1},
    blocks="albert_layer_groups.0.albert_layers",
    repeats="num_hidden_layers",
    form="post_norm",
    attention="attention",
    attn_update="attention.output_dropout",
    mid="ffn",
    mlp_update="ffn_output",
    sums=("attention.LayerNorm", "full_layer_layer_norm"),
    out_proj="attention.dense",
    scale_groups=(ScaleGroup("attention.value", ("attention.dense",)),),
    mlp_outputs=("ffn_output.weight", "ffn_output.bias"),
)
