"""Log-likelihoods of continuations, as the evaluation harness defines them, batched by length.

A request is (context, continuation), both text. It is tokenized as one string and cut where the tokens of the
context alone end; trailing spaces of the context move to the continuation first. What does not fit into the
model's context is dropped on the left. Requests whose model input is the same (the answers "yes" and "no"
after one passage) are run once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.head import halves
from perpend.progress import Progress, silent

DEFAULT_CONTEXT = 2048  # where neither the model nor its tokenizer states one


@dataclass(frozen=True)
class Encoder:
    """Text -> ids with a stated BOS policy.

    `bos`: "auto" leaves it to the tokenizer, "always" puts the BOS first where the tokenizer did not, "never"
    adds no special token at all.
    """

    tokenizer: object
    bos: str = "auto"

    def __post_init__(self) -> None:
        if self.bos not in ("auto", "always", "never"):
            raise InputError(f"bos must be 'auto', 'always' or 'never', got {self.bos!r}")
        if self.bos == "always" and self.bos_id is None:
            raise InputError("bos='always', but the tokenizer has no BOS token; use bos='auto' or 'never'")

    @property
    def bos_id(self) -> int | None:
        return getattr(self.tokenizer, "bos_token_id", None)

    @property
    def prefix(self) -> int:
        """What stands before an empty context: BOS, or EOS where there is none."""
        for name in ("bos_token_id", "eos_token_id"):
            if getattr(self.tokenizer, name, None) is not None:
                return int(getattr(self.tokenizer, name))
        raise InputError("the tokenizer has neither a BOS nor an EOS token to open an empty context with")

    def __call__(self, text: str) -> list[int]:
        opening = getattr(self.tokenizer, "bos_token", None)
        written = bool(opening) and text.startswith(opening)  # a template may spell the BOS out
        special = self.bos != "never" and not written
        ids = list(self.tokenizer.encode(text, add_special_tokens=special))
        if self.bos == "always" and ids[:1] != [self.bos_id]:
            ids = [self.bos_id, *ids]
        return ids

    def opens_with_bos(self) -> bool:
        """Whether an encoded text begins with the BOS: every result says so."""
        return self.bos_id is not None and self("a")[:1] == [self.bos_id]

    def pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Ids of the context and of the continuation."""
        if not context:
            ids = list(self.tokenizer.encode(continuation, add_special_tokens=False))
            # a continuation that brings its own BOS has its context with it
            return (ids[:1], ids[1:]) if ids[:1] == [self.prefix] else ([self.prefix], ids)
        spaces = len(context) - len(context.rstrip())
        if spaces:
            context, continuation = context[:-spaces], context[-spaces:] + continuation
        head = self(context)
        whole = self(context + continuation)
        return head, whole[len(head) :]


def context_length(model: nn.Module, tokenizer: object = None) -> int:
    """The longest input in tokens that the model states (its text half, its config, its tokenizer), else
    2048.
    """
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    for name in ("n_positions", "max_position_embeddings", "n_ctx"):
        if getattr(config, name, None) is not None:
            return int(getattr(config, name))
    stated = getattr(tokenizer, "model_max_length", None)
    # "unset" is a huge float in tokenizers
    return int(stated) if stated is not None and stated < 10**9 else DEFAULT_CONTEXT


@torch.no_grad()
def loglikelihoods(
    model: nn.Module,
    encoder: Encoder,
    requests: Sequence[tuple[str, str]],
    *,
    batch: int = 8,
    context: int | None = None,
    progress: Progress = silent,
) -> list[tuple[float, bool]]:
    """(log p(continuation | context) in nats, is it what greedy decoding would write) per request.

    `context`: the longest model input in tokens; longer ones lose tokens on the left. Batches are padded on
    the right, which a causal model cannot see; logits are computed where a continuation is scored only, in
    fp32.
    """
    limit = context or context_length(model, encoder.tokenizer)
    inputs: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    for index, (head, tail) in enumerate(requests):
        before, after = encoder.pair(head, tail)
        if not after:
            raise InputError(f"the continuation {tail!r} has no token of its own after its context")
        if len(after) > limit:
            raise InputError(f"a continuation of {len(after)} tokens does not fit a context of {limit}")
        run = tuple((before + after)[-(limit + 1) :][:-1])
        inputs.setdefault(run, []).append((index, tuple(after)))
    answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
    parts = halves(model)
    device = next(model.parameters()).device
    order = sorted(inputs, key=len, reverse=True)  # the longest first: memory runs out at once or never
    with progress(total=len(requests), unit="requests", description="log-likelihoods") as advance:
        for start in range(0, len(order), batch):
            rows = order[start : start + batch]
            width = len(rows[0])
            tokens = torch.zeros(len(rows), width, dtype=torch.long)
            for i, row in enumerate(rows):
                tokens[i, : len(row)] = torch.tensor(row)
            hidden = parts.trunk(tokens.to(device))
            for i, row in enumerate(rows):
                longest = max(len(after) for _, after in inputs[row])
                logs = _log_softmax(parts.head(hidden[i : i + 1, len(row) - longest : len(row)])[0])
                for index, after in inputs[row]:
                    part = logs[len(logs) - len(after) :]
                    target = torch.tensor(after, device=part.device)
                    total = part.gather(1, target[:, None]).sum(dtype=torch.float64)
                    answers[index] = (float(total), bool((part.argmax(1) == target).all()))
            advance(sum(len(inputs[row]) for row in rows))
    return answers


def _log_softmax(logits: Tensor) -> Tensor:
    return torch.log_softmax(logits.float(), -1)
