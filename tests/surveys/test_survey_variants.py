"""Windows, weighted rows, drop-both and single rows of one pass, against rows written out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from attention_oracle import gpt_neo, padded, record, weights
from perpend.errors import InputError
from perpend.geometry import entropy
from perpend.surveys.attention import survey_attention
from perpend.surveys.places import Reservoir, priorities
from perpend.surveys.probabilities import signatures_from_probabilities
from perpend.surveys.saved import survey_saved

W = 8


def closed(rows: torch.Tensor) -> torch.Tensor:
    return rows / rows.sum(-1, keepdim=True)


def calls_of(model, sequence):
    name = "pixel_values" if sequence.is_floating_point() else "input_ids"
    return record(model, **{name: sequence[None]}).calls


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss", "bloom", "mistral"])
def test_windows_and_the_mass_they_retain(name: str) -> None:
    """One pass gives each window what a survey of that window alone gives, and its share of whole rows."""
    model, tokens = tiny.tiny(name), tiny.tokens(4, 30)
    survey = survey_attention(model, tokens, window=W, windows=(4, 8, 12), batch=2, block=2)
    assert list(survey.windows) == [4, 8, 12]
    plain = survey_attention(model, tokens, window=W, batch=2, block=2)
    assert np.array_equal(survey.signatures, plain.signatures)
    for width, found in survey.windows.items():
        alone = survey_attention(model, tokens, window=width, batch=2, block=2)
        assert np.array_equal(found.signatures, alone.signatures, equal_nan=True)
        assert found.rows.tolist() == alone.rows.tolist()
        for layer in range(len(survey.sites)):
            mass = []
            for sequence in tokens:
                call = calls_of(model, sequence)[layer]
                part = weights(call)[0, :, width:, :width]
                mass.append(part[:, (part[0] > 0).all(-1)].sum(-1))
            np.testing.assert_allclose(
                found.statistics["retained"][layer], torch.cat(mass, 1).mean(1), atol=2e-5
            )


def test_windows_on_the_same_queries() -> None:
    survey = survey_attention(
        tiny.tiny("llama"), tiny.tokens(3, 30), queries=(12, 30), window=4, windows=(8, 12)
    )
    assert [w.rows.tolist() for w in survey.windows.values()] == [[54] * 3] * 2


@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "bert"])
@pytest.mark.parametrize("kind", ["value", "output"])
def test_rows_weighted_by_values(name: str, kind: str) -> None:
    """Eager rows times ‖v_j‖ (‖W_O^h v_j‖ with W_O applied for real), re-closed: means, mass and entropy."""
    model, tokens = tiny.tiny(name), tiny.tokens(4, 24)
    causal = name != "bert"
    survey = survey_attention(model, tokens, window=W, value_weights=(kind,), batch=2).weighted[kind]
    from perpend.models.stream import blocks

    projections = [block.out_proj for block in blocks(model)]
    for layer, projection in enumerate(projections):
        rows = []
        for sequence in tokens:
            call = calls_of(model, sequence)[layer]
            heads, groups = call.query.shape[1], call.groups
            value = call.value[0].double().repeat_interleave(groups, 0)
            if kind == "output":
                out = torch.zeros(heads, value.shape[1], heads, value.shape[2])
                for head in range(heads):
                    out[head, :, head] = value[head].float()
                with torch.no_grad():
                    bias = projection(torch.zeros(1, heads * value.shape[2]))
                    value = (projection(out.flatten(2)) - bias).double()
            size = value.norm(dim=-1)[:, None, :W]
            part = weights(call)[0, :, W if causal else 0 :, :W]
            rows.append(closed(part * size)[:, (part[0] > 0).all(-1)])
        p = torch.cat(rows, 1)
        signature = torch.log_softmax(p.log().mean(1), -1)
        np.testing.assert_allclose(survey.signatures[layer], signature, atol=2e-5)
        np.testing.assert_allclose(survey.arithmetic[layer], p.mean(1), atol=2e-5)
        np.testing.assert_allclose(survey.statistics["sink_mass"][layer], p[..., 0].mean(1), atol=2e-5)
        np.testing.assert_allclose(survey.statistics["total"][layer], entropy(p).mean(1), atol=2e-4)


def test_a_head_whose_value_is_zero_has_no_weighted_rows() -> None:
    model = tiny.build("gpt2")
    with torch.no_grad():
        attention = model.transformer.h[1].attn.c_attn
        width = attention.weight.shape[1] // 3
        first = slice(2 * width, 2 * width + width // model.config.n_head)
        attention.weight[:, first] = 0
        attention.bias[first] = 0
    survey = survey_attention(model, tiny.tokens(3, 24), window=W, value_weights=("value",))
    weighted = survey.weighted["value"]
    assert np.isnan(weighted.signatures[1, 0]).all()
    assert np.isfinite(np.delete(weighted.signatures.reshape(-1, W), survey.sites[0].heads, 0)).all()
    assert np.isfinite(survey.signatures).all()
    assert any("1 heads have a key whose value is zero" in note for note in weighted.notes)


def test_output_weights_need_a_projection_that_reads_the_aggregate() -> None:
    """A gate between the aggregate and W_O makes ‖W_O v‖ of a key undefined: refused by name."""
    model = tiny.build("llama")
    projection = model.model.layers[1].self_attn.o_proj
    handle = projection.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,))
    with pytest.raises(InputError, match=r"layers\.1\.self_attn: W_O does not read"):
        survey_attention(model, tiny.tokens(2, 24), window=W, value_weights=("output",))
    handle.remove()
    assert survey_attention(model, tiny.tokens(2, 24), window=W, value_weights=("output",)).weighted


@pytest.mark.parametrize("name", ["bert", "vit"])
def test_drop_both_leaves_the_sinks_own_rows_out(name: str) -> None:
    model = tiny.tiny(name)
    data = tiny.pixels(3) if name == "vit" else tiny.tokens(3, 20)
    survey = survey_attention(model, data, sink="cls", drop_both=True)
    alone = survey_attention(model, data, sink="cls", queries="no_sinks")
    both = survey.variants["drop-both"]
    assert np.array_equal(both.signatures, alone.signatures)
    assert (both.rows == survey.rows - 3).all()
    assert np.abs(both.signatures - survey.signatures).max() > 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_single_rows_are_the_models_own(name: str) -> None:
    model, tokens = tiny.tiny(name), tiny.tokens(5, 30)
    survey = survey_attention(model, tokens, window=W, row_sample=17, seed=3, batch=2, block=3)
    picked = survey.picked
    assert picked.logits.shape == (17, len(survey.sites), 4, W)
    every = [calls_of(model, sequence) for sequence in tokens]
    for i, (sequence, query) in enumerate(zip(picked.places.sequence, picked.places.query)):
        assert W <= query < 30
        for layer, call in enumerate(every[sequence]):
            part = weights(call)[0, :, query, :W]
            if (part == 0).any():
                assert np.isnan(picked.logits[i, layer]).all()
            else:
                np.testing.assert_allclose(picked.log_rows(i)[layer], closed(part).log(), atol=1e-4)


def test_the_sample_does_not_depend_on_batches_or_blocks() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(6, 30)
    one = survey_attention(model, tokens, window=W, row_sample=9, batch=6, block=6).picked
    other = survey_attention(model, tokens, window=W, row_sample=9, batch=1, block=2).picked
    assert one.places.sequence.tolist() == other.places.sequence.tolist()
    assert one.places.query.tolist() == other.places.query.tolist()
    np.testing.assert_allclose(one.logits, other.logits, atol=1e-4)
    again = survey_attention(model, tokens, window=W, row_sample=9, seed=1).picked
    assert again.places.query.tolist() != one.places.query.tolist()
    ids, mask, _ = padded(tokens, 12, "left")
    short = survey_attention(model, ids, window=W, attention_mask=mask, row_sample=500).picked
    assert len(short.places) == 5 * 22 + 10
    assert short.places.query[short.places.sequence == 0].max() == 17
    assert np.isfinite(short.logits).all()


def test_reservoirs_merge_exactly() -> None:
    whole, parts = Reservoir(40, 5), [Reservoir(40, 5) for _ in range(3)]
    for sequence in range(60):
        whole.offer(sequence, range(8, 30))
        parts[sequence % 3].offer(sequence, range(8, 30))
    for part in parts[1:]:
        parts[0].merge(part)
    assert parts[0].places.sequence.tolist() == whole.places.sequence.tolist()
    assert parts[0].places.query.tolist() == whole.places.query.tolist()
    with pytest.raises(ValueError, match="different seeds"):
        whole.merge(Reservoir(40, 6))


def test_priorities_are_uniform() -> None:
    """Every place is as likely as another: counts over seeds, within five standard deviations."""
    counts = np.zeros((10, 10))
    for seed in range(800):
        reservoir = Reservoir(10, seed)
        for sequence in range(10):
            reservoir.offer(sequence, range(10))
        places = reservoir.places
        assert len(set(zip(places.sequence.tolist(), places.query.tolist()))) == 10
        counts[places.sequence, places.query] += 1
    assert abs(counts - 80).max() < 5 * np.sqrt(80 * 0.9)
    many = np.arange(1000)
    assert len(np.unique(priorities(0, many, many[::-1]))) == 1000


def test_saved_probabilities_give_the_same_variants() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(4, 30)
    asked = dict(window=W, windows=(4, 12), row_sample=11, whole_rows="log")
    live = survey_attention(model, tokens, **asked)
    rows = torch.stack(
        [torch.stack([weights(call)[0] for call in calls_of(model, s)]) for s in tokens], dim=1
    )
    saved = survey_saved(rows, **asked)
    for width, found in saved.windows.items():
        np.testing.assert_allclose(found.signatures, live.windows[width].signatures, atol=2e-5)
        np.testing.assert_allclose(
            found.statistics["retained"], live.windows[width].statistics["retained"], atol=2e-5
        )
    assert saved.picked.places.query.tolist() == live.picked.places.query.tolist()
    np.testing.assert_allclose(saved.picked.logits, live.picked.logits, atol=2e-4)
    for name, value in live.whole.means().items():
        np.testing.assert_allclose(saved.whole.means()[name], value, atol=2e-5, err_msg=name)
    assert saved.whole.rows.tolist() == live.whole.rows.tolist()
    assert saved.whole.without_content.tolist() == live.whole.without_content.tolist()


def test_a_model_that_shows_probabilities_only() -> None:
    model, tokens = gpt_neo(), tiny.tokens(4, 30)
    survey = survey_attention(model, tokens, window=W, windows=(4,), whole_rows="log", row_sample=6, block=2)
    assert np.isfinite(survey.windows[4].statistics["retained"][0]).all()
    assert survey.whole.left_out.tolist() == [0, 4 * 14]
    with pytest.raises(InputError, match="no values"):
        survey_attention(model, tokens, window=W, value_weights=("value",))


def test_blocks_with_variants_resume_bit_for_bit() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(7, 30)
    asked = dict(window=W, windows=(4,), value_weights=("value",), whole_rows="log", row_sample=8, block=3)
    kept: dict[str, object] = {}

    def store(name, compute):
        if name not in kept:
            kept[name] = compute()
        return kept[name]

    first = survey_attention(model, tokens, **asked, store=store)
    del kept["attention-1"]
    again = survey_attention(model, tokens, **asked, store=store)
    assert np.array_equal(first.windows[4].signatures, again.windows[4].signatures)
    assert np.array_equal(first.whole.means()["total"], again.whole.means()["total"])
    assert np.array_equal(first.picked.logits, again.picked.logits)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama", {"windows": (29, 30)}, "too short"),
        ("llama", {"windows": (4, 4)}, "repeat"),
        ("llama", {"windows": (4,), "sink": [6]}, "outside the support"),
        ("llama", {"drop_both": True}, "same as dropping"),
        ("llama", {"value_weights": ("values",)}, "did you mean 'value'"),
        ("gpt_oss", {"value_weights": ("value",), "sink": "virtual"}, "no value"),
        ("llama", {"whole_rows": "logarithmic"}, "binning"),
        ("llama", {"whole_rows": (-1,)}, "from 0"),
        ("llama", {"windows": (4,), "rows": False}, "rows=True"),
    ],
)
def test_what_does_not_fit_is_told(name: str, changes: dict, words: str) -> None:
    with pytest.raises(InputError, match=words):
        survey_attention(tiny.tiny(name), tiny.tokens(3, 30), **{"window": W, **changes})


def test_saved_rows_keep_their_own_names() -> None:
    rows = torch.softmax(torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0)), -1)
    survey = signatures_from_probabilities(rows, window=6, drop_both=True, sink="cls")
    assert list(survey.variants) == ["drop-both"]
