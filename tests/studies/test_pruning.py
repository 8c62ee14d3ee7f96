"""Prune sets by hand, and evaluation of many sets against ablating each by itself."""

from __future__ import annotations

import numpy as np
import pytest

import perpend
import tiny
from perpend.errors import InputError
from perpend.evaluation.losses import token_nll
from perpend.models.attention import attention_sites
from perpend.studies import prune_sets as sets
from perpend.studies.criteria import LAYERWISE
from perpend.studies.pruning import evaluate_sets, paired_change


def test_the_nearest_heads_are_the_most_redundant() -> None:
    points = np.array([0.0, 10.0, 10.5, 30.0, 31.0])
    distances = np.abs(points[:, None] - points)
    assert sets.most_redundant(distances, 2) == [1, 2]
    assert sets.most_redundant(distances, 3) == [1, 2, 3]


def test_keep_one_keeps_a_representative_of_every_redundant_pair() -> None:
    points = np.array([0.0, 0.1, 0.25, 5.0, 5.05])
    distances = np.abs(points[:, None] - points)
    # Pairs in order: (3, 4), (0, 1), (1, 2) skipped: 1 is gone, (0, 2).
    assert sets.keep_one(distances, [0] * 5, 5) == [4, 1, 2]
    # In layers of their own 0-1 and 3-4 are pairs; 2 has no neighbour.
    assert sets.keep_one(distances, [0, 0, 1, 2, 2], 5) == [4, 1]


def test_a_kept_head_is_never_pruned() -> None:
    distances = np.array([[0, 1, 9, 9], [1, 0, 2, 9], [9, 2, 0, 3], [9, 9, 3, 0]], float)
    # (0, 1): 1 goes, 0 stays; (1, 2): 1 is gone; (2, 3): 3 goes.
    assert sets.keep_one(distances, [0] * 4, 4) == [1, 3]


def signatures(layers: int = 3, heads: int = 4, keys: int = 8) -> np.ndarray:
    logits = np.random.default_rng(0).normal(0, 1.5, (layers, heads, keys))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def test_sets_have_the_asked_size_and_say_what_they_lack() -> None:
    found = sets.prune_sets(signatures(), [0], [0.1, 0.25, 0.75])
    assert [s.criterion for s in found[::3]] == list(sets.CRITERIA)
    for chosen in found:
        assert len(chosen.heads) + chosen.shortfall == round(12 * chosen.sparsity)
        if chosen.criterion in LAYERWISE:
            for layer in range(3):  # somebody stays in every layer
                assert sum(at == layer for at, _ in chosen.heads) < 4
        else:
            assert chosen.shortfall == 0
    assert found == sets.prune_sets(signatures(), [0], [0.1, 0.25, 0.75])
    assert found[-1].heads != found[-4].heads  # two draws


def test_content_sets_ignore_the_sink_and_a_temperature() -> None:
    rows = signatures()
    shifted = rows.copy()
    shifted[..., 0] += np.random.default_rng(1).normal(0, 2, rows.shape[:2])
    for criterion in ("content", "content_l1", "js_drop"):
        before = sets.prune_sets(rows, [0], [0.25], [criterion])
        shifted_rows = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        assert sets.prune_sets(shifted_rows, [0], [0.25], [criterion]) == before
    hot = 2.0 * rows - np.log(np.exp(2.0 * rows).sum(-1, keepdims=True))
    assert sets.prune_sets(hot, [0], [0.25], ["content"]) == sets.prune_sets(rows, [0], [0.25], ["content"])


def test_heads_without_a_signature_are_left_alone() -> None:
    rows = signatures()
    rows[1] = np.nan
    for chosen in sets.prune_sets(rows, [0], [0.5]):
        assert all(layer != 1 for layer, _ in chosen.heads)


def test_jaccard_and_stability() -> None:
    assert sets.jaccard([(0, 1), (0, 2)], [(0, 2), (0, 3)]) == pytest.approx(1 / 3)
    assert sets.jaccard([], []) == 1
    one = sets.prune_sets(signatures(), [0], [0.25])
    same = sets.stability({0: one, 1: one})
    assert set(same.values()) == {1.0}
    assert not any(criterion in sets.RANDOM for criterion, _ in same)


def test_bad_requests_name_what_there_is() -> None:
    with pytest.raises(InputError, match="content_l1"):
        sets.prune_sets(signatures(), [0], [0.1], ["content_l2"])
    with pytest.raises(InputError, match="fraction"):
        sets.prune_sets(signatures(), [0], [10])


SETS = [[(0, 1)], [(0, 1), (2, 3)], [(1, 0), (2, 0)], [(0, 1), (2, 3)], []]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_neox", "gemma3", "bloom", "qwen3_next"])
def test_shared_prefixes_give_what_each_set_gives_alone(name: str) -> None:
    model, tokens = tiny.build(name), tiny.tokens(3, 18)
    last = len(attention_sites(model)) - 1
    wanted = [[(min(layer, last), head) for layer, head in heads] for heads in SETS]
    losses = evaluate_sets(model, tokens, wanted, batch=2)
    np.testing.assert_allclose(losses.base, token_nll(model, tokens).values.double().mean(1), atol=1e-5)
    for heads in wanted[:-1]:
        with perpend.ablate(model, heads):
            alone = token_nll(model, tokens).values.double().mean(1)
        np.testing.assert_allclose(losses.loss[losses.index(heads)], alone, atol=1e-5)
    assert len(losses.sets) == len({tuple(sorted(h)) for h in wanted[:-1]})
    assert (losses.kl > 0).all()
    assert losses.zero_anyway == ()
    np.testing.assert_array_equal(losses.of((), "loss"), losses.base)
    assert ((losses.agreement >= 0) & (losses.agreement <= 1)).all()


def test_layers_run_are_those_of_the_tree() -> None:
    # base and three sets over three layers: layer 0 has masks {} and {1}; layer 1 {} twice and {0}; layer 2 …
    losses = evaluate_sets(tiny.tiny("llama"), tiny.tokens(1, 12), SETS)
    tree = 2 + 3 + 4
    assert losses.cost == pytest.approx(tree / (4 * 3))


def test_resuming_uses_what_is_stored() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(4, 12)
    kept: dict = {}

    def store(name, compute):
        if name not in kept:
            kept[name] = compute()
        return kept[name]

    first = evaluate_sets(model, tokens, SETS, batch=2, store=store)
    names = list(kept)
    kept.pop(names[1])
    again = evaluate_sets(model, tokens, SETS, batch=2, store=store)
    np.testing.assert_array_equal(first.loss, again.loss)
    change, low, high = paired_change(first, SETS[0])
    assert low <= change <= high
    assert change == pytest.approx(float((first.loss[first.index(SETS[0])] - first.base).mean()))


def test_log_probabilities_that_do_not_fit_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from perpend.studies import pruning

    model, tokens = tiny.tiny("llama"), tiny.tokens(2, 12)
    kept = evaluate_sets(model, tokens, SETS)
    monkeypatch.setattr(pruning, "KEPT", 0)
    again = evaluate_sets(model, tokens, SETS)
    np.testing.assert_allclose(kept.kl, again.kl, atol=1e-12)
    np.testing.assert_array_equal(kept.agreement, again.agreement)


def test_a_zero_that_does_not_arrive_is_an_error() -> None:
    from perpend.errors import PerpendError

    model = tiny.build("llama")
    leak = model.model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda m, a: (a[0] + 1,))
    try:
        with pytest.raises(PerpendError, match="still reaches"):
            evaluate_sets(model, tiny.tokens(1, 12), SETS)
    finally:
        leak.remove()


def test_heads_that_added_nothing_are_named() -> None:
    import torch

    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].self_attn.v_proj.weight[:8] = 0  # KV head 0: query heads 0 and 1
    assert evaluate_sets(model, tiny.tokens(1, 12), SETS).zero_anyway == ((1, 0),)


@pytest.mark.parametrize("head", [(0, -1), (-1, 0), (0, 99), (99, 0), (0.5, 0), "01"])
def test_heads_that_are_not_there_are_refused(head) -> None:
    with pytest.raises(InputError, match=r"out of range|whole numbers"):
        evaluate_sets(tiny.tiny("llama"), tiny.tokens(2, 24), [[head]])
