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

from perpend.batching import starts
from perpend.errors import InputError
from perpend.models.head import Halves, halves
from perpend.models.placement import input_device
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


@dataclass(frozen=True)
class _Run:
    """One model input and the continuations scored at its end: (number of the request, its tokens)."""

    tokens: tuple[int, ...]
    scored: tuple[tuple[int, tuple[int, ...]], ...]

    @property
    def longest(self) -> int:
        return max(len(after) for _, after in self.scored)


Answer = tuple[float, bool]
SAVED = 32  # tokens that reading a shared context once must save to be worth a pass of its own


@torch.no_grad()
def loglikelihoods(
    model: nn.Module,
    encoder: Encoder,
    requests: Sequence[tuple[str, str]],
    *,
    batch: int = 8,
    context: int | None = None,
    share: bool | None = None,
    progress: Progress = silent,
) -> list[Answer]:
    """(log p(continuation | context) in nats, is it what greedy decoding would write) per request.

    `context`: the longest model input in tokens; longer ones lose tokens on the left. Batches are padded on
    the right, which a causal model cannot see; logits are computed where a continuation is scored only, in
    fp32. `share`: read a context that several continuations have in common once and cache it; None does so on
    a CPU, where it pays. The first such context is scored both ways, and sharing ends where the two differ.
    """
    limit = context or context_length(model, encoder.tokenizer)
    alone, shared = _planned(encoder, requests, limit)
    answers: list[Answer] = [(0.0, False)] * len(requests)
    parts = halves(model)
    device = input_device(model)
    if share is None:
        share = device.type == "cpu"
    with progress(total=len(requests), unit="requests", description="log-likelihoods") as advance:
        proved = False
        for prefix, runs in shared:
            if not share or parts.after is None:
                alone += runs
                continue
            got = _after(parts, prefix, runs, device)
            if not proved:
                plain = dict(_plain(parts, runs, device))
                share = proved = got is not None and all(
                    abs(plain[index][0] - answer[0]) < 1e-2 and plain[index][1] == answer[1]
                    for index, answer in got
                )
                got = list(plain.items())
            for index, answer in got or ():
                answers[index] = answer
            advance(len(got or ()))
        alone.sort(key=lambda run: -len(run.tokens))  # the longest first: memory runs out at once or never
        for start in starts(len(alone), batch):
            for index, answer in _plain(parts, alone[start : start + batch], device):
                answers[index] = answer
                advance(1)
    return answers


def _planned(
    encoder: Encoder, requests: Sequence[tuple[str, str]], limit: int
) -> tuple[list[_Run], list[tuple[tuple[int, ...], list[_Run]]]]:
    """Runs of their own, and runs by the context they share."""
    inputs: dict[tuple[int, ...], list[tuple[int, tuple[int, ...]]]] = {}
    contexts: dict[tuple[int, ...], dict[tuple[int, ...], None]] = {}
    for index, (head, tail) in enumerate(requests):
        before, after = encoder.pair(head, tail)
        if not after:
            raise InputError(f"the continuation {tail!r} has no token of its own after its context")
        if len(after) > limit:
            raise InputError(f"a continuation of {len(after)} tokens does not fit a context of {limit}")
        tokens = tuple((before + after)[-(limit + 1) :][:-1])
        inputs.setdefault(tokens, []).append((index, tuple(after)))
        fits = len(before) + len(after) <= limit + 1
        contexts.setdefault(tuple(before) if fits else tokens, {})[tokens] = None
    runs = {tokens: _Run(tokens, tuple(scored)) for tokens, scored in inputs.items()}
    alone, shared, seen = [], [], set()
    for prefix, several in contexts.items():
        own = [runs[tokens] for tokens in several if tokens not in seen]
        seen.update(several)
        # the context's last token is read with each continuation: its logits predict the first token
        if (len(own) - 1) * (len(prefix) - 1) >= SAVED:
            shared.append((prefix[:-1], own))
        else:
            alone += own
    return alone, shared


def _plain(parts: Halves, runs: Sequence[_Run], device: torch.device) -> list[tuple[int, Answer]]:
    hidden = parts.trunk(_padded([run.tokens for run in runs]).to(device))
    answers = []
    for i, run in enumerate(runs):
        end = len(run.tokens)
        logs = torch.log_softmax(parts.head(hidden[i : i + 1, end - run.longest : end])[0].float(), -1)
        answers += _read(logs, run)
    return answers


def _after(
    parts: Halves, prefix: tuple[int, ...], runs: Sequence[_Run], device: torch.device
) -> list[tuple[int, Answer]] | None:
    """The same answers from a cached prefix; None where the model's cache cannot be repeated or continued."""
    assert parts.after is not None
    rows = [run.tokens[len(prefix) :] for run in runs]
    try:
        hidden = parts.after(torch.tensor([prefix], device=device), _padded(rows).to(device))
    except (AttributeError, TypeError, NotImplementedError, ValueError):
        return None
    logs = torch.log_softmax(parts.head(hidden).float(), -1)
    return [answer for i, run in enumerate(runs) for answer in _read(logs[i, : len(rows[i])], run)]


def _read(logs: Tensor, run: _Run) -> list[tuple[int, Answer]]:
    """logs: [t, V] log-probabilities that end at the last scored token."""
    answers = []
    for index, after in run.scored:
        part = logs[len(logs) - len(after) :]
        target = torch.tensor(after, device=part.device)
        total = part.gather(1, target[:, None]).sum(dtype=torch.float64)
        answers.append((index, (float(total), bool((part.argmax(1) == target).all()))))
    return answers


def _padded(rows: Sequence[Sequence[int]]) -> Tensor:
    tokens = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(list(row))
    return tokens
