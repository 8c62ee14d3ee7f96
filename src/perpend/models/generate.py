"""Greedy decoding of prompts given as token ids, with the model's own cache where it has one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from perpend.models.head import logits_of
from perpend.models.placement import input_device

Done = Callable[[list[int]], bool]  # the tokens written so far -> is this row finished?


@torch.no_grad()
def greedy(
    model: nn.Module,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int,
    done: Sequence[Done],
    stops: Sequence[int] = (),
    pad: int = 0,
) -> list[list[int]]:
    """Up to `steps` tokens after each prompt; a row ends at a token of `stops` or when its `done` says so.

    Prompts of different lengths are padded on the left and masked. A model without `generate` (a plain module
    that maps tokens to logits) takes one prompt at a time and recomputes it: slow, and the same tokens.
    """
    if not hasattr(model, "generate"):
        return [_recomputed(model, row, steps, end, stops) for row, end in zip(prompts, done)]
    from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

    width = max(map(len, prompts))
    device = input_device(model)
    tokens = torch.full((len(prompts), width), pad, dtype=torch.long)
    mask = torch.zeros(len(prompts), width, dtype=torch.long)
    for i, row in enumerate(prompts):
        tokens[i, width - len(row) :] = torch.tensor(list(row))
        mask[i, width - len(row) :] = 1

    class EachRow(StoppingCriteria):
        def __call__(self, input_ids: Tensor, scores: Tensor, **kwargs: object) -> Tensor:
            finished = [end(row) for end, row in zip(done, input_ids[:, width:].tolist())]
            return torch.tensor(finished, device=input_ids.device)

    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=steps,
        eos_token_id=list(stops) or None,
        pad_token_id=pad,
        use_cache=True,
    )
    output = model.generate(
        input_ids=tokens.to(device),
        attention_mask=mask.to(device),
        generation_config=settings,
        stopping_criteria=StoppingCriteriaList([EachRow()]),
    )
    return [_ended(row, stops) for row in output[:, width:].tolist()]


def _recomputed(
    model: nn.Module, prompt: Sequence[int], steps: int, done: Done, stops: Sequence[int]
) -> list[int]:
    tokens = torch.tensor([list(prompt)], device=input_device(model))
    written: list[int] = []
    for _ in range(steps):
        step = logits_of(model(tokens))[:, -1].argmax(-1, keepdim=True)
        written.append(int(step))
        if written[-1] in stops or done(written):
            break
        tokens = torch.cat([tokens, step], 1)
    return _ended(written, stops)


def _ended(row: list[int], stops: Sequence[int]) -> list[int]:
    """What stands before the first stop token."""
    for index, token in enumerate(row):
        if token in stops:
            return row[:index]
    return row
