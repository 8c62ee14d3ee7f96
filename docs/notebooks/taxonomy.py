# %% [markdown]
# # Do clusters of heads survive dropping the sink?
# Studies of BERT group its heads by how alike their attention is. Much of that likeness is the share each
# head gives to [CLS] or [SEP]. Here the heads of a small BERT are clustered twice, with it and without.

# %%
import perpend
from perpend import texts
from perpend.report.page import figures_of
from perpend.studies.taxonomy_study import taxonomy_study

model, tokenizer = perpend.load("minilm")  # all-MiniLM-L6-v2, from the package registry
tokens = texts.sequences(texts.read_text(None), tokenizer, length=64).take(16, seed=0)
survey = perpend.survey_attention(model, tokens, block=2)
study = taxonomy_study(
    survey.signatures, survey.support.columns.sink, roles={"cls": [0]}, replicates=survey.replicates(50)
)
study.findings

# %% [markdown]
# The adjusted Rand index of the two partitions, by metric and number of clusters: 1 is the same partition, 0
# what chance gives. The content distance is one matrix under both conventions: its clusters cannot differ.

# %%
study.tables["taxonomy"].query("linkage == 'average'").round(3)

# %%
figures = {figure.title: figure for figure in figures_of(study, "taxonomy")}
figures["Clusters between conventions"]

# %% [markdown]
# A bar near 0 is a taxonomy that is gone once the sink is: what had been grouped were shares of the sink.
