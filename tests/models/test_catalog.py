"""The catalog's facts, each checked against a model rebuilt from them without weights."""

from __future__ import annotations

import re

import pytest
import torch
import transformers as t

from perpend.models.catalog import CATALOG, DEFAULT, PYTHIA_REVISIONS, Entry, find

ENTRIES = list(CATALOG.values())
TIED = {"gpt2", "llama", "opt", "qwen2", "qwen3", "bert", "gemma3", "olmo"}
UNTIED = {"qwen3-8b"}


def rebuilt(entry: Entry) -> torch.nn.Module:
    """The model of an entry on the meta device, from the entry's own numbers and its family's defaults."""
    if entry.family == "gemma3":
        return _gemma3(entry)
    settings: dict[str, object] = dict(
        hidden_size=entry.width,
        num_hidden_layers=entry.layers,
        num_attention_heads=entry.heads,
        intermediate_size=entry.ffn,
        tie_word_embeddings=entry.family in TIED and entry.name not in UNTIED,
    )
    if entry.vocabulary:
        settings |= {"vocab_size": entry.vocabulary, "max_position_embeddings": entry.context}
    if entry.family in {"llama", "qwen2", "qwen3", "qwen3_moe", "olmo2"}:
        settings["num_key_value_heads"] = entry.kv_heads
    if entry.family in {"llama", "qwen3", "qwen3_moe"}:
        settings["head_dim"] = entry.head_dim
    if entry.family == "qwen3_moe":
        settings |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": entry.ffn}
    if entry.family == "opt":
        settings |= {"ffn_dim": entry.ffn, "word_embed_proj_dim": entry.width}
    if entry.family == "vit":
        settings["num_labels"] = 1000
    if entry.family == "dinov2":
        settings |= {"image_size": 518, "patch_size": 14}
    if entry.family == "gpt2":
        settings |= {"n_positions": entry.context}
        del settings["max_position_embeddings"], settings["intermediate_size"]
    config = t.CONFIG_MAPPING[entry.family](**settings)
    with torch.device("meta"):
        return getattr(t, entry.architecture)(config)


def _gemma3(entry: Entry) -> torch.nn.Module:
    config = t.Gemma3Config(
        text_config=dict(
            vocab_size=entry.vocabulary,
            hidden_size=entry.width,
            intermediate_size=entry.ffn,
            num_hidden_layers=entry.layers,
            num_attention_heads=entry.heads,
            num_key_value_heads=entry.kv_heads,
            head_dim=entry.head_dim,
            max_position_embeddings=entry.context,
        ),
        vision_config=dict(
            hidden_size=1152,
            intermediate_size=4304,
            num_hidden_layers=27,
            num_attention_heads=16,
            image_size=896,
            patch_size=14,
            vision_use_head=False,
        ),
    )
    with torch.device("meta"):
        return t.Gemma3ForConditionalGeneration(config)


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_parameters_and_stack_are_those_of_the_architecture(entry: Entry) -> None:
    model = rebuilt(entry)
    assert model.config.model_type == entry.family
    assert sum(p.numel() for p in model.parameters()) == entry.parameters
    blocks = model.get_submodule(entry.stack)
    assert isinstance(blocks, torch.nn.ModuleList)
    assert len(blocks) == entry.layers


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_rows_are_consistent(entry: Entry) -> None:
    assert entry.name == entry.name.lower()
    assert re.fullmatch(r"[\w.-]+/[\w.-]+", entry.hub)
    assert entry.heads % entry.kv_heads == 0
    assert entry.dtype in {"float32", "float16", "bfloat16"}
    assert entry.sink in {"first", "cls"}
    assert set(entry.papers) <= {"attention", "directional"}
    assert (entry.window is None) == (entry.modality == "image")
    if entry.length is not None:
        assert entry.window < entry.length <= entry.context
    if entry.wheel is not None:
        hashes = [entry.wheel.sha256, *entry.wheel.members.values()]
        assert all(re.fullmatch(r"[0-9a-f]{64}", h) for h in hashes)


def test_the_models_of_both_papers_are_there() -> None:
    named = {e.name for e in ENTRIES if "attention" in e.papers}
    assert named == {
        "gpt2",
        "distilgpt2",
        "opt-125m",
        "smollm2-135m",
        "pythia-70m",
        "pythia-160m",
        "pythia-410m",
        "pythia-1b",
        "pythia-1.4b",
        "qwen2.5-1.5b",
        "llama-3.2-1b",
        "llama-3.2-3b",
        "vit-b-16",
        "bert-base",
    }
    directional = {e.name for e in ENTRIES if "directional" in e.papers}
    assert {"qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-4b-instruct-2507"} <= directional
    assert {"qwen3-30b-a3b", "llama-3.2-3b", "gemma-3-12b"} <= directional
    assert CATALOG["pythia-160m"].revisions == PYTHIA_REVISIONS
    assert len(PYTHIA_REVISIONS) == 10


def test_find_takes_short_and_hub_names_in_any_case() -> None:
    assert find("GPT2") is CATALOG["gpt2"]
    assert find("eleutherai/PYTHIA-160m") is CATALOG["pythia-160m"]
    assert find("nobody/nothing") is None
    assert CATALOG[DEFAULT].wheel is not None


def test_the_attention_papers_sizes(shared) -> None:
    """What the paper says of its models in words is what the table has."""
    text = (shared / "papers" / "attention-rows-as-compositions.md").read_text(encoding="utf-8")
    for words, name in (
        (r"GPT-2 (gpt2, 124M, 12 layers $\times$ 12 heads, fp32)", "gpt2"),
        (r"Llama-3.2-1B (meta-llama/Llama-3.2-1B, 16 layers $\times$ 32 heads, GQA, fp16)", "llama-3.2-1b"),
        (r"ViT-B/16 (google/vit-base-patch16-224, 12 layers $\times$ 12 heads, fp32)", "vit-b-16"),
    ):
        assert words in text
        layers, heads = map(int, re.search(r"(\d+) layers .*? (\d+) heads", words).groups())
        entry = CATALOG[name]
        assert (entry.layers, entry.heads) == (layers, heads)
        assert entry.dtype == ("float16" if "fp16" in words else "float32")
