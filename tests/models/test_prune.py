"""Models written without heads: what plain transformers loads computes what the ablated model computed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import perpend
import tiny
from perpend.errors import InputError
from perpend.evaluation.losses import token_nll
from perpend.evaluation.windows import as_windows
from perpend.models.prune import pruned, save_pruned


def logits(model: torch.nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens)[0]


WHOLE_GROUPS = [(layer, head) for layer in range(3) for head in (2, 3)]  # KV head 1 of every layer
SCATTERED = [(0, 1), (2, 3)]


@pytest.mark.parametrize(
    ("name", "heads", "how"),
    [
        ("qwen3", WHOLE_GROUPS, "cut from the projections"),
        ("llama", WHOLE_GROUPS, "cut from the projections"),
        ("qwen3", SCATTERED, "zeroed in W_O"),
        ("gpt2", SCATTERED, "zeroed in W_O"),
        ("olmo2", WHOLE_GROUPS, "zeroed in W_O"),
        ("bloom", SCATTERED, "zeroed in W_O"),
        ("gemma3", SCATTERED, "zeroed in W_O"),
    ],
)
def test_a_saved_model_computes_what_the_ablated_one_did(
    name: str, heads: list, how: str, tmp_path: Path
) -> None:
    model, tokens = tiny.build(name), tiny.tokens(2, 16)
    before = logits(model, tokens)
    with perpend.ablate(model, heads):
        expected = logits(model, tokens)
        loss = float(token_nll(model, tokens).values.double().mean())
    report = save_pruned(model, None, heads, tmp_path / "smaller", as_windows(tokens))
    assert report["how"].startswith(how)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "smaller").eval()
    torch.testing.assert_close(logits(again, tokens), expected, atol=2e-5, rtol=1e-4)
    assert report["perplexity_after_loading"] == pytest.approx(torch.tensor(loss).exp().item(), rel=1e-4)
    if how.startswith("cut"):
        assert report["parameters"] < sum(p.numel() for p in model.parameters())
        assert again.config.num_attention_heads == 2
    assert torch.equal(logits(model, tokens), before)  # the model in memory is left as it was


def test_a_folder_with_something_in_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "here.txt").write_text("mine")
    with pytest.raises(InputError, match="not empty"):
        save_pruned(tiny.tiny("llama"), None, SCATTERED, tmp_path, as_windows(tiny.tokens()))


def test_nothing_to_prune_changes_nothing() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(1, 8)
    smaller, _ = pruned(model, [])
    assert torch.equal(logits(smaller, tokens), logits(model, tokens))


@pytest.mark.parametrize("head", [(0, -1), (0, 4), (-1, 0), (9, 0)])
def test_a_head_that_is_not_there_is_refused_rather_than_left_in(head: tuple[int, int]) -> None:
    with pytest.raises(InputError, match="out of range"):
        pruned(tiny.tiny("llama"), [(0, 0), head])


def test_a_head_named_twice_is_one_head(tmp_path: Path) -> None:
    model = tiny.tiny("llama")
    report = save_pruned(model, None, [(0, 0), (1, 2), (0, 0)], tmp_path / "s", as_windows(tiny.tokens()))
    assert report["heads_removed"] == 2
