# %% [markdown]
# # Audits: what a conclusion rests on
# Signatures of heads are saved once; every question below is asked of them without running a model again:
# which metric, which convention, which temperature, which mean decides what one would report.

# %%
import numpy as np

import perpend
from perpend import texts
from perpend.report.page import figures_of
from perpend.studies.audits import audit_signatures

model, tokenizer = perpend.load()
tokens = texts.sequences(texts.read_text(None), tokenizer, length=128).take(8, seed=0)
survey = perpend.survey_attention(model, tokens)
study = audit_signatures(np.asarray(survey.signatures), sink=[0], arithmetic=np.asarray(survey.arithmetic))
study.findings

# %% [markdown]
# Do the same heads fall into the same clusters with the sink and without? 1 is the same partition, 0 what
# chance gives. Content distances cannot tell the conventions apart; the classical ones can.

# %%
study.tables["taxonomy"].round(3).head(12)

# %%
figures = {figure.title: figure for figure in figures_of(study, "audit")}
next(iter(figures.values()))

# %% [markdown]
# A statistic of one's own: the largest share in a head's mean row, as a ranking of heads. `perpend.audit`
# runs it under every combination of conventions, and says which choice decides the ranking.


# %%
def sharpest(rows):  # (heads, keys), probabilities that sum to one
    return rows.max(-1)


choices = perpend.audit(model, sharpest, tokens=tokens, windows=(32, 64))
choices.findings

# %%
choices.tables["shares"].round(3)
