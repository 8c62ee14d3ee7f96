"""OPT: no MLP module of its own, and the MLP runs on tokens laid out flat; the 350m model is post-norm."""

from dataclasses import replace

from perpend.models.families import Family, ScaleGroup

OPT = Family(
    name="opt",
    model_types=("opt",),
    when={"do_layer_norm_before": True},
    blocks="layers",
    form="sequential",
    attention="self_attn",
    attn_update="self_attn",
    mid="final_layer_norm",
    mlp_update="fc2",
    out_proj="self_attn.out_proj",
    scale_groups=(
        ScaleGroup("self_attn_layer_norm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ScaleGroup("self_attn.v_proj", ("self_attn.out_proj",)),
        ScaleGroup("final_layer_norm", ("fc1",)),
        ScaleGroup("fc1", ("fc2",)),  # exact through ReLU for positive scales
    ),
    mlp_outputs=("fc2.weight", "fc2.bias"),
)

OPT_POST_NORM = replace(
    OPT,
    name="opt_post_norm",
    when={"do_layer_norm_before": False},
    form="post_norm",
    mid="fc1",
    sums=("self_attn_layer_norm", "final_layer_norm"),
    # what the norms make is both read by linears and added to the stream: only these two can be folded
    scale_groups=(ScaleGroup("self_attn.v_proj", ("self_attn.out_proj",)), ScaleGroup("fc1", ("fc2",))),
)
