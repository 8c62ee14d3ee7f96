# %% [markdown]
# # Compression: does the error hurt through its part across?
# Four-bit rounding of every matrix, and each layer's error split along and across what the layer adds.

# %%
import tempfile

from perpend import cli
from perpend.report.page import figures_of
from perpend.runs import Run

out = tempfile.mkdtemp() + "/run"
words = "compress --method rtn:4 --sequences 4 --length 96 --error-sequences 2 --seed 0 --quiet"
assert cli.run([*words.split(), "--out", out]) == 0

# %% [markdown]
# A run folder reads back with its findings, tables and figures.

# %%
run = Run.open(out)
for finding in run.document["findings"]:
    print("·", finding)

# %%
figures_of(run)[0]

# %%
run.tables["layers"].round(3).head(9)
