# %% [markdown]
# # Two checkpoints: where do their updates differ, and along or across?
# A small decoder, early and late in a short training. The late one's updates are set against the early one's,
# layer by layer, each difference split along what the layer adds to the stream and across it.

# %%
import contextlib
import io
import tempfile
from pathlib import Path

from perpend import cli, texts
from perpend.report.page import figures_of
from perpend.runs import Run
from perpend.training.data import prepare
from perpend.training.model import shape
from perpend.training.recipe import Recipe
from perpend.training.trainer import Rhythm, train

folder = tempfile.TemporaryDirectory()
work = Path(folder.name)
(work / "corpus.txt").write_text(texts.read_text(None).text[:400_000])  # English that comes with Python
data = prepare(work / "corpus.txt", work / "data", vocab=512, valid=0.25)
recipe = Recipe(steps=60, batch=8, context=64, lr=4e-3, warmup=10)
rhythm = Rhythm(log=60, evaluate=60, sequences=8, snapshot=20)
train(shape("tiny", vocab=data.vocab, context=64), "baseline", data, recipe, work / "run", rhythm=rhythm)
early, *_, late = sorted((work / "run" / "snapshots").iterdir())
early.name, late.name

# %%
words = f"compare {early} {late} --text {work / 'corpus.txt'} --sequences 8 --length 64 --quiet"
with contextlib.redirect_stdout(io.StringIO()):  # the tables below say what the verb prints
    assert cli.run([*words.split(), "--out", str(work / "compared")]) == 0
run = Run.open(work / "compared")
for finding in run.document["findings"]:
    print("·", finding)

# %% [markdown]
# Sizes are relative to the early update's. κ is the change along it; rotation the cosine of late and early.

# %%
columns = ["mode", "part", "layer", "perpendicular", "parallel", "kappa", "rotation"]
run.tables["layers"][columns].round(3).head(6)

# %%
figures = figures_of(run)
folder.cleanup()
figures[0]

# %% [markdown]
# The error across lies far above the error along: training has turned what each layer says more than it has
# changed how loudly it says it.
