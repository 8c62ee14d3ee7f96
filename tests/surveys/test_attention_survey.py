"""The attention survey against rows written out by hand: softmax in float64, one sequence at a time."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
import transformers

import tiny
from attention_oracle import falcon, gpt_neo, padded, plain_gpt, record, t5, weights
from perpend.errors import InputError
from perpend.geometry import content_dispersion, entropy, sink_balance, split_entropy
from perpend.surveys import capture
from perpend.surveys.attention import survey_attention

W = 8


def rows_by_hand(model, sequences, keys, first, last=None, virtual=False) -> list[torch.Tensor]:
    """Per layer the re-closed rows [H, rows, D] in float64 of unpadded sequences that see all keys."""
    layers: dict[int, list[torch.Tensor]] = {}
    for sequence in sequences:
        name = "pixel_values" if sequence.is_floating_point() else "input_ids"
        given = {name if hasattr(model, "config") else "tokens": sequence[None]}
        for call in record(model, **given).calls:
            whole = weights(call)[0]
            parts = whole[:, first:last, :keys]
            if virtual:
                lost = 1 - whole[:, first:last].sum(-1, keepdim=True)
                parts = torch.cat([lost, parts], -1)
            sees = (whole[0, first:last, :keys] > 0).all(-1)
            parts = parts[:, sees]
            layers.setdefault(call.layer, []).append(parts / parts.sum(-1, keepdim=True))
    return [torch.cat(layers[layer], 1) for layer in sorted(layers)]


def agree(survey, rows: list[torch.Tensor], sink=(0,), tolerance: float = 2e-5) -> None:
    """Signatures, arithmetic means and every statistic of a survey, against rows [H, n, D] a layer."""
    content = [i for i in range(rows[0].shape[-1]) if i not in sink]
    for i, p in enumerate(rows):
        assert survey.rows[i] == p.shape[1]
        heads = p.shape[0]
        signature = torch.log_softmax(p.log().mean(1), -1).numpy()
        np.testing.assert_allclose(survey.signatures[i, :heads], signature, atol=tolerance, rtol=1e-6)
        np.testing.assert_allclose(survey.arithmetic[i, :heads], p.mean(1).numpy(), atol=tolerance)
        split = split_entropy(p, sink=list(sink))
        s = p[..., list(sink)].sum(-1)
        pure = p[..., list(sink)] / s[..., None]
        expected = {
            "sink_mass": s,
            "binary": split.binary,
            "content": split.content,
            "weighted_content": (1 - s) * split.content,
            "within_sink": -s * (pure * pure.log()).sum(-1),
            "dispersion": content_dispersion(p, sink=list(sink)),
            "balance": sink_balance(p, sink=list(sink)),
            "total": entropy(p),
            "sink_mass_square": s**2,
        }
        for name, value in expected.items():
            found = survey.statistics[name][i, :heads]
            np.testing.assert_allclose(found, value.mean(-1).numpy(), atol=20 * tolerance, err_msg=name)
    assert len(content) == rows[0].shape[-1] - len(sink)


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_causal_families(name: str) -> None:
    """Grouped queries, soft-caps, learned sinks, ALiBi, latent attention, sliding windows: rows by hand."""
    model, tokens = tiny.tiny(name), tiny.tokens(5, 30)
    survey = survey_attention(model, tokens, window=W, batch=2, block=3)
    agree(survey, rows_by_hand(model, tokens, W, W))
    assert not survey.undefined
    windowed = [site.window is not None for site in survey.sites]
    assert [bool(n) for n in survey.left_out] == windowed  # the window is 16: later queries miss key 0


@pytest.mark.parametrize("name", ["bert", *tiny.VISION])
def test_encoders_keep_all_keys_and_queries(name: str) -> None:
    model = tiny.tiny(name)
    data = tiny.pixels(3) if name in tiny.VISION else tiny.tokens(3, 20)
    keys = record(model, **tiny.inputs(name, 1, 20)).calls[0].key.shape[2]
    agree(survey_attention(model, data, sink="cls", batch=2), rows_by_hand(model, data, keys, 0))
    small = survey_attention(model, data, window=9, sink=[0, 8], queries="no_sinks")
    rows = rows_by_hand(model, data, 9, 0)
    inner = [t for t in range(rows[0].shape[1]) if t % keys not in (0, 8)]
    agree(small, [p[:, inner] for p in rows], sink=(0, 8))


@pytest.mark.parametrize(
    "build", [falcon, lambda: falcon(alibi=True), plain_gpt], ids=["falcon", "alibi", "plain"]
)
def test_models_outside_the_registry(build) -> None:
    model, tokens = build(), tiny.tokens(4, 30)
    agree(survey_attention(model, tokens, window=W, batch=3), rows_by_hand(model, tokens, W, W))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss", "bloom", "deepseek_v3"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name: str, side: str) -> None:
    model, tokens = tiny.tiny(name), tiny.tokens(3, 30)
    ids, mask, _ = padded(tokens, 6, side)
    alone = [tokens[0, :24], tokens[1], tokens[2]]
    survey = survey_attention(model, ids, window=W, attention_mask=mask, batch=3)
    agree(survey, rows_by_hand(model, alone, W, W))


def test_layers_of_different_masks_keep_their_own_rows_under_flex_attention() -> None:
    """Its masks are index functions: a sliding and a full layer differ in nothing else."""
    model, tokens = tiny.build("gemma3"), tiny.tokens(3, 40)
    expected = survey_attention(model, tokens, window=W, batch=2)
    model.set_attn_implementation("flex_attention")
    with torch.compiler.set_stance("force_eager"):
        found = survey_attention(model, tokens, window=W, batch=2)
    assert found.rows.tolist() == expected.rows.tolist() == [24, 96, 24, 96]
    assert found.left_out.tolist() == expected.left_out.tolist()
    np.testing.assert_allclose(found.signatures, expected.signatures, atol=1e-4)


def test_sequences_shorter_than_the_support_are_left_out() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(3, 30)
    ids, mask, _ = padded(tokens, 24, "left")
    agree(survey_attention(model, ids, window=W, attention_mask=mask), rows_by_hand(model, tokens[1:], W, W))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_scores_are_formed_in_fp32(dtype: torch.dtype) -> None:
    model, tokens = tiny.build("llama").to(dtype), tiny.tokens(3, 30)
    agree(survey_attention(model, tokens, window=W), rows_by_hand(model, tokens, W, W))


def test_devices_without_double_precision_add_up_on_the_cpu(monkeypatch) -> None:
    model, tokens = tiny.tiny("mistral"), tiny.tokens(3, 30)
    here = survey_attention(model, tokens, window=W, retained=True)
    monkeypatch.setattr(capture, "NO_DOUBLE", {"cpu"})
    moved = survey_attention(model, tokens, window=W, retained=True)
    assert np.array_equal(here.signatures, moved.signatures)
    assert np.array_equal(here.statistics["retained"], moved.statistics["retained"])


def test_double_precision_is_kept() -> None:
    model, tokens = tiny.build("llama").double(), tiny.tokens(3, 30)
    agree(survey_attention(model, tokens, window=W), rows_by_hand(model, tokens, W, W), tolerance=1e-13)


def sharpened(name: str, factor: float):
    """A model with logits so large that fp32 probabilities underflow."""
    model = tiny.build(name)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= factor
    return model.double().float()


@pytest.mark.parametrize("factor", [30.0, 400.0])
def test_large_logits_neither_underflow_nor_overflow(factor: float) -> None:
    model, tokens = sharpened("llama", factor), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W)
    calls = [record(model, input_ids=sequence[None]).calls for sequence in tokens]
    for i in range(3):
        logits = []
        for of_sequence in calls:
            call = of_sequence[i]
            key = call.key.double().repeat_interleave(2, 1)[0, :, :W]
            logits.append(call.query.double()[0, :, W:] @ key.mT * call.scale)
        p = torch.cat(logits, 1)
        assert (torch.softmax(p.float(), -1) == 0).any() or factor < 100
        content = p[..., 1:]
        odds = p[..., 0] - content.logsumexp(-1)
        expected = torch.log_softmax(p.mean(1), -1)
        np.testing.assert_allclose(survey.signatures[i], expected.numpy(), rtol=1e-5, atol=1e-4)
        np.testing.assert_allclose(survey.statistics["sink_mass"][i], odds.sigmoid().mean(-1), atol=1e-4)
        pi = torch.softmax(content, -1)
        h = -(pi * torch.log_softmax(content, -1)).nan_to_num().sum(-1)
        np.testing.assert_allclose(survey.statistics["content"][i], h.mean(-1), atol=1e-3)


@pytest.mark.parametrize("sink", ["first:4", [2, 5], "3", 1])
def test_sink_rules_of_positions(sink) -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(3, 30)
    columns = {"first:4": (0, 1, 2, 3), "3": (3,), 1: (1,)}.get(
        sink if not isinstance(sink, list) else None, (2, 5)
    )
    agree(
        survey_attention(model, tokens, window=W, sink=sink), rows_by_hand(model, tokens, W, W), sink=columns
    )


def test_virtual_sink_is_the_mass_that_the_row_lacks() -> None:
    model, tokens = tiny.tiny("gpt_oss"), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W, sink="virtual", retained=True)
    rows = rows_by_hand(model, tokens, W, W, virtual=True)
    agree(survey, rows)
    assert survey.signatures.shape[-1] == W + 1


def test_auto_takes_the_largest_mass_and_says_which() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(4, 30)
    survey = survey_attention(model, tokens, window=W, sink="auto")
    masses = torch.cat([p.mean(1) for p in rows_by_hand(model, tokens, W, W)]).mean(0)
    assert survey.support.sink == (int(masses.argmax()),)
    assert survey.chosen_sink == str(int(masses.argmax()))
    assert any("auto chose" in note for note in survey.notes)
    model = tiny.build("gpt_oss")
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.sinks += 5.0
    learned = survey_attention(model, tokens, window=W, sink="auto")
    assert learned.support.virtual
    assert learned.chosen_sink == "virtual"


def test_sep_in_ragged_batches_has_rows_and_no_signatures() -> None:
    model, tokens = tiny.tiny("bert"), tiny.tokens(3, 20)
    ids, mask, _ = padded(tokens, 5, "right")
    survey = survey_attention(model, ids, attention_mask=mask, sink="sep")
    assert np.isnan(survey.signatures).all()
    assert any("no signatures" in note for note in survey.notes)
    short = rows_by_hand(model, [tokens[0, :15]], 15, 0)
    long = rows_by_hand(model, tokens[1:], 20, 0)
    for i in range(3):
        mass = torch.cat([short[i][..., -1], long[i][..., -1]], 1)
        spread = torch.cat([content_dispersion(short[i], sink=14), content_dispersion(long[i], sink=19)], 1)
        np.testing.assert_allclose(survey.statistics["sink_mass"][i], mass.mean(1), atol=1e-5)
        np.testing.assert_allclose(survey.statistics["dispersion"][i], spread.mean(1), atol=1e-4)
    whole = survey_attention(model, tokens, sink="sep")
    assert whole.support.sink == (19,)
    agree(whole, rows_by_hand(model, tokens, 20, 0), sink=(19,))


def test_retained_mass_is_the_part_of_the_whole_row() -> None:
    for name in ("llama", "gemma2", "gpt_oss", "bloom", "deepseek_v3"):
        model, tokens = tiny.tiny(name), tiny.tokens(3, 30)
        survey = survey_attention(model, tokens, window=W, retained=True)
        held: dict[int, list[torch.Tensor]] = {}
        for sequence in tokens:
            for call in record(model, input_ids=sequence[None]).calls:
                whole = weights(call)[0][:, W:]
                sees = (whole[0, :, :W] > 0).all(-1)
                held.setdefault(call.layer, []).append(whole[:, sees, :W].sum(-1))
        for layer, parts in held.items():
            mass = torch.cat(parts, 1).mean(1)
            np.testing.assert_allclose(survey.statistics["retained"][layer], mass, atol=2e-5)
    assert np.isnan(survey_attention(model, tokens, window=W).statistics["retained"]).all()


def test_chosen_queries_and_layers() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W, queries=(12, 20), layers=[2, 0])
    rows = rows_by_hand(model, tokens, W, 12, 20)
    agree(survey, [rows[0], rows[2]])
    assert [site.index for site in survey.sites] == [0, 2]


def test_signatures_alone_are_the_same_and_keep_nothing_else() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(5, 30)
    full = survey_attention(model, tokens, window=W)
    lean = survey_attention(model, tokens, window=W, rows=False)
    assert np.array_equal(full.signatures, lean.signatures)
    with pytest.raises(InputError, match="rows=True"):
        _ = lean.arithmetic
    assert "row_mass" not in lean.per_layer()
    soft = survey_attention(tiny.tiny("gemma2"), tokens, window=W, rows=False)
    whole = survey_attention(tiny.tiny("gemma2"), tokens, window=W)
    np.testing.assert_allclose(soft.signatures, whole.signatures, atol=1e-12)


def test_a_window_that_never_sees_the_sink_leaves_the_layer_undefined_in_words() -> None:
    survey = survey_attention(tiny.tiny("gemma3"), tiny.tokens(3, 40), window=20)
    assert set(survey.undefined) == {0, 2}
    assert "sliding window of 16 keys" in survey.undefined[0]
    assert survey.results["per_layer"][0]["row_mass"] is None
    assert survey.results["undefined"]["0"] == survey.undefined[0]
    table = survey.per_layer()
    assert table["row_mass"].isna().tolist() == [True, False, True, False]
    assert np.isnan(survey.signatures[0]).all()
    partly = survey_attention(tiny.tiny("gemma3"), tiny.tokens(3, 40), window=W)
    assert any("layers 0, 2 do not see the support" in note for note in partly.notes)


def test_encoder_decoders_run_their_encoder_and_name_the_layers_that_do_not_run() -> None:
    model, tokens = t5(), tiny.tokens(3, 20)
    survey = survey_attention(model, tokens)
    assert set(survey.undefined) == {2, 3}
    agree_layers = rows_by_hand(model.get_encoder(), tokens, 20, 0)
    for i in range(2):
        expected = torch.log_softmax(agree_layers[i].log().mean(1), -1)
        np.testing.assert_allclose(survey.signatures[i], expected, atol=1e-4)
    both = survey_attention(model, {"input_ids": tokens, "decoder_input_ids": tokens[:, :20]}, window=W)
    assert not both.undefined


def test_layers_that_share_their_weights_are_pooled_and_named() -> None:
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=97,
        embedding_size=16,
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
    )
    survey = survey_attention(transformers.AlbertModel(config).eval(), tiny.tokens(2, 20))
    assert survey.rows.tolist() == [3 * 2 * 20]
    assert any("runs 3 times a pass" in note for note in survey.notes)


def test_multimodal_models_survey_their_text_decoder() -> None:
    model, tokens = tiny.tiny("gemma3_multimodal"), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W)
    assert all("language_model" in site.name for site in survey.sites)


def test_importance_of_the_first_tokens() -> None:
    model, tokens = tiny.tiny("gpt_oss"), tiny.tokens(3, 70)
    survey = survey_attention(model, tokens, window=W)
    whole = [
        [weights(call)[0, :, :64, :64] for call in record(model, input_ids=s[None]).calls] for s in tokens
    ]
    for layer in range(4):
        parts = torch.stack([of_sequence[layer].sum(1) / torch.arange(64, 0, -1) for of_sequence in whole])
        np.testing.assert_allclose(survey.importance[layer], parts.mean(0), atol=1e-5)
    rate = np.mean(
        [
            (of[layer].sum(1) / torch.arange(64, 0, -1))[:, 0].numpy() > 0.3
            for of in whole
            for layer in range(4)
        ]
    )
    assert survey.sink_rate() == pytest.approx(rate)
    assert 0 <= survey.sink_rate(0.05) <= 1


def test_replicates_and_halves_are_weighted_blocks() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(8, 30)
    survey = survey_attention(model, tokens, window=W, block=2)
    one = next(survey.replicates(1, seed=3))
    weight = next(survey.resampled(1, seed=3))
    picked = [tokens[2 * b : 2 * b + 2] for b in range(4) for _ in range(int(weight[b]))]
    by_hand = survey_attention(model, torch.cat(picked), window=W)
    np.testing.assert_allclose(one, by_hand.signatures, atol=1e-6)
    statistics = next(survey.statistic_replicates(1, seed=3))
    np.testing.assert_allclose(statistics["total"], by_hand.statistics["total"], atol=1e-6)
    first, second = next(survey.halves(1, seed=0))
    assert not np.allclose(first, second)
    assert len(list(survey.replicates(5))) == 5
    with pytest.raises(InputError, match="two blocks"):
        next(survey_attention(model, tokens, window=W).halves())


def test_total_variance_is_the_mean_squared_distance_to_the_mean() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W)
    for i, p in enumerate(rows_by_hand(model, tokens, W, W)):
        clr = p.log() - p.log().mean(-1, keepdim=True)
        variance = (clr - clr.mean(1, keepdim=True)).square().sum(-1).mean(1)
        np.testing.assert_allclose(survey.variance[i], variance, atol=1e-4)


def test_tables_add_up() -> None:
    survey = survey_attention(tiny.tiny("gemma3"), tiny.tokens(3, 30), window=W)
    layers, heads = survey.per_layer(), survey.per_head()
    assert len(layers) == 4
    assert len(heads) == 16
    np.testing.assert_allclose(layers["total"], layers["binary"] + layers["weighted_content"], atol=1e-12)
    np.testing.assert_allclose(layers["row_mass"], heads.groupby("layer")["sink_mass"].mean(), atol=1e-12)
    np.testing.assert_allclose(layers["uniform_mass"], 1 / W)
    assert survey.results["per_layer"][1]["row_mass"] == layers["row_mass"][1]
    json.dumps(survey.results, allow_nan=False)
    assert set(survey.tables) == {"layers", "heads"}
    assert survey.arrays["signatures"].dtype == np.float64
    assert "<table" in survey._repr_html_()
    sample = survey.sample
    assert sample.shape == (3, 4, 4, 4, 5)
    assert np.isfinite(sample[:, 1]).all()


def test_padding_at_both_ends_is_padding() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, :3] = mask[1, 26:] = 0
    survey = survey_attention(model, tokens, attention_mask=mask, window=W)
    rows = rows_by_hand(model, [tokens[0], tokens[1, 3:26]], W, W)
    agree(survey, rows)


def test_a_model_that_pads_its_sequences_has_rows_as_it_pads() -> None:
    inner, tokens = plain_gpt(), tiny.tokens(2, 30)

    class Padding(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.inner(torch.nn.functional.pad(tokens, (0, -tokens.shape[1] % 8)))

    padded_by_hand = torch.nn.functional.pad(tokens, (0, 2))
    survey = survey_attention(Padding(), tokens, window=W)
    assert survey.rows.tolist() == [2 * (32 - W)] * len(survey.sites)
    np.testing.assert_array_equal(
        survey.signatures, survey_attention(inner, padded_by_hand, window=W).signatures
    )


def test_probability_only_models_take_the_zero_policy() -> None:
    model, tokens = gpt_neo(), tiny.tokens(4, 30)
    survey = survey_attention(model, tokens, window=W, batch=2)
    assert {site.path for site in survey.sites} == {"probabilities"}
    assert survey.left_out.tolist() == [0, 4 * 14]  # the second layer is local: 16 keys
    model.set_attn_implementation("eager")
    with torch.no_grad():
        layers = [model(sequence[None], output_attentions=True).attentions for sequence in tokens]
    whole = torch.cat([of_sequence[0][0, :, W:, :W].double() for of_sequence in layers], 1)
    p = whole / whole.sum(-1, keepdim=True)
    np.testing.assert_allclose(survey.signatures[0], torch.log_softmax(p.log().mean(1), -1), atol=1e-6)
    assert any("probabilities" in note for note in survey.notes)


def test_probability_only_models_keep_as_many_single_rows_as_asked() -> None:
    model, tokens = gpt_neo(), tiny.tokens(2, 30)
    assert survey_attention(model, tokens, window=W, sample=2).sample.shape[3] == 2
    with pytest.raises(InputError, match="sample > 0"):
        _ = survey_attention(model, tokens, window=W, sample=0).sample


def test_queries_beyond_the_sequences_and_negative_samples_are_refused() -> None:
    model, ids = tiny.tiny("llama"), tiny.tokens(2, 24)
    with pytest.raises(InputError, match="queries end at 999, and the sequences have 24 tokens"):
        survey_attention(model, ids, window=8, queries=(9, 999))
    survey_attention(model, ids, window=8, queries=(9, 24))
    with pytest.raises(InputError, match="at least 0"):
        survey_attention(model, ids, window=8, row_sample=-1)
