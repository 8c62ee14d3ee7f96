# %% [markdown]
# # Does attention sharpen in training, or does a sink grow?
# Row entropy H falls in training. It may fall because content narrows, or because one key takes over. The two
# are told apart exactly: ΔH = ΔH_b(s) + Δ[(1−s)H(π)].

# %%
import tempfile
from pathlib import Path

import perpend
from perpend import texts
from perpend.report.page import figures_of
from perpend.studies.checkpoints import checkpoint_study, measure
from perpend.training.data import prepare
from perpend.training.model import shape
from perpend.training.recipe import Recipe
from perpend.training.trainer import Rhythm, train

folder = tempfile.TemporaryDirectory()
work = Path(folder.name)
(work / "corpus.txt").write_text(texts.read_text(None).text[:400_000])  # English that comes with Python
data = prepare(work / "corpus.txt", work / "data", vocab=512, valid=0.25)
recipe = Recipe(steps=150, batch=8, context=64, lr=8e-3, warmup=10)
rhythm = Rhythm(log=150, evaluate=150, sequences=8, snapshot=30)
train(shape("toy", vocab=data.vocab, context=64), "baseline", data, recipe, work / "run", rhythm=rhythm)
snapshots = sorted((work / "run" / "snapshots").iterdir())

# %% [markdown]
# Every snapshot reads the same text; `perpend checkpoints run/snapshots` does the same from the command line.

# %%
measured = []
for path in snapshots:
    model, tokenizer = perpend.load(path)
    tokens = texts.sequences(texts.read_text(work / "corpus.txt"), tokenizer, length=64).take(32, seed=0)
    survey = perpend.survey_attention(model, tokens, window=32, block=4)
    step = int(path.name.removeprefix("step-"))
    measured.append(measure(survey, name=path.name, step=step or None, weights=path.name))
folder.cleanup()
study = checkpoint_study(measured)
study.findings

# %%
study.tables["checkpoints"][["checkpoint", "total", "binary", "weighted_content", "sink_mass"]].round(3)

# %%
figures = {figure.title: figure for figure in figures_of(study, "checkpoints")}
figures["Split of the entropy's fall"]

# %% [markdown]
# The bars below ΔH add up to it, exactly, and the longest names the cause: `mean(1−s)·ΔH(π)` is attention
# that sharpened; the terms in which s moves are a sink that grew.
