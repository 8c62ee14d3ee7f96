"""Losses against the plain formula, windows against the harness' own, intervals against their meaning."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from perpend.errors import InputError
from perpend.evaluation.losses import divergence, token_nll
from perpend.evaluation.perplexity import paired, perplexity
from perpend.evaluation.windows import as_windows, cut, rolling
from perpend.models.head import halves
from perpend.surveys.updates import survey_updates
from tiny import CAUSAL, VOCAB, tiny


def plain_nll(model, tokens):
    with torch.no_grad():
        logs = torch.log_softmax(model(tokens).logits.float(), -1)
    return -logs[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


def random_tokens(n=5, length=24, seed=0):
    return torch.randint(3, VOCAB, (n, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", CAUSAL)
def test_losses_equal_the_models_own_logits(name):
    model, tokens = tiny(name), random_tokens()
    own = plain_nll(model, tokens)
    streamed = token_nll(model, tokens, batch=2, chunk=7)
    assert torch.allclose(streamed.values, own, atol=2e-5)
    assert np.allclose(streamed.sums, own.double().sum(1), atol=1e-3)
    assert halves(model).chunked, f"{name} would hold the logits of a whole batch"


def test_the_head_runs_on_slices_only():
    model, seen = tiny("llama"), []
    handle = model.get_output_embeddings().register_forward_hook(
        lambda m, i, o: seen.append(o.shape[:2].numel())
    )
    try:
        token_nll(model, random_tokens(4, 40), batch=4, chunk=16)
    finally:
        handle.remove()
    assert max(seen) <= 16
    assert "forward" not in model.model.__dict__  # the trunk is itself again


def test_a_bare_module_is_scored_whole():
    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB))

        def forward(self, tokens):
            return self.table[tokens]

    model, tokens = Bare(), random_tokens()
    with torch.no_grad():
        want = torch.nn.functional.cross_entropy(
            model(tokens)[:, :-1].flatten(0, 1), tokens[:, 1:].flatten(), reduction="none"
        )
    assert torch.allclose(token_nll(model, tokens).values.flatten(), want, atol=1e-5)


def test_a_model_without_logits_is_refused():
    with pytest.raises(InputError, match="logits"):
        token_nll(tiny("llama").model, random_tokens())


def test_tokens_of_another_tokenizer_are_refused():
    with pytest.raises(InputError, match="vocabulary"):
        token_nll(tiny("llama"), random_tokens() + VOCAB)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 60), st.integers(2, 12), st.integers(1, 12), st.booleans())
def test_every_token_is_scored_once(total, context, stride, bos):
    room = context - bos
    if stride > room:
        with pytest.raises(InputError):
            cut(range(total), context, stride, bos=99 if bos else None)
        return
    windows = cut(range(total), context, stride, bos=99 if bos else None)
    scored = windows.tokens[windows.scored].tolist()
    assert len(scored) == len(set(scored))
    # without a BOS the first token of a window that overlaps nothing has no context
    missing = set(range(total)) - set(scored)
    allowed = set() if bos else ({*range(0, total, room)} if stride == room else {0})
    assert missing == allowed
    if bos:
        assert (windows.tokens[:, 0] == 99).all()
    assert windows.tokens.shape[1] == context
    for mask in windows.scored[1:]:  # every later window keeps the context it promises
        assert int(mask.nonzero()[0]) >= context - stride


def test_rolling_windows_are_the_harness_own():
    utils = pytest.importorskip("lm_eval.utils")
    rng = np.random.default_rng(0)
    documents = [rng.integers(1, 50, size).tolist() for size in (1, 4, 5, 9, 17)]
    windows = rolling(documents, 4, 0, words=[1] * 5)
    rows = iter(zip(windows.tokens, windows.scored, windows.sequence))
    for index, document in enumerate(documents):
        own = map(utils.make_disjoint_window, utils.get_rolling_token_windows(document, 0, 4, 1))
        for context, target in own:
            row, mask, unit = next(rows)
            first = int(mask.nonzero()[0])
            assert int(unit) == index
            assert row[mask].tolist() == target
            assert row[:first].tolist() == context
    assert next(rows, None) is None


def test_stride_gives_every_token_the_context_it_promises():
    model, stream = tiny("llama"), random_tokens(1, 50, seed=3)[0]
    windows = cut(stream, 16, 4)
    nll = token_nll(model, windows)
    assert nll.counts.sum() == 49
    # token 30 is the third of the window's four new ones: its window is known, so its loss is too
    begin = next(b for b in range(0, 50, 4) if b + 16 > 30)
    want = plain_nll(model, stream[None, begin : begin + 16])[0, 30 - begin - 1]
    row = begin // 4
    assert nll.values[row, 30 - begin - 1] == pytest.approx(float(want), abs=1e-5)


def test_word_perplexity_divides_by_words():
    model = tiny("llama")
    documents = [random_tokens(1, 9)[0].tolist(), random_tokens(1, 21, seed=2)[0].tolist()]
    nll = token_nll(model, rolling(documents, 8, 1, words=[4, 10], split="test"))
    assert nll.counts.tolist() == [9, 21]
    result = perplexity("wikitext_word", nll, unit="word").results
    assert result["loss"] == pytest.approx(nll.sums.sum() / 14)
    assert (result["words"], result["tokens"], result["sequences"]) == (14, 30, 2)
    assert {"context", "stride", "bos", "split"} <= set(result)
    assert perplexity("token", nll).loss == pytest.approx(nll.sums.sum() / 30)


def test_a_model_agrees_with_itself_and_differs_from_another():
    model, tokens = tiny("llama"), random_tokens()
    base, same = divergence(model, model, tokens, batch=2, chunk=9)
    assert torch.equal(base.values, same.values)
    assert float(same.kl.abs().max()) == 0.0
    assert bool((same.agreement[same.scored] == 1).all())
    _, other = divergence(model, tiny("mistral"), tokens, batch=2, chunk=9)
    with torch.no_grad():
        p = torch.log_softmax(model(tokens).logits[:, :-1], -1)
        q = torch.log_softmax(tiny("mistral")(tokens).logits[:, :-1], -1)
    assert torch.allclose(other.kl, (p.exp() * (p - q)).sum(-1), atol=1e-5)
    assert torch.equal(other.agreement == 1, p.argmax(-1) == q.argmax(-1))
    assert np.allclose(other.mean_by_position("kl"), other.kl.double().mean(0))


def test_within_is_entered_for_the_other_half_only():
    from contextlib import contextmanager

    model, tokens = tiny("llama"), random_tokens()

    @contextmanager
    def louder():
        weight = model.model.norm.weight
        weight.data.mul_(2.0)
        try:
            yield
        finally:
            weight.data.div_(2.0)

    base, other = divergence(model, model, tokens, within=louder)
    assert torch.allclose(base.values, plain_nll(model, tokens), atol=2e-5)
    with louder():
        assert torch.allclose(other.values, plain_nll(model, tokens), atol=2e-5)
    assert float(other.kl.max()) > 1e-3


def test_paired_interval_is_narrower_than_two_single_ones_and_covers():
    """Sequences differ a lot, the models little: only pairing can see the gap of 0.02."""
    rng = np.random.default_rng(0)
    from perpend.evaluation.losses import TokenNLL

    windows = as_windows(torch.zeros(200, 33, dtype=torch.long))
    level = rng.normal(3, 0.5, (200, 1))
    first = torch.tensor(level + rng.normal(0, 0.1, (200, 32))).float()
    second = first + torch.tensor(rng.normal(0.02, 0.02, (200, 32))).float()
    base = TokenNLL(first, windows.scored[:, 1:], windows)
    other = TokenNLL(second, windows.scored[:, 1:], windows)
    gap = paired(base, other)
    assert gap.low < 0.02 < gap.high
    assert gap.low > 0
    assert gap.ratio == pytest.approx(math.exp(gap.difference))
    single = perplexity("x", base)
    assert single.high - single.low > 10 * (gap.high - gap.low)
    assert paired(base, other, seed=0).results == gap.results


def test_paired_needs_the_same_windows():
    model = tiny("llama")
    with pytest.raises(InputError, match="same windows"):
        paired(token_nll(model, random_tokens()), token_nll(model, random_tokens(seed=1)))


def test_numbers_that_do_not_exist_are_none():
    model = tiny("llama")
    one = perplexity("x", token_nll(model, random_tokens(1)))
    assert one.results["loss_low"] is None
    broken = token_nll(model, random_tokens())
    broken.values[0, 3] = math.nan
    result = perplexity("x", broken).results
    assert result["loss"] is None
    assert result["nonfinite_tokens"] == 1


def test_a_model_that_looks_ahead_is_refused():
    import transformers

    torch.manual_seed(0)
    encoder = transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=VOCAB,
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=16,
            initializer_range=0.5,  # at the usual 0.02 a token hardly sees another
        )
    ).eval()
    with pytest.raises(InputError, match="not causal"):
        token_nll(encoder, random_tokens())


def test_dropout_is_off_and_the_mode_put_back():
    import transformers

    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=1, n_head=2, n_positions=64)
    )
    model.train()
    first, second = token_nll(model, random_tokens()), token_nll(model, random_tokens())
    assert torch.equal(first.values, second.values)
    assert model.training


@pytest.mark.parametrize("batch", [0, -1])
def test_a_batch_of_no_sequence_is_refused(batch: int) -> None:
    """A range that steps backwards would read nothing and give a loss of zero."""
    model, tokens = tiny("llama"), torch.ones(2, 8, dtype=torch.long)
    with pytest.raises(InputError, match="at least 1"):
        token_nll(model, tokens, batch=batch)
    with pytest.raises(InputError, match="at least 1"):
        divergence(model, model, tokens, batch=batch)
    with pytest.raises(InputError, match="at least 1"):
        survey_updates(model, tokens, batch=batch)
