"""BLOOM: its sub-modules return the stream after the addition, so the projections inside them are read.

With `slow_but_exact` the projections are bypassed (their check fails and says so), and with
`apply_residual_connection_post_layernorm` the stream is replaced by its norm: no adapter.
"""

from perpend.models.families import Family, ScaleGroup

BLOOM = Family(
    name="bloom",
    model_types=("bloom",),
    when={"apply_residual_connection_post_layernorm": False},
    blocks="h",
    form="sequential",
    attention="self_attention",
    mlp="mlp",
    attn_update="self_attention.dense",
    mid="post_attention_layernorm",
    mlp_update="mlp.dense_4h_to_h",
    out_proj="self_attention.dense",
    scale_groups=(
        ScaleGroup("input_layernorm", ("self_attention.query_key_value",)),
        ScaleGroup("post_attention_layernorm", ("mlp.dense_h_to_4h",)),
    ),
    mlp_outputs=("mlp.dense_4h_to_h.weight", "mlp.dense_4h_to_h.bias"),
)
