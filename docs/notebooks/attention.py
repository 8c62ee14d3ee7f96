# %% [markdown]
# # Attention rows: the sink and the rest
# A dominant sink hides what the rest of a row says. This notebook surveys a real pretrained model and asks
# which conclusions turn on whether the sink was kept.

# %%
import perpend
from perpend import texts
from perpend.report.page import figures_of
from perpend.studies.attention import attention_study

model, tokenizer = perpend.load()  # SmolLM2-135M-Instruct, from the package registry
tokens = texts.sequences(texts.read_text(None), tokenizer, length=128).take(8, seed=0)

# %% [markdown]
# One pass over the text; rows come from queries and keys of the kept columns, so nothing underflows.

# %%
survey = perpend.survey_attention(model, tokens, block=1)
study = attention_study({0: survey}, triples=10_000, replicates=50)
study

# %% [markdown]
# Which heads give their attention to the sink? Depth runs to the right.

# %%
figures = {figure.title: figure for figure in figures_of(study, "attention")}
figures["Sink mass by head"]

# %% [markdown]
# Where the entropy falls, does the content narrow or does the sink grow?

# %%
figures["Entropy split"]

# %% [markdown]
# The tables are pandas DataFrames.

# %%
study.tables["reversal"].round(3)
