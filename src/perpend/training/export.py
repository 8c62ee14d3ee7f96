"""Trained models as folders that transformers loads, and the variants' way back.

Every variant is written as a Llama: its weights are a Llama's, renamed. What makes it a variant is in
`perpend_variant.json` beside them (and a gate's weights in `perpend_variant.safetensors`), and
`perpend.load` applies it; plain transformers loads the same folder as the Llama without the variant, which
is *not* the trained function for any variant but the baseline. No code is shipped with the weights.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from perpend.errors import InputError, unknown_name
from perpend.models.load import without_bars
from perpend.runs.files import TEMPORARY, write_atomically
from perpend.training.model import Shape
from perpend.training.variants import VARIANTS

RECORD, GATES = "perpend_variant.json", "perpend_variant.safetensors"

# The variants without a gate are edits that never end.
EDITS = {
    "baseline": (),
    "residual": ("residual.attn", "residual.mlp"),
    "value-full": ("value.full",),
    "value-exclude-self": ("value.exclude_self",),
}

_LLAMA = {
    "embedding": "model.embed_tokens",
    "norm": "model.norm",
    "unembedding": "lm_head",
    "blocks": "model.layers",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention": "self_attn",
    "query": "q_proj",
    "key": "k_proj",
    "value": "v_proj",
    "out": "o_proj",
    "gate": "gate_proj",
    "up": "up_proj",
    "down": "down_proj",
}


def llama_name(name: str) -> str:
    """A decoder's parameter name, as Llama calls it."""
    return ".".join(_LLAMA.get(part, part) for part in name.split("."))


def llama_config(shape: Shape, **more: Any) -> Any:
    """The transformers configuration of a decoder of this shape."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.context,
        rms_norm_eps=shape.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_base},
        tie_word_embeddings=shape.tied,
        attention_bias=False,
        **more,
    )


def export(
    weights: dict[str, Tensor],
    shape: Shape,
    variant: str,
    folder: str | Path,
    *,
    tokenizer: Path | None = None,
) -> Path:
    """Writes a decoder's state dict as a model folder, atomically: the folder is whole or absent.

    Args:
        weights: `Decoder.state_dict()`, undivided, on any device.
        tokenizer: a folder with the tokenizer's files, copied beside the weights.
    """
    from transformers import LlamaForCausalLM

    folder = Path(folder)
    gates = {name: tensor.contiguous() for name, tensor in weights.items() if ".mix.scale." in name}
    renamed = {llama_name(name): tensor for name, tensor in weights.items() if name not in gates}
    ends: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    if tokenizer is not None:
        from transformers import AutoTokenizer

        ends["eos_token_id"] = AutoTokenizer.from_pretrained(tokenizer).eos_token_id
    with torch.device("meta"):
        model = LlamaForCausalLM(llama_config(shape, **ends))
    missing, unexpected = model.load_state_dict(renamed, strict=False, assign=True)
    if unexpected or set(missing) - ({"lm_head.weight"} if shape.tied else set()):
        raise InputError(f"weights do not fit the shape: missing {missing}, unexpected {unexpected}")
    model.tie_weights()

    temporary = folder.with_name(f"{TEMPORARY}{folder.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.parent.mkdir(parents=True, exist_ok=True)
    with without_bars():
        model.save_pretrained(temporary)
    if tokenizer is not None:
        for file in sorted(tokenizer.iterdir()):
            shutil.copy2(file, temporary / file.name)
    if variant != "baseline":
        write_atomically(temporary / RECORD, json.dumps({"version": 1, "variant": variant}))
    if gates:
        from safetensors.torch import save_file

        save_file(gates, temporary / GATES)
    if folder.exists():
        shutil.rmtree(folder)
    os.replace(temporary, folder)
    return folder


def apply_if_variant(model: nn.Module, folder: str | Path) -> str | None:
    """Makes a Llama that was loaded from `folder` the variant it was trained as; None where it is a plain
    model.

    The variant lives as long as the model and composes with surveys and edits, which see it as the model's
    own: they attach inside it.
    """
    record = Path(folder) / RECORD
    if not record.is_file():
        return None
    document = json.loads(record.read_text())
    variant = document.get("variant")
    if variant not in VARIANTS:
        raise unknown_name("variant", variant, VARIANTS)
    gates = None
    if (Path(folder) / GATES).is_file():
        from safetensors.torch import load_file

        gates = load_file(Path(folder) / GATES)
    _apply(model, variant, gates)
    return variant


def _apply(model: nn.Module, variant: str, gates: dict[str, Tensor] | None) -> None:
    from perpend.models.edit import edit

    stack = ExitStack()
    if gates:
        stack.enter_context(_gated(model, gates, exclude_self="full" not in variant))
    else:
        for site in EDITS[variant]:
            stack.enter_context(edit(model, site, parallel=0.0))
    model.perpend_variant = variant
    model.perpend_variant_gates = gates
    model._perpend_variant_contexts = stack


def copied(model: nn.Module) -> nn.Module:
    """A deep copy that computes what the model computes: a variant is taken off, copied and put on both.

    Its edits are attached to the modules they were made for, so a plain deep copy would lose them unseen.
    """
    stack = model.__dict__.pop("_perpend_variant_contexts", None)
    if stack is None:
        return copy.deepcopy(model)
    stack.close()
    try:
        other = copy.deepcopy(model)
    finally:
        _apply(model, model.perpend_variant, model.perpend_variant_gates)
    _apply(other, model.perpend_variant, model.perpend_variant_gates)
    return other


def write_variant(model: nn.Module, folder: str | Path) -> None:
    """Beside weights saved in `folder`, what makes them the variant that `model` is; a plain one has none."""
    variant = getattr(model, "perpend_variant", None)
    if variant is None:
        return
    write_atomically(Path(folder) / RECORD, json.dumps({"version": 1, "variant": variant}))
    if model.perpend_variant_gates:
        from safetensors.torch import save_file

        save_file(model.perpend_variant_gates, Path(folder) / GATES)


@contextmanager
def _gated(model: nn.Module, gates: dict[str, Tensor], *, exclude_self: bool) -> Iterator[None]:
    """The parallel part scaled by s = sigmoid(w x), x the attention module's input."""
    from perpend.models.attention import attach, attention_sites, module_of, self_weight
    from perpend.models.edit import own_value, scale_parts

    weights = {int(name.split(".")[1]): tensor for name, tensor in gates.items()}
    inputs: dict[int, Tensor] = {}

    def remember(layer: int) -> Callable[..., None]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            inputs[layer] = args[0] if args else kwargs["hidden_states"]

        return before

    def hook(call: Any, output: Tensor) -> Tensor:
        x = inputs.pop(call.layer)
        weight = weights[call.layer].to(device=x.device, dtype=x.dtype)
        scale = torch.sigmoid(nn.functional.linear(x, weight).float()).unsqueeze(-1)  # [B, T, 1 or H, 1]
        value = own_value(call).repeat_interleave(call.groups, 2)
        kept = self_weight(call).transpose(1, 2).unsqueeze(-1) * value if exclude_self else 0.0
        return (scale_parts(output - kept, value, scale, 1.0) + kept).type_as(output)

    with ExitStack() as stack:
        sites = attention_sites(model)
        for site in sites:
            handle = module_of(model, site).register_forward_pre_hook(remember(site.index), with_kwargs=True)
            stack.callback(handle.remove)
        stack.enter_context(attach(model, hook, need_lse=exclude_self, sites=sites))
        yield
