# %% [markdown]
# # Does the sink grow with size, and do reversals grow with it?
# Three decoders of one family, trained alike for a moment, under one protocol. So small and so briefly
# trained they have hardly a sink: this shows the calls and the reading, not the paper's answer.

# %%
import tempfile
from pathlib import Path

import perpend
from perpend import texts
from perpend.report.page import figures_of
from perpend.studies.scale import measure, scale_study
from perpend.training.data import prepare
from perpend.training.model import shape
from perpend.training.recipe import Recipe
from perpend.training.trainer import Rhythm, train

folder = tempfile.TemporaryDirectory()
work = Path(folder.name)
(work / "corpus.txt").write_text(texts.read_text(None).text[:400_000])  # English that comes with Python
data = prepare(work / "corpus.txt", work / "data", vocab=512, valid=0.25)
recipe = Recipe(steps=40, batch=8, context=64, lr=4e-3, warmup=10)
rhythm = Rhythm(log=40, evaluate=40, sequences=8, snapshot=40)
measured = []
for layers in (2, 3, 4):
    size = shape("tiny", vocab=data.vocab, context=64, layers=layers)
    train(size, "baseline", data, recipe, work / str(layers), rhythm=rhythm)
    model, tokenizer = perpend.load(work / str(layers) / "snapshots" / "step-0000040")
    tokens = texts.sequences(texts.read_text(work / "corpus.txt"), tokenizer, length=64).take(32, seed=0)
    survey = perpend.survey_attention(model, tokens, window=32, block=4)
    name, count = f"{layers} layers", model.num_parameters()
    measured.append(measure(survey, name=name, family="tiny", parameters=count, weights=name, replicates=50))
folder.cleanup()
study = scale_study(measured, curve_triples=2000)
study.findings

# %%
study.tables["models"][["model", "parameters", "row_mass", "signature_mass", "cv"]].round(4)

# %% [markdown]
# The curve is sampled from random heads of a given sink mass, and no model enters it.

# %%
figures = {figure.title: figure for figure in figures_of(study, "scale")}
figures["Reversals and sink mass"]

# %% [markdown]
# A point on the curve reverses as often as its sink mass alone would make it; at the left end, without a
# sink, hardly a verdict turns on the convention.
