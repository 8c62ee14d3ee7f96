# %% [markdown]
# # Pretraining without the parallel part, and what entropy does on the way
# Two small decoders from the same initial weights and the same order of data: one as it is, one without the
# part of its attention that lies along each token's own value. Then the first one's checkpoints: is a falling
# attention entropy content that narrows, or a sink that grows?

# %%
import tempfile
from pathlib import Path

import perpend
from perpend import texts
from perpend.training.data import prepare
from perpend.training.model import shape
from perpend.training.recipe import Recipe
from perpend.training.trainer import Rhythm, train

folder = tempfile.TemporaryDirectory()
work = Path(folder.name)
(work / "corpus.txt").write_text(texts.read_text(None).text)  # the English that comes with Python
data = prepare(work / "corpus.txt", work / "data", vocab=512, valid=0.25)
size = shape("tiny", vocab=data.vocab, context=128)
recipe = Recipe(steps=120, batch=8, context=128, lr=4e-3, warmup=10)
size

# %% [markdown]
# A run is a folder: the curve, a state from which it resumes, and models that `perpend.load` opens.

# %%
rhythm = Rhythm(log=20, evaluate=40, sequences=16, snapshot=40)
runs = {
    variant: train(size, variant, data, recipe, work / variant, rhythm=rhythm)
    for variant in ("baseline", "value-full")
}
runs["baseline"].log.dropna(subset=["valid_loss"])[["step", "tokens", "loss", "valid_loss"]].round(3)

# %% [markdown]
# Differences are taken within a seed. One seed has no interval over seeds: this shows the call, and nothing
# about the variant.

# %%
from perpend.training.compare import compare

compare({(variant, 0): run.log for variant, run in runs.items()}).findings

# %% [markdown]
# The checkpoints of the first run, on the same text.

# %%
from perpend.studies.checkpoints import checkpoint_study, measure

measured = []
for path in sorted((work / "baseline" / "snapshots").iterdir()):
    model, tokenizer = perpend.load(path)
    tokens = texts.sequences(texts.read_text(None), tokenizer, length=96).take(32, seed=0)
    survey = perpend.survey_attention(model, tokens, window=32)
    measured.append(measure(survey, name=path.name, weights=path.name))
study = checkpoint_study(measured)
study.findings

# %%
from perpend.report import Figure, charts

table = study.tables["checkpoints"]
folder.cleanup()
Figure(
    title="Entropy along a short run",
    question="Is it the sink that grows, or the content that narrows?",
    chart=charts.profile(
        table,
        {"total": "H: whole row", "binary": "H_b(s)", "weighted_content": "(1−s)H(π)"},
        x="step",
        label="entropy (nats)",
    ),
    table=table,
    how_to_read="H = H_b(s) + (1−s)H(π), means over rows, heads and layers.",
)
