# %% [markdown]
# # Without a model: the numbers that synthetic rows give
# Witnesses, thresholds, bands and the calibration curve, recomputed beside the printed values.

# %%
import tempfile

from perpend import cli
from perpend.report.page import figures_of
from perpend.runs import Run

out = tempfile.mkdtemp() + "/run"
assert cli.run(["simulate", "--samples", "2000", "--quiet", "--out", out]) == 0

# %%
figures = {figure.title: figure for figure in figures_of(Run.open(out))}
figures["Calibration curves (Figure 3)"]

# %%
list(figures)
