"""What is no token id of a model is told before the model runs, by everything that reads one."""

from __future__ import annotations

import copy

import pytest
import torch

import tiny
from perpend.compression.blockwise import compress
from perpend.compression.error import measure
from perpend.compression.surgery import sensitivity
from perpend.errors import InputError
from perpend.evaluation.losses import divergence, token_nll
from perpend.models.limits import vocabulary
from perpend.studies.pruning import evaluate_sets
from perpend.surveys.attention import survey_attention
from perpend.surveys.updates import survey_updates

READERS = {
    "survey_attention": lambda model, ids: survey_attention(model, ids, window=8),
    "survey_updates": survey_updates,
    "token_nll": token_nll,
    "divergence": lambda model, ids: divergence(model, copy.deepcopy(model), ids),
    "evaluate_sets": lambda model, ids: evaluate_sets(model, ids, [[(0, 0)]]),
    "compress": lambda model, ids: compress(model, ids, "wanda"),
    "measure": lambda model, ids: measure(model, copy.deepcopy(model), ids),
    "sensitivity": lambda model, ids: sensitivity(model, copy.deepcopy(model), ids),
}


@pytest.fixture
def model() -> torch.nn.Module:
    return tiny.build("llama")  # its own, since compression changes it


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (lambda ids, rows: ids + rows, "outside the model's vocabulary of"),
        (lambda ids, rows: ids - rows, "outside the model's vocabulary of"),
        (lambda ids, rows: ids.bool(), "int64 or int32, not bool"),
    ],
    ids=["above", "below", "dtype"],
)
def test_ids_that_are_none_are_refused(model, name: str, wrong, told: str) -> None:
    rows = vocabulary(model)
    with pytest.raises(InputError, match=told):
        READERS[name](model, wrong(tiny.tokens(2, 24), rows))
    READERS[name](model, tiny.tokens(2, 24))  # what is right is read, the last id too
    READERS[name](model, torch.full((1, 24), rows - 1))


@pytest.mark.parametrize("layers", [[3], [-4], [0.5], ["a"]])
def test_layers_that_are_not_there_are_refused(model, layers: list) -> None:
    ids = tiny.tokens(2, 24)
    for reader in (
        survey_updates,
        lambda *a, **k: measure(model, *a, **k),
        lambda *a, **k: sensitivity(model, *a, **k),
    ):
        with pytest.raises(InputError, match=r"does not exist|whole numbers"):
            reader(model, ids, layers=layers)
    with pytest.raises(InputError, match=r"is not there|whole numbers"):
        survey_attention(model, ids, window=8, layers=layers)


def test_the_last_layer_counted_from_the_end_is_itself(model) -> None:
    other, ids = copy.deepcopy(model), tiny.tokens(2, 24)
    compress(other, ids, "wanda")
    back, front = (sensitivity(model, other, ids, layers=[index]) for index in (-1, 2))
    assert back.equals(front)
    assert set(back["layer"]) == {2}
