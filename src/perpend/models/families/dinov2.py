"""DINOv2, with registers and without: what is added comes out of a LayerScale."""

from perpend.models.families import Family, ScaleGroup

DINOV2 = Family(
    name="dinov2",
    model_types=("dinov2", "dinov2_with_registers"),
    blocks="layer",
    form="sequential",
    attention="attention",
    mlp="mlp",
    attn_update="layer_scale1",
    mid="norm2",
    mlp_update="layer_scale2",
    out_proj="attention.o_proj",
    scale_groups=(
        ScaleGroup("norm1", ("attention.q_proj", "attention.k_proj", "attention.v_proj")),
        ScaleGroup("attention.v_proj", ("attention.o_proj",)),
        ScaleGroup("norm2", ("mlp.fc1",)),
    ),
    mlp_outputs=("mlp.fc2.weight", "mlp.fc2.bias", "mlp.weights_out.weight", "mlp.weights_out.bias"),
)
