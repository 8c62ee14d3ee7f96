"""A tiny llama in a GGUF file with 4-bit weights and a byte-level tokenizer, like the default model."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
from transformers.convert_slow_tokenizer import bytes_to_unicode

WIDTH, FFN, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MERGES = ["Ġ Ġ", "t h", "th e", "Ġ the"]


def write(path: Path, seed: int = 0) -> Path:
    """Write the file and return its path; the same seed gives the same bytes."""
    alphabet = sorted(bytes_to_unicode().values())
    tokens = SPECIAL + alphabet + [merge.replace(" ", "") for merge in MERGES]
    tokens += [f"<unused{i}>" for i in range(-len(tokens) % 32)]
    random = np.random.default_rng(seed)

    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("tiny")
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_rope_dimension_count(WIDTH // HEADS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if t in SPECIAL else 1 for t in tokens])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_add_bos_token(False)

    def matrix(name: str, rows: int, columns: int, kind: gguf.GGMLQuantizationType) -> None:
        values = (random.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    four, eight = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    matrix("token_embd.weight", len(tokens), WIDTH, eight)
    for layer in range(LAYERS):
        for name, rows, columns in (
            ("attn_q", WIDTH, WIDTH),
            ("attn_k", WIDTH * KV_HEADS // HEADS, WIDTH),
            ("attn_v", WIDTH * KV_HEADS // HEADS, WIDTH),
            ("attn_output", WIDTH, WIDTH),
            ("ffn_gate", FFN, WIDTH),
            ("ffn_up", FFN, WIDTH),
            ("ffn_down", WIDTH, FFN),
        ):
            matrix(f"blk.{layer}.{name}.weight", rows, columns, four)
        for name in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{name}.weight", np.ones(WIDTH, dtype=np.float32))
    writer.add_tensor("output_norm.weight", np.ones(WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
