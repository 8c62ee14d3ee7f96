"""A hand-written eager attention in float64, and models outside the tiny families."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import transformers as t
from torch import Tensor, nn

from perpend.models.attention import AttentionCall


@torch.no_grad()
def weights(call: AttentionCall) -> Tensor:
    """Attention weights [B, H, T, S] in float64, from the definition; hidden keys weigh exactly 0."""
    query, key = call.query.double(), call.key.double()
    key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
    batch, heads, length, _ = query.shape
    seen = key.shape[2]
    logits = torch.einsum("bhtd,bhsd->bhts", query, key) * call.scale
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    if call.bias is not None:
        logits = logits + call.bias.double()
    hidden = torch.zeros(batch, heads, length, seen, dtype=torch.bool)
    if call.mask is not None and call.mask.dtype == torch.bool:
        hidden |= ~call.mask
    elif call.mask is not None:
        hidden |= call.mask < torch.finfo(call.mask.dtype).min / 4
        logits = logits + torch.where(hidden, torch.zeros(()), call.mask).double()
    if call.causal:
        hidden |= torch.arange(seen)[None, :] > torch.arange(length)[:, None]
    logits = logits.masked_fill(hidden, -torch.inf)
    top = logits.amax(-1, keepdim=True).clamp(min=-1e300)
    extra = torch.zeros(batch, heads, length, 1, dtype=torch.float64)
    if call.sinks is not None:
        extra = torch.exp(call.sinks.double().view(1, -1, 1, 1) - top)
    mass = torch.exp(logits - top)
    total = mass.sum(-1, keepdim=True) + extra
    return torch.where(total > 0, mass / total.clamp(min=1e-300), torch.zeros(()).double())


def aggregate(call: AttentionCall) -> Tensor:
    """The value aggregate [B, T, H, d_v] in float64."""
    value = call.value.double().repeat_interleave(call.query.shape[1] // call.value.shape[1], dim=1)
    return torch.einsum("bhts,bhsd->bthd", weights(call), value)


class PlainAttention(nn.Module):
    """Attention of a GPT of one's own: torch's kernel, no transformers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.n_head, self.head_dim = heads, width // heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.n_head, -1).transpose(1, 2)
            for part in self.qkv(x).split(width, dim=2)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(batch, length, width))


class PlainGPT(nn.Module):
    """Two blocks of `PlainAttention` on an embedding, with a head."""

    def __init__(self, vocabulary: int = 97, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList([PlainAttention(width, heads) for _ in range(2)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


def plain_gpt() -> nn.Module:
    torch.manual_seed(0)
    return PlainGPT().eval()


def falcon(alibi: bool = False, attn: str = "sdpa") -> nn.Module:
    torch.manual_seed(0)
    config = t.FalconConfig(
        vocab_size=97,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=alibi,
        multi_query=not alibi,
    )
    return _scaled(t.FalconForCausalLM._from_config(config, attn_implementation=attn))


def gpt_neo() -> nn.Module:
    torch.manual_seed(0)
    config = t.GPTNeoConfig(
        vocab_size=97,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=16,
        max_position_embeddings=256,
        intermediate_size=48,
    )
    return _scaled(t.GPTNeoForCausalLM(config))


def t5() -> nn.Module:
    torch.manual_seed(0)
    config = t.T5Config(
        vocab_size=97, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    return _scaled(t.T5ForConditionalGeneration(config))


def _scaled(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.8 / parameter.shape[-1] ** 0.5)
    return model.eval()


def record(model: nn.Module, *args, attach_options: dict | None = None, **kwargs) -> SimpleNamespace:
    """Run a model with an observing hook on every layer: its output, the calls and their aggregates."""
    from perpend.models.attention import attach

    seen = SimpleNamespace(calls=[], outputs=[])

    def look(call, output):
        seen.calls.append(call)
        seen.outputs.append(output.clone())

    with torch.no_grad(), attach(model, look, **(attach_options or {})) as seen.sites:
        seen.result = model(*args, **kwargs)
    return seen


def padded(tokens: Tensor, missing: int, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """The first sequence loses `missing` tokens and is padded with 0: ids, attention mask, position ids."""
    ids, mask = tokens.clone(), torch.ones_like(tokens)
    if side == "left":
        ids[0] = torch.cat([torch.zeros(missing, dtype=ids.dtype), tokens[0, : tokens.shape[1] - missing]])
        mask[0, :missing] = 0
    else:
        ids[0, tokens.shape[1] - missing :] = 0
        mask[0, tokens.shape[1] - missing :] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)
