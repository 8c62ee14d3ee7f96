"""A batch below one is refused wherever a pass is cut into batches: an empty range would answer zeros."""

import pytest
import torch

from perpend.batching import batches, order, starts
from perpend.compression.error import measure
from perpend.errors import InputError
from perpend.evaluation.losses import divergence, token_nll
from perpend.evaluation.scoring import Encoder, loglikelihoods
from perpend.studies.diagonal import diagonal_study
from perpend.studies.pruning import evaluate_sets
from perpend.surveys.attention import survey_attention
from perpend.surveys.updates import survey_updates
from tiny import byte_tokenizer, tiny

PASSES = {
    "loglikelihoods": lambda m, t, b: loglikelihoods(m, Encoder(byte_tokenizer()), [("a", "b")], batch=b),
    "token_nll": lambda m, t, b: token_nll(m, t, batch=b),
    "divergence": lambda m, t, b: divergence(m, m, t, batch=b),
    "measure": lambda m, t, b: measure(m, m, t, batch=b),
    "diagonal_study": lambda m, t, b: diagonal_study(m, t, batch=b),
    "evaluate_sets": lambda m, t, b: evaluate_sets(m, t, [[(0, 0)]], batch=b),
    "survey_attention": lambda m, t, b: survey_attention(m, t, window=4, batch=b),
    "survey_updates": lambda m, t, b: survey_updates(m, t, batch=b),
}


@pytest.mark.parametrize("batch", [0, -1])
@pytest.mark.parametrize("name", PASSES)
def test_a_batch_below_one_is_refused(name: str, batch: int) -> None:
    tokens = torch.arange(2, 18).reshape(2, 8)
    with pytest.raises(InputError, match="at least 1"):
        PASSES[name](tiny("llama"), tokens, batch)


def test_every_row_is_in_one_batch() -> None:
    assert list(starts(7, 3)) == [0, 3, 6]
    assert list(starts(7, 3, first=2)) == [2, 5]
    assert [len(part) for part in batches(torch.zeros(7, 2), 3)] == [3, 3, 1]


def test_rows_come_in_order_for_seed_zero_and_as_the_seed_shuffles_them_else() -> None:
    assert order(5, 0).tolist() == [0, 1, 2, 3, 4]
    assert order(0, 0).tolist() == []
    shuffled = torch.randperm(5, generator=torch.Generator().manual_seed(7))
    assert order(5, 7).tolist() == shuffled.tolist() != [0, 1, 2, 3, 4]
