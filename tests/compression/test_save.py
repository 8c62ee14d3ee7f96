"""Saved models: plain transformers loads them, with the same losses."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from perpend.compression.blockwise import compress
from perpend.compression.save import RECORD, save
from perpend.errors import InputError
from tiny import build, tokens


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        ("llama", "wanda:2:4+gain"),
        ("llama", "awq:3,group=8,grid=4"),
        ("gpt2", "rtn:group=8"),
        ("gemma3", "awq:3,group=8,grid=4"),
        ("qwen3_moe", "wanda"),
    ],
)
def test_transformers_loads_what_was_saved(tmp_path, family, spec):
    model, ids = build(family), tokens(4, 24)
    done = compress(model, ids, spec)
    record = save(model, None, tmp_path / "smaller", {"perpend": done.results, "model": family})
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "smaller")
    with torch.no_grad():
        assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)
    written = json.loads((tmp_path / "smaller" / RECORD).read_text())
    assert written["perpend"]["method"] == done.regime.method.name
    assert written["weights_sha256"] == record["weights_sha256"]
    if family == "gpt2":
        assert again.lm_head.weight.data_ptr() == again.transformer.wte.weight.data_ptr(), "still tied"


def test_half_precision_is_kept(tmp_path):
    model = build("llama").to(torch.bfloat16)
    compress(model, tokens(2, 16), "wanda:4:8")
    assert save(model, None, tmp_path / "half", {})["dtype"] == "bfloat16"


def test_a_folder_with_something_in_it_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        save(build("llama"), None, tmp_path, {})
    assert (tmp_path / "notes.txt").read_text() == "mine"
