"""Attention layers of any model: where they are, what each call reads, and hooks that see or change it.

attention_sites(model) -> tuple[AttentionSite, ...]
attach(model, hook, layers=None) ; hook(call: AttentionCall, output [B, T, H, d_v]) -> Tensor | None
visible(call), valid_rows(call), own_key_index(call)     which keys a row sees, which rows are real
self_weight(call), call.lse                              A_tt and the log-sum-exp, never a T x T matrix
row_logits(call, rows, keys)                             logits of chosen rows and keys, fp32 or better
"""

from perpend.models.attention.attach import attach, check_parity, choose_sites
from perpend.models.attention.call import AttentionCall, AttentionSite, Hook
from perpend.models.attention.fused import (
    decoded,
    decodes_alike,
    log_sum_exp,
    output_and_lse,
    own_logit,
    self_weight,
)
from perpend.models.attention.sites import attention_modules, attention_sites, module_of
from perpend.models.attention.support import own_key_index, row_logits, valid_rows, visible

__all__ = [
    "AttentionCall",
    "AttentionSite",
    "Hook",
    "attach",
    "attention_modules",
    "attention_sites",
    "check_parity",
    "choose_sites",
    "decoded",
    "decodes_alike",
    "log_sum_exp",
    "module_of",
    "output_and_lse",
    "own_key_index",
    "own_logit",
    "row_logits",
    "self_weight",
    "valid_rows",
    "visible",
]
