# %% [markdown]
# # Updates: along the stream and across it
# Every layer adds to the residual stream. Along it, an update only lengthens or shortens; across it, it
# turns.

# %%
import perpend
from perpend import texts

model, tokenizer = perpend.load()
tokens = texts.sequences(texts.read_text(None), tokenizer, length=128).take(8, seed=0)
survey = perpend.survey_updates(model, tokens)
survey

# %% [markdown]
# The mean over tokens of ‖Δ∥‖/‖Δ⊥‖ per layer and part, beside what a random direction of this width gives.

# %%
table = survey.table()
table[["layer", "part", "set", "alpha", "ratio", "cosine", "second_order"]].round(3).head(12)

# %% [markdown]
# As a chart, made by one call.

# %%
from perpend.report import Figure, charts

profile = table[table["set"] == "all"].reset_index(drop=True)
Figure(
    title="Parallel over perpendicular",
    question="How much of what a layer adds lies along the stream?",
    chart=charts.profile(profile, "ratio", series="part", log_y=True),
    table=profile,
    how_to_read="Higher is more along the stream.",
)
