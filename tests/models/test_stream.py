"""Contributions to the stream: the identity, what an edit does, and that nothing stays behind."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

import tiny
from perpend.errors import InputError, PerpendError
from perpend.models import stream
from perpend.models.families import known
from perpend.models.stream import blocks, contributions, family, identity_error


def run(name: str, model: nn.Module | None = None, **inputs: torch.Tensor) -> torch.Tensor:
    model = tiny.tiny(name) if model is None else model
    with torch.no_grad():
        return model(**(inputs or tiny.inputs(name)))[0]


def collect(name: str) -> tuple[dict, torch.Tensor]:
    seen = {}
    with contributions(tiny.tiny(name), lambda c: seen.update({(c.layer, c.part): c})):
        output = run(name)
    return seen, output


def hooks(model: nn.Module) -> int:
    return sum(
        len(module._forward_hooks) + len(module._forward_pre_hooks) + len(module._forward_hooks_with_kwargs)
        for module in model.modules()
    )


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_watching_changes_nothing_and_sums_to_the_output(name):
    plain = run(name)
    seen, output = collect(name)
    assert torch.equal(plain, output)
    form = family(tiny.tiny(name)).form
    for block in blocks(tiny.tiny(name)):
        attn, mlp, whole = (seen[block.index, part] for part in ("attn", "mlp", "block"))
        assert attn.update.shape == mlp.update.shape == whole.update.shape == whole.reference.shape
        if form == "post_norm":
            first, _ = (block.find(path) for path in block.family.sums)
            with torch.no_grad():
                assert torch.equal(first(attn.reference + attn.update), mlp.reference)
                second = block.find(block.family.sums[1])
                end = second(mlp.reference + mlp.update)
            torch.testing.assert_close(whole.reference + whole.update, end)
        else:
            error, bound = identity_error(
                attn.reference, [attn.update, mlp.update], whole.reference + whole.update
            )
            assert (error <= 2 * bound).all()
        if form == "sequential":
            torch.testing.assert_close(mlp.reference, attn.reference + attn.update)
        if form == "parallel":
            assert torch.equal(mlp.reference, attn.reference)


@pytest.mark.parametrize("name", tiny.FAMILIES)
@pytest.mark.parametrize("part", ["attn", "mlp", "block"])
def test_an_edit_acts_where_it_is_made(name, part):
    """A zeroed contribution: gone from the sum, and an edited attention is what the MLP reads."""
    plain, _ = collect(name)
    edited = {}

    def zero(c):
        return torch.zeros_like(c.update)

    with (
        contributions(tiny.tiny(name), zero, parts=part, layers=[1]),
        contributions(tiny.tiny(name), lambda c: edited.update({(c.layer, c.part): c})),
    ):
        output = run(name)
    assert not torch.equal(output, run(name))
    assert torch.equal(edited[0, "block"].update, plain[0, "block"].update)  # layer 0 is before the edit
    assert torch.equal(edited[1, part].reference, plain[1, part].reference)
    if part == "block":
        assert torch.equal(edited[2, "block"].reference, plain[1, "block"].reference)
        return
    assert (edited[1, part].update == 0).all()
    form = family(tiny.tiny(name)).form
    if part == "attn" and form == "sequential":
        assert torch.equal(edited[1, "mlp"].reference, edited[1, "attn"].reference)
    if part == "mlp" or form == "parallel":
        other = "attn" if part == "mlp" else "mlp"
        assert torch.equal(edited[1, other].update, plain[1, other].update)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_returning_the_update_itself_is_the_same_model(name):
    with contributions(tiny.tiny(name), lambda c: c.update.clone(), parts=("attn", "mlp")):
        edited = run(name)
    torch.testing.assert_close(edited, run(name), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "granite", "bloom", "bert", "opt"])
def test_nested_contexts_compose_outer_first(name):
    order = []

    def outer(c):
        order.append("outer")
        return 0.5 * c.update

    def inner(c):
        order.append("inner")
        return c.update + 1.0

    model = tiny.build(name, seed=3)  # nothing proved yet: the identity is checked on the edited pass
    with (
        contributions(model, outer, parts="attn", layers=[0]),
        contributions(model, inner, parts="attn", layers=[0]),
    ):
        nested = run(name, model)
    assert order == ["outer", "inner"]
    with contributions(model, lambda c: 0.5 * c.update + 1.0, parts="attn", layers=[0]):
        once = run(name, model)
    torch.testing.assert_close(nested, once, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3_multimodal", "bert", "dinov2"])
def test_everything_is_restored_also_after_an_exception(name):
    model = tiny.tiny(name)
    before, plain = hooks(model), run(name)

    def fail(c):
        raise RuntimeError("inside the pass")

    with pytest.raises(RuntimeError, match="inside the pass"), contributions(model, fail):
        run(name)
    assert hooks(model) == before
    assert torch.equal(run(name), plain)


def _broken(name: str, **changes: object) -> tuple:
    """The known records with one of them made wrong."""
    own = family(tiny.tiny(name))
    records = tuple(dataclasses.replace(r, **changes) if r is own else r for r in known())
    return records


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gemma3", {"attn_update": "self_attn"}),  # before the post-norm
        ("olmo2", {"mlp_update": "mlp"}),
        ("granite", {"multiplier": ""}),
        ("bloom", {"attn_update": "self_attention"}),  # with the inner residual
        ("dinov2", {"attn_update": "attention"}),  # before the LayerScale
        ("bert", {"mlp_update": "intermediate.dense"}),
    ],
)
def test_a_wrong_adapter_is_caught_by_the_check(name, changes, monkeypatch):
    """The guard's twin: module outputs in place of contributions, on the families where they differ."""
    model = tiny.build(name)
    records = _broken(name, **changes)
    monkeypatch.setattr("perpend.models.layout.known", lambda: records)
    expected = RuntimeError if name == "bert" else PerpendError  # a wrong width cannot even be laid out
    with pytest.raises(expected), contributions(model, lambda c: None):
        run(name, model)
    if name != "bert":
        with contributions(model, lambda c: None, parts="block"):
            run(name, model)  # block updates need no adapter


def test_the_check_names_the_layer_and_training_mode():
    model = tiny.build("gpt2")
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.5
    with contributions(model, lambda c: None):
        run("gpt2", model.train())  # GPT-2's dropout is inside the parts: the identity holds
    bert = tiny.build("bert").train()
    with contributions(bert, lambda c: None):
        run("bert", bert)
    phi = tiny.build("phi")
    for block in phi.model.layers:
        block.resid_dropout.p = 0.5
    with (
        pytest.raises(PerpendError, match=r"model\.layers\.0.*call model\.eval\(\)"),
        contributions(phi, lambda c: None),
    ):
        run("phi", phi.train())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["llama", "granite", "bert", "cohere2"])
def test_the_identity_holds_in_other_dtypes(name, dtype):
    model = tiny.build(name).to(dtype)
    kinds = set()
    with contributions(model, lambda c: kinds.add((c.part, c.update.dtype))):
        run(name, model)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert kinds == {("attn", dtype), ("mlp", dtype), ("block", wide)}


def test_layers_and_parts_are_chosen_and_checked():
    model = tiny.tiny("llama")
    seen = []
    with contributions(model, lambda c: seen.append((c.layer, c.part)), parts=("mlp",), layers=[-1, 0]) as on:
        run("llama")
    assert seen == [(0, "mlp"), (2, "mlp")]
    assert [block.index for block in on] == [0, 2]
    with contributions(model, lambda c: seen.append(1), layers=[]) as none:
        run("llama")
    assert none == ()
    assert len(seen) == 2
    with (
        pytest.raises(InputError, match="layer 3 does not exist"),
        contributions(model, seen.append, layers=[3]),
    ):
        pass
    with (
        pytest.raises(InputError, match="did you mean 'attn'"),
        contributions(model, seen.append, parts=["atn"]),
    ):
        pass


class Handing(nn.Module):
    """A wrapper that hands on what it is asked, as those of checkpointing and sharding do."""

    def __init__(self, inner):
        super().__init__()
        self._inside = inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._modules["_inside"], name)

    def forward(self, *args, **kwargs):
        return self._inside(*args, **kwargs)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gpt_neox"])
def test_a_wrapped_block_has_its_parts(name):
    plain, model, tokens = tiny.tiny(name), tiny.build(name), tiny.tokens(2, 12)
    layers = stream.locate(model, family(model))[0].get_submodule(family(model).blocks.rpartition(".")[2])
    for i, layer in enumerate(layers):
        layers[i] = Handing(layer)
    assert blocks(model)[0].scale_groups == blocks(plain)[0].scale_groups
    seen = {}
    for each in (plain, model):
        with (
            torch.no_grad(),
            contributions(each, lambda c, to=each: seen.setdefault(to, []).append(c.update)),
        ):
            each(tokens)
    assert all(torch.equal(a, b) for a, b in zip(seen[plain], seen[model], strict=True))


def test_the_check_leaves_out_what_an_outer_context_made_of_the_block():
    model, tokens = tiny.build("llama"), tiny.tokens(2, 12)

    def run():
        with torch.no_grad(), contributions(model, half, ("block",)), contributions(model, half, ("attn",)):
            return model(tokens).logits

    half = lambda c: 0.5 * c.update  # noqa: E731
    fresh = run()
    with torch.no_grad(), contributions(model, half, ("attn",)):
        model(tokens)  # now every layer is proved
    assert torch.equal(fresh, run())


@pytest.mark.parametrize("parts", [(), []])
def test_no_part_is_refused(parts):
    with (
        pytest.raises(InputError, match="no part is chosen"),
        contributions(tiny.tiny("llama"), lambda c: None, parts),
    ):
        pass


def test_contributions_run_in_cached_decoding():
    model = tiny.tiny("llama")
    ids = tiny.tokens(1, 12)
    with torch.no_grad():
        whole = []
        with contributions(model, lambda c: whole.append(c.update), parts="attn", layers=[2]):
            cache = model(ids[:, :-1], use_cache=True).cache
            model(ids[:, -1:], cache=cache)
        once = []
        with contributions(model, lambda c: once.append(c.update), parts="attn", layers=[2]):
            model(ids)
    assert whole[1].shape == (1, 1, 32)
    torch.testing.assert_close(whole[1], once[0][:, -1:], rtol=1e-5, atol=1e-6)


def test_the_check_runs_once_a_layer(monkeypatch):
    model = tiny.build("llama", seed=5)
    calls = []
    own = stream.identity_error
    monkeypatch.setattr(stream, "identity_error", lambda *a: calls.append(1) or own(*a))
    with contributions(model, lambda c: None, layers=[0]):
        run("llama", model)
        run("llama", model)
    assert len(calls) == 1
    with contributions(model, lambda c: None):
        run("llama", model)
    assert len(calls) == 3


def test_the_check_runs_again_in_another_dtype_and_where_one_part_is_watched(monkeypatch):
    model = tiny.build("llama", seed=6)
    with contributions(model, lambda c: None, parts="attn"):
        run("llama", model)
    calls = []
    own = stream.identity_error
    monkeypatch.setattr(stream, "identity_error", lambda *a: calls.append(1) or own(*a))
    with contributions(model, lambda c: None, parts="attn"):
        run("llama", model)
        assert not calls
        run("llama", model.double())
        assert len(calls) == 3
    assert hooks(model) == hooks(tiny.build("llama"))
    with contributions(model, lambda c: c.update + 1.0, parts="mlp"):
        run("llama", model)  # an edit after the check was made: nothing to prove
    assert len(calls) == 3
