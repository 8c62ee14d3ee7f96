# %% [markdown]
# # Does a task notice an edit?
# "The score stays within half a point" is a claim of equivalence. A test that finds no difference does not
# show it; an interval inside the margin does. So scores are paired, item by item.

# %%
import perpend

model, tokenizer = perpend.load()
options = {"lengths": (384,), "limit": 6}
plain = perpend.evaluate(model, tokenizer, "niah_single_1", **options)
plain.table[["task", "metric", "value", "low", "high", "n"]].round(3)

# %% [markdown]
# One long-context task: a number hidden in 384 tokens of noise, generated for this tokenizer. The same items
# again, while every head's attention is without what lies along its own value and comes from other tokens.

# %%
from perpend.evaluation.paired import compare

with perpend.edit(model, site="value.exclude_self", parallel=0.5):
    edited = perpend.evaluate(model, tokenizer, "niah_single_1", **options)
comparison = compare(plain, edited)
comparison.findings

# %% [markdown]
# The finest reading is the log-likelihood of the right answer, which moves before the score does. The last
# column is the number of items that would show equivalence, if there is any.

# %%
columns = ["quantity", "n", "base", "other", "difference", "low", "high", "verdict", "items_for_equivalence"]
comparison.table[columns].round(3)

# %%
from perpend.report import Figure, charts

table = comparison.table
Figure(
    title="Edited minus unedited",
    question="Do the answers to the same questions change?",
    chart=charts.bars(table, "difference", by="quantity", low="low", high="high"),
    table=table[columns],
    how_to_read="Lines are 95 % intervals; one that includes 0 decides nothing by itself.",
)
