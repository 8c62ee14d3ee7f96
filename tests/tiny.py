"""Tiny random models, one of each family perpend knows, built from the family's own config class.

Every model is seeded, in evaluation mode and fp32, has at least three layers, and (where the family allows
it) grouped queries, so that a mistake in any of them shows. `LANGUAGE` models take token ids below `VOCAB`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as t

VOCAB = 97
LAYERS = 3

_SMALL = dict(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
_IDS = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)


def _small(**changes: Any) -> dict[str, Any]:
    settings = {**_SMALL, **changes}
    return {key: value for key, value in settings.items() if value is not None}


def _gpt2() -> Any:
    return t.GPT2LMHeadModel(
        t.GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=256, **_IDS)
    )


def _neox(parallel: bool) -> Any:
    return t.GPTNeoXForCausalLM(
        t.GPTNeoXConfig(**_small(num_key_value_heads=None), use_parallel_residual=parallel)
    )


def _gptj() -> Any:
    return t.GPTJForCausalLM(
        t.GPTJConfig(
            vocab_size=VOCAB, n_embd=32, n_layer=LAYERS, n_head=4, n_positions=256, rotary_dim=4, **_IDS
        )
    )


def _opt(before: bool) -> Any:
    return t.OPTForCausalLM(
        t.OPTConfig(
            vocab_size=VOCAB,
            hidden_size=32,
            ffn_dim=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=4,
            max_position_embeddings=256,
            word_embed_proj_dim=32,
            do_layer_norm_before=before,
            **_IDS,
        )
    )


def _bloom() -> Any:
    return t.BloomForCausalLM(
        t.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=LAYERS, n_head=4, **_IDS)
    )


def _gemma3_text() -> Any:
    return t.Gemma3TextConfig(
        **_small(num_hidden_layers=4), head_dim=8, sliding_window=16, layer_types=_windows(4)
    )


def _windows(layers: int) -> list[str]:
    return ["sliding_attention", "full_attention"] * (layers // 2) + ["sliding_attention"] * (layers % 2)


def _gemma3_multimodal() -> Any:
    vision = t.SiglipVisionConfig(
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=28,
        patch_size=14,
    )
    config = t.Gemma3Config(
        text_config=_gemma3_text(),
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=VOCAB - 1,
        boi_token_index=VOCAB - 2,
        eoi_token_index=VOCAB - 3,
    )
    return t.Gemma3ForConditionalGeneration(config)


def _deepseek_v3() -> Any:
    return t.DeepseekV3ForCausalLM(
        t.DeepseekV3Config(
            **_small(num_key_value_heads=4),
            moe_intermediate_size=16,
            n_routed_experts=4,
            n_shared_experts=1,
            num_experts_per_tok=2,
            n_group=2,
            topk_group=1,
            first_k_dense_replace=1,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=4,
            qk_nope_head_dim=8,
            v_head_dim=6,
        )
    )


def _qwen3_next() -> Any:
    return t.Qwen3NextForCausalLM(
        t.Qwen3NextConfig(
            **_small(num_hidden_layers=4),
            head_dim=8,
            layer_types=["linear_attention", "full_attention"] * 2,
            linear_conv_kernel_dim=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=16,
            shared_expert_intermediate_size=16,
            decoder_sparse_step=1,
        )
    )


def _gpt_oss() -> Any:
    model = t.GptOssForCausalLM(
        t.GptOssConfig(
            **_small(num_hidden_layers=4),
            head_dim=8,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
            layer_types=_windows(4),
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("sinks"):
                parameter.normal_(0.0, 1.0)
    return model


def _bert() -> Any:
    return t.BertForMaskedLM(t.BertConfig(**_small(num_key_value_heads=None)))


def _vision(**changes: Any) -> dict[str, Any]:
    return dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        image_size=28,
        patch_size=7,
        **changes,
    )


def _vit() -> Any:
    return t.ViTForImageClassification(t.ViTConfig(**_vision(num_labels=5)))


def _dinov2() -> Any:
    model = t.Dinov2Model(t.Dinov2Config(**_vision(layerscale_value=0.5)))
    return model


def _dinov2_registers() -> Any:
    return t.Dinov2WithRegistersModel(
        t.Dinov2WithRegistersConfig(**_vision(layerscale_value=0.5, num_register_tokens=2))
    )


_BUILD: dict[str, Callable[[], Any]] = {
    "gpt2": _gpt2,
    "gpt_neox": lambda: _neox(True),
    "gpt_neox_sequential": lambda: _neox(False),
    "gptj": _gptj,
    "opt": lambda: _opt(True),
    "opt_post_ln": lambda: _opt(False),
    "bloom": _bloom,
    "llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**_small())),
    "mistral": lambda: t.MistralForCausalLM(t.MistralConfig(**_small(), sliding_window=16)),
    "qwen2": lambda: t.Qwen2ForCausalLM(t.Qwen2Config(**_small())),
    "qwen3": lambda: t.Qwen3ForCausalLM(t.Qwen3Config(**_small(), head_dim=8)),
    "qwen3_moe": lambda: t.Qwen3MoeForCausalLM(
        t.Qwen3MoeConfig(
            **_small(), head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16
        )
    ),
    "gemma2": lambda: t.Gemma2ForCausalLM(
        t.Gemma2Config(
            **_small(num_hidden_layers=4),
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=16,
            layer_types=_windows(4),
            attn_logit_softcapping=5.0,
        )
    ),
    "gemma3": lambda: t.Gemma3ForCausalLM(_gemma3_text()),
    "gemma3_multimodal": _gemma3_multimodal,
    "olmo2": lambda: t.Olmo2ForCausalLM(t.Olmo2Config(**_small())),
    "granite": lambda: t.GraniteForCausalLM(
        t.GraniteConfig(**_small(), residual_multiplier=0.3, attention_multiplier=0.2)
    ),
    "phi": lambda: t.PhiForCausalLM(t.PhiConfig(**_small())),
    "phi3": lambda: t.Phi3ForCausalLM(t.Phi3Config(**_small())),
    "cohere2": lambda: t.Cohere2ForCausalLM(
        t.Cohere2Config(**_small(num_hidden_layers=4), sliding_window=16, layer_types=_windows(4))
    ),
    "smollm3": lambda: t.SmolLM3ForCausalLM(t.SmolLM3Config(**_small())),
    "deepseek_v3": _deepseek_v3,
    "qwen3_next": _qwen3_next,
    "gpt_oss": _gpt_oss,
    "bert": _bert,
    "vit": _vit,
    "dinov2": _dinov2,
    "dinov2_registers": _dinov2_registers,
}

FAMILIES = list(_BUILD)
VISION = ["vit", "dinov2", "dinov2_registers"]
ENCODERS = ["bert"]
LANGUAGE = [name for name in FAMILIES if name not in VISION]
CAUSAL = [name for name in LANGUAGE if name not in ENCODERS]


def build(name: str, seed: int = 0, **overrides: Any) -> Any:
    """A fresh tiny model; the same seed gives the same weights."""
    torch.manual_seed(seed)
    model = _BUILD[name]()
    with torch.no_grad():
        # The usual initial scale (0.02) leaves attention uniform and updates negligible: nothing would show.
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.8 / max(parameter.shape[-1], 1) ** 0.5)
            elif parameter.numel() > 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


@cache
def tiny(name: str) -> Any:
    """The shared tiny model of a family; a test that changes weights builds its own with `build`."""
    return build(name)


def tokens(count: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Random token ids [count, length] that avoid the special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB - 4, (count, length), generator=generator)


def pixels(count: int = 2, seed: int = 0) -> torch.Tensor:
    """Random images [count, 3, 28, 28]."""
    return torch.randn(count, 3, 28, 28, generator=torch.Generator().manual_seed(seed))


def inputs(name: str, count: int = 2, length: int = 24) -> dict[str, torch.Tensor]:
    """Inputs for any tiny model, as keyword arguments of its forward."""
    if name in VISION:
        return {"pixel_values": pixels(count)}
    return {"input_ids": tokens(count, length)}


def byte_tokenizer(length: int = 256) -> Any:
    """A tokenizer whose tokens are single bytes, after <pad>, <s> and </s>; no text is unknown to it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate(["<pad>", "<s>", "</s>", *letters])}
    own = Tokenizer(models.BPE(vocab=words, merges=[]))
    own.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    own.decoder = decoders.ByteLevel()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=own, model_max_length=length, **special)


def save_llama(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A tiny random Llama with that tokenizer, as a folder that `perpend.load` opens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = byte_tokenizer()
    torch.manual_seed(seed)
    config = {**_SMALL, "vocab_size": len(tokenizer), "initializer_range": 0.3, **changes}
    LlamaForCausalLM(LlamaConfig(**config)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
