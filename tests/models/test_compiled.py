"""Models that torch has compiled: what perpend sees and changes in them is what it is without."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import perpend
import tiny
from attention_oracle import gpt_neo
from perpend.models.layout import blocks


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    """Each test compiles anew; the backend runs what was traced, so no compiler is needed."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(model: nn.Module) -> nn.Module:
    return torch.compile(model, backend="eager")  # type: ignore[return-value]


def in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def by_block(model: nn.Module) -> nn.Module:
    for i, layer in enumerate(model.model.layers):
        model.model.layers[i] = torch.compile(layer, backend="eager")
    return model


def edited(site: str) -> Callable[[nn.Module, Tensor], Any]:
    def run(model: nn.Module, tokens: Tensor) -> Tensor:
        with perpend.edit(model, site, 0.0):
            return model(tokens).logits

    return run


def ablated(model: nn.Module, tokens: Tensor) -> Tensor:
    with perpend.ablate(model, [(0, 1)]) as ablation:
        logits = model(tokens).logits
    assert ablation.checked == {0}
    return logits


def updates(model: nn.Module, tokens: Tensor) -> Any:
    return perpend.survey_updates(model, tokens).mean("ratio")


def attention(model: nn.Module, tokens: Tensor) -> Any:
    return perpend.survey_attention(model, tokens, window=4).signatures


OPERATIONS = {
    "residual.attn": edited("residual.attn"),
    "value.exclude_self": edited("value.exclude_self"),
    "ablated": ablated,
    "updates": updates,
    "attention": attention,
}


def one_layer() -> nn.Module:
    model = tiny.build("llama")
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    return model


@pytest.mark.parametrize("ran", [True, False], ids=["ran before", "never ran"])
@pytest.mark.parametrize(
    ("compiled", "name"),
    [*((whole, name) for name in OPERATIONS), (in_place, "residual.attn"), (by_block, "residual.attn")],
)
def test_a_compiled_model_gives_the_same(compiled: Any, name: str, ran: bool) -> None:
    tokens = tiny.tokens(2, 16)
    model = one_layer()
    with torch.no_grad():
        expected = OPERATIONS[name](one_layer(), tokens)
        plain = one_layer()(tokens).logits
        model = compiled(model)
        if ran:  # what was compiled without a hook does not call it
            model(tokens)
        found = OPERATIONS[name](model, tokens)
        after = model(tokens).logits
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after, plain, rtol=1e-5, atol=1e-6)


def test_compiled_code_runs_again_after_an_edit() -> None:
    made: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        def run(*values: Any) -> Any:
            made.append(1)
            return graph.forward(*values)

        return run

    model, tokens = one_layer(), tiny.tokens(2, 16)
    model = torch.compile(model, backend=backend)
    with torch.no_grad():
        model(tokens)
        before = len(made)
        with perpend.edit(model, "residual.attn", 0.0), perpend.edit(model, "value.full", 0.0):
            model(tokens)
        assert before
        assert len(made) == before
        model(tokens)
    assert len(made) == 2 * before


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        ("llama", lambda model: whole(model.model)),  # a trunk, whose blocks lie at the wrapper's own door
        ("bert", lambda model: setattr(model.bert, "encoder", whole(model.bert.encoder)) or model),
    ],
)
def test_a_compiled_trunk_or_part_of_it_gives_the_same_updates(name: str, compiled: Any) -> None:
    tokens = tiny.tokens(2, 16)
    expected = perpend.survey_updates(tiny.build(name), tokens).mean("ratio")
    found = perpend.survey_updates(compiled(tiny.build(name)), tokens).mean("ratio")
    torch.testing.assert_close(torch.as_tensor(found), torch.as_tensor(expected), rtol=1e-5, atol=1e-6)


def test_a_compiled_tower_is_not_taken_for_the_decoder() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config = type("Config", (), {"model_type": "sound"})()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(5))

    model = tiny.build("llama")
    names = [block.name for block in blocks(model)]
    model._modules = {"tower": whole(Tower()), **model._modules}
    assert [block.name for block in blocks(model)] == names


def test_heads_of_a_compiled_model_that_shows_only_probabilities_are_ablated() -> None:
    tokens = tiny.tokens(2, 16)
    expected = ablated(gpt_neo(), tokens)
    model = whole(gpt_neo())
    with torch.no_grad():
        model(tokens)
        torch.testing.assert_close(ablated(model, tokens), expected, rtol=1e-5, atol=1e-6)
