"""CLIP's and SigLIP's vision towers, as models of their own."""

from perpend.models.families import Family, ScaleGroup

CLIP_VISION = Family(
    name="clip_vision",
    model_types=("clip_vision_model", "siglip_vision_model"),
    blocks="layers",
    form="sequential",
    attention="self_attn",
    mlp="mlp",
    attn_update="self_attn",
    mid="layer_norm2",
    mlp_update="mlp",
    out_proj="self_attn.out_proj",
    scale_groups=(
        ScaleGroup("layer_norm1", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")),
        ScaleGroup("self_attn.v_proj", ("self_attn.out_proj",)),
        ScaleGroup("layer_norm2", ("mlp.fc1",)),
    ),
    mlp_outputs=("mlp.fc2.weight", "mlp.fc2.bias"),
)
