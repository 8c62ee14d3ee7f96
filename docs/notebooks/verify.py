# %% [markdown]
# # Is what perpend reads what the model computes?
# A reading of a model can be wrong without looking wrong. So every quantity is computed in two ways, on every
# layer, and the worst difference is held against what rounding allows.

# %%
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import perpend
from perpend.report.page import figures_of

torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=300,
    hidden_size=48,
    intermediate_size=96,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
model = LlamaForCausalLM(config).eval()  # a small one, so that this takes seconds; any model will do
verification = perpend.verify(model)
verification.table[["check", "status", "worst", "tolerance"]]

# %%
figures_of(verification, "verify")[0]

# %% [markdown]
# Every bar ends left of the line: each difference is smaller than rounding explains. A stream that gets more
# than its layers announce ends right of it. One layer is made to leak, and the check that sees it says so:

# %%
leaking = model.model.layers[1].register_forward_hook(lambda module, args, output: output + 0.01)
failures = perpend.verify(model).failures
leaking.remove()
[(check.name, check.detail or check.seen) for check in failures]
