"""What a survey refuses, and how it says so: bad input, damaged models."""

from __future__ import annotations

import pytest
import torch

import tiny
from attention_oracle import gpt_neo
from perpend.errors import InputError, PerpendError
from perpend.surveys.attention import survey_attention

W = 8


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_not_finite_logits_name_the_first_layer_that_any_support_sees(name: str) -> None:
    """The layer after the damaged one slides, and only a narrow window has rows there."""
    model, tokens = tiny.build(name), tiny.tokens(3, 90)
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[-1, -1] = float("nan")
    with pytest.raises(PerpendError, match=r"^layer 2 "):
        survey_attention(model, tokens, window=16, windows=(4,))


def test_not_finite_logits_of_the_support_are_said_of_the_support() -> None:
    model, tokens = tiny.build("llama"), tiny.tokens(3, 90)
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[0, 0] = float("nan")
    with pytest.raises(PerpendError, match=r"^layer 1 \(.*\), head 0: its attention logits"):
        survey_attention(model, tokens, window=16, whole_rows="log")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(sample=-1), "sample is a number of rows"),
        (dict(layers=[]), "no layer is chosen"),
        (dict(tokens=torch.zeros(2, 0, dtype=torch.long)), "have no token"),
    ],
)
def test_requests_that_leave_nothing_are_refused_in_words(options: dict, words: str) -> None:
    options = {"tokens": tiny.tokens(2, 30), **options}
    with pytest.raises(InputError, match=words):
        survey_attention(tiny.tiny("llama"), window=W, **options)


def test_an_automatic_sink_needs_queries_and_keys() -> None:
    with pytest.raises(InputError, match="sink='auto' needs a model that shows queries and keys"):
        survey_attention(gpt_neo(), tiny.tokens(2, 30), window=W, sink="auto")


def test_not_finite_logits_name_the_layer_and_the_head() -> None:
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[8:16] = float("inf")  # head 1
    with pytest.raises(PerpendError, match=r"layer 1 \(model\.layers\.1\.self_attn\), head 1: .*not finite"):
        survey_attention(model, tiny.tokens(3, 30), window=W)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"window": 30}, "too short"),
        ({"window": 1}, "no composition"),
        ({"sink": "last"}, "unknown sink rule"),
        ({"sink": [9]}, "outside the support"),
        ({"sink": "sep"}, "outside the support"),
        ({"sink": "sep", "attention_mask": torch.ones(3, 30).triu(-20)}, "outside the support"),
        ({"sink": []}, "at least one position"),
        ({"sink": "first:8"}, "leave no content"),
        ({"sink": "first:9999999999999"}, "outside the support"),
        ({"sink": "first:²"}, "unknown sink rule"),
        ({"sink": "³"}, "unknown sink rule"),
        ({"sink": "1 2"}, "unknown sink rule"),
        ({"sink": "virtual"}, "no learned sink"),
        ({"queries": (3, 9)}, "does not see"),
        ({"queries": (9, 9)}, "pair"),
        ({"queries": "no_sinks"}, "encoders"),
        ({"queries": "some"}, "queries is"),
        ({"batch": 0}, "at least 1"),
        ({"attention_mask": torch.ones(3, 9)}, "shape"),
        ({"attention_mask": torch.zeros(3, 30)}, "no real token"),
        ({"attention_mask": (torch.arange(30) != 5).repeat(3, 1)}, "sequence 0 has padding between real"),
        ({"layers": [5]}, "not there"),
    ],
)
def test_input_that_does_not_fit_is_told(changes: dict, words: str) -> None:
    options = {"window": W, **changes}
    with pytest.raises(InputError, match=words):
        survey_attention(tiny.tiny("llama"), tiny.tokens(3, 30), **options)


def test_wrong_tokens() -> None:
    with pytest.raises(InputError, match="ids"):
        survey_attention(tiny.tiny("llama"), tiny.tokens(3, 30)[0])
    with pytest.raises(InputError, match="not list"):
        survey_attention(tiny.tiny("llama"), [1, 2])
    with pytest.raises(InputError, match="same number"):
        survey_attention(tiny.tiny("llama"), {"input_ids": tiny.tokens(3), "attention_mask": tiny.tokens(2)})
