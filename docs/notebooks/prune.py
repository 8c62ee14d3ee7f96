# %% [markdown]
# # Pruning: which channel carries the function?
# Heads that look redundant by two distances, with and without the sink, are taken out, beside as many at
# random. A few hundred tokens only: enough to see how it works, too few to decide anything.

# %%
import tempfile
from pathlib import Path

import perpend
from perpend import cli
from perpend.report.page import figures_of
from perpend.runs import Run

out = tempfile.mkdtemp() + "/run"
words = "prune --sparsity 0.2 --criterion js_l1 --criterion content_l1 --criterion random_a --no-weights"
words += " --sequences 4 --length 96 --window 32 --tokens 384 --context 128 --seed 0 --quiet"
assert cli.run([*words.split(), "--out", out]) == 0

# %% [markdown]
# What the rule predicted was written down before anything was evaluated; the losses are paired with those of
# the whole model on the same tokens.

# %%
run = Run.open(out)
for finding in run.document["findings"]:
    print("·", finding)

# %%
run.tables["cells"].round(3)

# %% [markdown]
# Where the removed heads sit, by layer.

# %%
figures_of(run)[2]

# %% [markdown]
# Every set lies in a file of its own, and `perpend.ablate` reads it.

# %%
masks = sorted(Path(out, "masks").iterdir())
model, tokenizer = perpend.load()
ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
for mask in masks:
    with perpend.ablate(model, mask) as ablation:
        written = model.generate(ids, max_new_tokens=8, do_sample=False, pad_token_id=0)
    said = tokenizer.decode(written[0, ids.shape[1] :])
    unread = len(ablation.unused_kv_heads)
    print(f"{mask.name}: {len(ablation.heads)} heads removed, {unread} KV heads unread: {said!r}")
