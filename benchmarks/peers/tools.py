"""How each tool loads a model, as its documentation says, and the arithmetic people write by hand.

Every function imports what it needs: a contender's environment holds its own tool and no other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

# contender -> the package its environment is made for; who is not here runs in perpend's own
PACKAGES = {
    "TransformerLens cache": "transformer-lens",
    "TransformerLens hooks": "transformer-lens",
    "nnsight": "nnsight",
    "pyvene": "pyvene",
    "scikit-bio": "scikit-bio",
}
# what an environment needs beside its package
BESIDE = {"scikit-bio": ()}
MODEL_PACKAGES = ("torch", "transformers")
VOCABULARY = 128  # so small that the head, which some tools cannot leave out, is 1 % of two layers
SIZES = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}


def make_model(folder: Path, layers: int, sizes: dict[str, int] = SIZES) -> Path:
    """SmolLM2's block, so many times, random, with a tokenizer that no contender reads text with."""
    import torch
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        **sizes, num_hidden_layers=layers, vocab_size=VOCABULARY, max_position_embeddings=16384,
        initializer_range=0.06, bos_token_id=0, eos_token_id=0, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    own = Tokenizer(models.WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w1"))
    PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="w0", bos_token="w0", eos_token="w0"
    ).save_pretrained(folder)
    return folder


@lru_cache(maxsize=1)
def transformers_model(folder: str, attention: str = "sdpa") -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation=attention).eval()


@lru_cache(maxsize=1)
def perpend_model(folder: str) -> Any:
    import perpend

    return perpend.load(folder)[0]


@lru_cache(maxsize=1)
def bridge(folder: str) -> Any:
    """TransformerLens' bridge; its attention is its own, with rows T × T whether asked for or not."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    return TransformerBridge.boot_transformers(
        folder, hf_model=transformers_model(folder, "eager"), tokenizer=AutoTokenizer.from_pretrained(folder)
    )


@lru_cache(maxsize=1)
def nnsight_model(folder: str, attention: str = "sdpa") -> Any:
    from nnsight import TransformersModel

    return TransformersModel(folder, task="text-generation", attn_implementation=attention, dispatch=True)


def pyvene_model(folder: str, components: Iterable[tuple[str, Any]]) -> Any:
    """pyvene's intervenable model: (component, what is done to it) pairs, a function or an intervention."""
    import pyvene

    parts = [{"component": component, "intervention": act} for component, act in components]
    return pyvene.IntervenableModel(parts, model=transformers_model(folder))


@contextmanager
def hooked(handles: Iterable[Any]) -> Iterator[None]:
    """Hooks for as long as the `with` lasts."""
    handles = list(handles)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def some(passes: Iterable[Any]) -> Any:
    """Of each pass its logits at 64 positions or so: enough to compare edits by."""
    import torch

    return torch.cat([logits[:, :: max(1, logits.shape[1] // 64)] for logits in passes])


def without(y: Any, z: Any) -> Any:
    """y less its part along z, over the last axis, as someone writes it by hand."""
    return y - (y * z).sum(-1, keepdim=True) / (z * z).sum(-1, keepdim=True) * z


def by_head(x: Any, heads: int) -> Any:
    return x.unflatten(-1, (heads, -1))
