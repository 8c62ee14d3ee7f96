"""How a survey goes through a model: what it takes together, in which pieces, with what memory."""

from __future__ import annotations

import numpy as np
import pytest

import tiny
from perpend.errors import InputError
from perpend.surveys import capture, rows
from perpend.surveys.attention import survey_attention

W = 8


def test_importance_is_left_out_where_it_is_not_wanted() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W, importance=False)
    whole = survey_attention(model, tokens, window=W)
    np.testing.assert_array_equal(survey.stacked("statistics"), whole.stacked("statistics"))
    np.testing.assert_array_equal(survey.signatures, whole.signatures)
    with pytest.raises(InputError, match="importance=True"):
        survey.sink_rate()
    with pytest.raises(InputError, match="importance=True"):
        _ = survey.importance


def test_blocks_do_not_depend_on_the_batch_and_resume_bit_for_bit() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(7, 30)
    kept: dict[str, object] = {}
    computed: list[str] = []

    def store(name, compute):
        if name not in kept:
            computed.append(name)
            kept[name] = compute()
        return kept[name]

    first = survey_attention(model, tokens, window=W, block=3, batch=2, store=store)
    assert computed == ["attention-0", "attention-1", "attention-2"]
    del kept["attention-1"]
    computed.clear()
    again = survey_attention(model, tokens, window=W, block=3, batch=2, store=store)
    assert computed == ["attention-1"]
    assert np.array_equal(first.signatures, again.signatures)
    for name, value in first.statistics.items():
        assert np.array_equal(value, again.statistics[name], equal_nan=True)
    other = survey_attention(model, tokens, window=W, block=3, batch=3)
    np.testing.assert_allclose(first.signatures, other.signatures, atol=1e-5)
    assert first.stacked("rows").tolist() == [[66] * 3, [66] * 3, [22] * 3]


@pytest.mark.parametrize("name", ["qwen2", "gpt_oss", "bloom", "gemma2"])
def test_what_is_taken_together_is_the_same_as_one_by_one(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sequences and layers share operations, whatever their masks, sinks and biases."""
    model, tokens = tiny.tiny(name), tiny.tokens(5, 30)
    options = dict(window=W, retained=True, windows=(4,), value_weights=("value",), row_sample=20)
    together = survey_attention(model, tokens, **options)
    monkeypatch.setattr(rows, "CPU_LOGITS", 1)  # a chunk holds eight rows, so a sequence takes several
    alone = survey_attention(model, tokens, **options)
    for ours, theirs in (
        (together, alone),
        (together.windows[4], alone.windows[4]),
        (together.weighted["value"], alone.weighted["value"]),
    ):
        for name in ("logits", "arithmetic", "statistics", "rows"):
            np.testing.assert_allclose(ours.stacked(name), theirs.stacked(name), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(together.importance, alone.importance, rtol=1e-5)
    np.testing.assert_allclose(together.sample, alone.sample, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(together.picked.logits, alone.picked.logits, atol=1e-5)


def test_whole_texts_pass_through_the_model_once() -> None:
    model, tokens, passed = tiny.tiny("llama"), tiny.tokens(3, 30), []
    handle = model.model.embed_tokens.register_forward_pre_hook(
        lambda m, args: passed.append(args[0].numel())
    )
    survey_attention(model, tokens, window=W)
    handle.remove()
    assert passed == [3 * 30]


def test_memory_stays_flat_in_the_length() -> None:
    """No buffer of the survey grows with T squared: chunks of queries against the kept keys."""
    model = tiny.tiny("llama")
    held = []
    original = capture.Work.take

    def take(self, name, shape, like):
        held.append(int(np.prod(shape)))
        return original(self, name, shape, like)

    capture.Work.take = take
    try:
        sizes = {}
        for length in (400, 1600):
            held.clear()
            survey_attention(model, tiny.tokens(1, length), window=W)
            sizes[length] = max(held)
    finally:
        capture.Work.take = original
    assert sizes[1600] <= max(sizes[400] * 4, module_limit())


def module_limit() -> int:
    from perpend.surveys.rows import CPU_LOGITS

    return CPU_LOGITS
