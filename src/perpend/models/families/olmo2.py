"""OLMo-2 and its like: no norm before a sub-layer, one after it; the MLP reads the mid-stream itself."""

from perpend.models.families import Family, ScaleGroup

OLMO2 = Family(
    name="olmo2",
    model_types=("olmo2", "olmo3", "exaone4"),
    blocks="layers",
    form="sequential",
    attention="self_attn",
    mlp="mlp",
    attn_update="post_attention_layernorm",
    mid="mlp",
    mlp_update="post_feedforward_layernorm",
    out_proj="self_attn.o_proj",
    scale_groups=(
        # q, k, v, gate and up read the stream: there is no module a scale could be folded into
        ScaleGroup("self_attn.v_proj", ("self_attn.o_proj",)),
        ScaleGroup("mlp.up_proj", ("mlp.down_proj",)),
    ),
    mlp_outputs=("mlp.down_proj.weight",),
)
