# %% [markdown]
# # Edits: one part scaled, the other left alone
# An edit holds inside a `with`; leaving it restores the model, bit for bit.

# %%
import torch

import perpend
from perpend import texts

model, tokenizer = perpend.load()
tokens = texts.sequences(texts.read_text(None), tokenizer, length=128).take(4, seed=0)


def loss() -> float:
    """Nats per token."""
    with torch.no_grad():
        return float(model(tokens, labels=tokens).loss)


before = loss()
rows = []
for site in ("value.exclude_self", "residual.mlp"):
    for parallel, perpendicular in ((0.0, 1.0), (1.0, 0.0)):
        with perpend.edit(model, site=site, parallel=parallel, perpendicular=perpendicular):
            rows.append((site, parallel, perpendicular, loss() - before))
assert loss() == before

# %% [markdown]
# What the loss pays for removing the part along the reference, and the part across it.

# %%
import pandas as pd

table = pd.DataFrame(rows, columns=["site", "parallel", "perpendicular", "loss_rise"]).round(3)
table

# %%
from perpend.report import Figure, charts

table["edit"] = table["site"] + table["parallel"].map({0.0: ", without ∥", 1.0: ", without ⊥"})
Figure(
    title="What removal costs",
    question="Which part carries the computation?",
    chart=charts.bars(table, "loss_rise", by="edit", label="rise of the loss, nats a token"),
    table=table,
    how_to_read="Bars near zero mark what the model does not miss.",
)
