"""Greedy continuations of text prompts, cut at stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import nn

from perpend.batching import starts
from perpend.errors import InputError
from perpend.evaluation.scoring import Encoder
from perpend.models.generate import greedy
from perpend.progress import Progress, silent


def stop_tokens(model: nn.Module, tokenizer: object) -> tuple[int, ...]:
    """End-of-text ids that the tokenizer or the model's generation settings name."""
    own = getattr(getattr(model, "generation_config", None), "eos_token_id", None)
    listed = own if isinstance(own, (list, tuple)) else [own]
    return tuple({int(one) for one in (*listed, getattr(tokenizer, "eos_token_id", None)) if one is not None})


def continuations(
    model: nn.Module,
    encoder: Encoder,
    prompts: Sequence[str],
    *,
    steps: int,
    until: Sequence[str] = (),
    enough: Sequence[Callable[[str], bool]] | None = None,
    batch: int = 1,
    context: int,
    progress: Progress = silent,
) -> list[str]:
    """What the model writes after each prompt, at most `steps` tokens, before the first of the `until`
    strings.

    enough: per prompt, whether the text so far already decides its score; writing more would change nothing.
    A prompt longer than `context` - steps tokens loses its beginning.
    """
    room = context - steps
    if room < 1:
        raise InputError(f"a context of {context} tokens has no room for {steps} generated ones")
    tokenizer = encoder.tokenizer
    encoded = [encoder(prompt)[-room:] for prompt in prompts]
    stops = stop_tokens(model, tokenizer)
    pad = getattr(tokenizer, "pad_token_id", None)
    pad = pad if pad is not None else (stops[0] if stops else 0)
    texts = [""] * len(prompts)

    def ended(index: int) -> Callable[[list[int]], bool]:
        def check(written: list[int]) -> bool:
            text = _text(tokenizer, written)
            return any(stop in text for stop in until) or bool(enough and enough[index](text))

        return check

    order = sorted(range(len(prompts)), key=lambda index: -len(encoded[index]))
    with progress(total=len(prompts), unit="prompts", description="generation") as advance:
        for start in starts(len(order), batch):
            rows = order[start : start + batch]
            written = greedy(
                model,
                [encoded[index] for index in rows],
                steps=steps,
                done=[ended(index) for index in rows],
                stops=stops,
                pad=pad,
            )
            for index, row in zip(rows, written):
                text = _text(tokenizer, row)
                for stop in until:
                    text = text.split(stop)[0]
                texts[index] = text
            advance(len(rows))
    return texts


def _text(tokenizer: object, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), skip_special_tokens=True)
