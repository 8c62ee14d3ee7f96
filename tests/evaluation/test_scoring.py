"""Log-likelihoods of continuations: contexts that are shared, and those that are too long."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from perpend.evaluation.scoring import Encoder, loglikelihoods


def test_what_is_too_long_loses_its_beginning(model, tokenizer):
    encoder = Encoder(tokenizer)
    text = "the quick brown fox " * 30
    short = loglikelihoods(model, encoder, [(text, " jumps")], context=20)[0][0]
    head, tail = encoder.pair(text, " jumps")
    with torch.no_grad():
        logs = torch.log_softmax(model(torch.tensor([(head + tail)[-21:][:-1]])).logits[0], -1)
    want = sum(float(logs[len(logs) - len(tail) + i, token]) for i, token in enumerate(tail))
    assert short == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3", "qwen3_next", "bloom"])
def test_a_shared_context_gives_the_same_answers(family, monkeypatch):
    from perpend.evaluation import scoring
    from tiny import VOCAB, tiny

    class Letters:
        """Characters as tokens, for the tiny models' vocabulary."""

        bos_token = bos_token_id = None
        eos_token_id = 2

        def encode(self, text, add_special_tokens=True):
            return [3 + ord(one) % (VOCAB - 4) for one in text]

    requests = [
        (f"a rather long question number {i} ", tail) for i in range(3) for tail in ("yes", "no, never", "?")
    ]
    encoder = Encoder(Letters())
    plain = loglikelihoods(tiny(family), encoder, requests, share=False, context=200)
    used = []
    real = scoring._after
    monkeypatch.setattr(scoring, "SAVED", 32)
    monkeypatch.setattr(scoring, "_after", lambda *given: used.append(given[1]) or real(*given))
    shared = loglikelihoods(tiny(family), encoder, requests, share=True, context=200)
    assert len(used) == (1 if family == "qwen3_next" else 3)  # linear attention's state cannot be repeated
    assert [ll for ll, _ in shared] == pytest.approx([ll for ll, _ in plain], abs=1e-4)
    assert [greedy for _, greedy in shared] == [greedy for _, greedy in plain]


def test_sharing_ends_where_it_would_change_an_answer(model, tokenizer, monkeypatch):
    """A cache that forgets is caught by the first context, which is scored both ways."""
    from perpend.evaluation import scoring

    real = scoring.halves

    def forgetful(own):
        parts = real(own)
        return replace(parts, after=lambda prefix, rows: parts.trunk(rows))

    requests = [
        ("the quick brown fox jumps over the lazy dog, and " * 3, tail) for tail in ("sits", "runs off")
    ]
    plain = loglikelihoods(model, Encoder(tokenizer), requests, share=False)
    monkeypatch.setattr(scoring, "SAVED", 32)
    used = []
    real_after = scoring._after
    monkeypatch.setattr(scoring, "_after", lambda *given: used.append(1) or real_after(*given))
    monkeypatch.setattr(scoring, "halves", forgetful)
    assert loglikelihoods(model, Encoder(tokenizer), requests, share=True) == plain
    assert used == [1]
