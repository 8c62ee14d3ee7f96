"""Edits on top of the kernels that take no 4-D mask: flex attention, and flash attention's conventions."""

from __future__ import annotations

import pytest
import torch
import transformers
from test_attention_self import like_flash
from test_edit_laws import logits, pieces

import perpend
import tiny
from attention_oracle import padded
from perpend.models.edit import SITES, VALUE_SITES

PAIR = (0.25, 0.5)


@pytest.mark.slow
def test_edits_on_flex_attention_are_those_on_sdpa() -> None:
    """Compiled by transformers on first use; below 128 tokens torch's own CPU kernel errs."""
    model, ids = tiny.build("llama"), tiny.tokens(2, 128)
    expected = {}
    for site in SITES:
        with perpend.edit(model, site, *PAIR):
            expected[site] = logits(model, ids)
    model.set_attn_implementation("flex_attention")
    plain = logits(model, ids)
    for site in SITES:
        with perpend.edit(model, site, *PAIR):
            torch.testing.assert_close(logits(model, ids), expected[site], atol=5e-5, rtol=1e-4)
        assert torch.equal(logits(model, ids), plain)
        assert (expected[site] - plain).abs().max() > 1e-2


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_edits_under_the_conventions_of_flash_attention(name: str, site: str, monkeypatch) -> None:
    """No 4-D mask, padding as [B, S], the window in the kernel: prefill, left padding and decoding."""
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "flash_attention_2", like_flash)
    ids, mask, positions = padded(tiny.tokens(2, 30), 5, "left")
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
    own, flash = tiny.tiny(name), tiny.build(name)
    flash.config._attn_implementation_internal = "flash_attention_2"
    with perpend.edit(own, site, *PAIR), perpend.edit(flash, site, *PAIR):
        found, expected = logits(flash, **inputs), logits(own, **inputs)
        torch.testing.assert_close(found[mask.bool()], expected[mask.bool()], atol=5e-5, rtol=1e-4)
        whole = tiny.tokens(2, 24)
        steps = pieces(flash, whole, [8, 20, 21, 22, 23], False)
        torch.testing.assert_close(steps, logits(own, whole), atol=5e-5, rtol=1e-4)
    assert (found - logits(flash, **inputs))[mask.bool()].abs().max() > 1e-2


def _no_flash() -> str | None:
    if not torch.cuda.is_available():
        return "flash attention needs a GPU, and there is none"
    if not transformers.utils.is_flash_attn_2_available():
        return "flash_attn is not installed"
    return None


@pytest.mark.skipif(_no_flash() is not None, reason=str(_no_flash()))
@pytest.mark.parametrize("site", VALUE_SITES)
def test_edits_on_flash_attention_itself(site: str) -> None:
    model, ids = tiny.build("llama").to("cuda", torch.bfloat16), tiny.tokens(2, 48).cuda()
    with perpend.edit(model, site, *PAIR):
        expected = logits(model, ids)
    model.set_attn_implementation("flash_attention_2")
    with perpend.edit(model, site, *PAIR):
        found = logits(model, ids)
    assert (found - expected).abs().max() < 0.05 * expected.abs().max()
