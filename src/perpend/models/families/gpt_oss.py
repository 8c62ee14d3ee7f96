"""gpt-oss: Llama's block with learned sinks in attention and experts with biases."""

from dataclasses import replace

from perpend.models.families.llama import LLAMA as _LLAMA

GPT_OSS = replace(
    _LLAMA,
    name="gpt_oss",
    model_types=("gpt_oss",),
    mlp_outputs=("mlp.experts.down_proj", "mlp.experts.down_proj_bias"),
)
