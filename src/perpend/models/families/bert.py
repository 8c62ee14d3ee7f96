"""BERT, RoBERTa, ELECTRA and their like: LayerNorm after each addition, inside the output modules."""

from perpend.models.families import Family, ScaleGroup

BERT = Family(
    name="bert",
    model_types=(
        "bert",
        "roberta",
        "xlm-roberta",
        "camembert",
        "electra",
        "ernie",
        "data2vec-text",
        "roc_bert",
        "bert-generation",
    ),
    blocks="layer",
    form="post_norm",
    attention="attention.self",
    attn_update="attention.output.dropout",
    mid="intermediate",
    mlp_update="output.dropout",
    sums=("attention.output.LayerNorm", "output.LayerNorm"),
    out_proj="attention.output.dense",
    scale_groups=(ScaleGroup("attention.self.value", ("attention.output.dense",)),),
    mlp_outputs=("output.dense.weight", "output.dense.bias"),
)
