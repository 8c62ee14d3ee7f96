"""GPT-Neo and GPT-BigCode (StarCoder, SantaCoder): GPT-2's block with linear layers."""

from dataclasses import replace

from perpend.models.families import ScaleGroup
from perpend.models.families.gpt2 import GPT2 as _GPT2

GPT_NEO = replace(
    _GPT2,
    name="gpt_neo",
    model_types=("gpt_neo", "gpt_bigcode"),
    attention="attn.attention|attn",
    out_proj="attn.attention.out_proj|attn.c_proj",
    scale_groups=(
        ScaleGroup(
            "ln_1",
            ("attn.attention.q_proj", "attn.attention.k_proj", "attn.attention.v_proj", "attn.c_attn"),
        ),
        ScaleGroup("attn.attention.v_proj", ("attn.attention.out_proj",)),
        ScaleGroup("ln_2", ("mlp.c_fc",)),
    ),
)
