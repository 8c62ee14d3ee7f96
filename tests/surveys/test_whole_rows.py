"""Whole rows of every length against an eager softmax in float64, row by row."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from attention_oracle import falcon, padded, plain_gpt, record, weights
from perpend.errors import InputError, PerpendError
from perpend.geometry import split_entropy
from perpend.surveys import whole_rows
from perpend.surveys.attention import survey_attention

W = 8


def by_hand(model, sequences, edges, sink=(0,), virtual=False) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Means [layers, heads, bins] and rows [layers, bins] from eager weights of unpadded sequences."""
    found: dict[int, dict[int, list[torch.Tensor]]] = {}
    heads = 0
    for sequence in sequences:
        name = "input_ids" if hasattr(model, "config") else "tokens"
        for call in record(model, **{name: sequence[None]}).calls:
            whole = weights(call)[0]
            heads = len(whole)
            lost = (1 - whole.sum(-1, keepdim=True)).clamp(min=0)
            for t in range(whole.shape[1]):
                keys = [k for k in range(whole.shape[2]) if (whole[:, t, k] > 0).all()]
                if (not set(sink) <= set(keys) and not virtual) or not set(keys) - (
                    set() if virtual else set(sink)
                ):
                    continue
                parts, sinks = whole[:, t, keys], [] if virtual else [keys.index(k) for k in sink]
                if call.sinks is not None:
                    parts, sinks = torch.cat([parts, lost[:, t]], -1), [*sinks, len(keys)]
                split = split_entropy(parts, sink=sinks)
                s = parts[:, sinks].sum(-1)
                pure = parts[:, sinks] / s[:, None]
                within = -s * torch.special.xlogy(pure, pure).sum(-1)
                uniform = torch.full_like(s, np.log(parts.shape[-1]))
                values = [s, split.binary, split.content, (1 - s) * split.content, within, uniform]
                bin_of = max(b for b, edge in enumerate(edges) if edge <= t)
                found.setdefault(call.layer, {}).setdefault(bin_of, []).append(torch.stack(values, -1))
    layers = sorted(found)
    means = np.full((len(layers), heads, len(edges), 6), np.nan)
    rows = np.zeros((len(layers), len(edges)), int)
    for i, layer in enumerate(layers):
        for b, values in found[layer].items():
            means[i, :, b] = torch.stack(values).mean(0)
            rows[i, b] = len(values)
    return {name: means[..., i] for i, name in enumerate(whole_rows.STATISTICS)}, rows


def agree(survey, expected, rows, tolerance: float = 3e-5) -> None:
    assert survey.whole.rows.tolist() == rows.tolist()
    found = survey.whole.by_bin()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=tolerance, err_msg=name)
    total = expected["binary"] + expected["weighted_content"] + expected["within_sink"]
    np.testing.assert_allclose(found["total"], total, atol=tolerance)


@pytest.mark.parametrize("name", tiny.CAUSAL)
def test_causal_families(name: str) -> None:
    """Grouped queries, soft-caps, learned sinks, ALiBi, latent attention, sliding windows (structural)."""
    model, tokens = tiny.tiny(name), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W, whole_rows="log", batch=2, block=2)
    assert survey.whole.edges == (0, 1, 2, 4, 8, 16)
    agree(survey, *by_hand(model, tokens, survey.whole.edges))
    for i, site in enumerate(survey.sites):
        narrow = site.window is not None
        assert bool(survey.whole.left_out[i]) == narrow  # queries that the window hides key 0 from
        assert survey.whole.without_content[i] in (0, 3)


@pytest.mark.parametrize(
    "build", [falcon, lambda: falcon(alibi=True), plain_gpt], ids=["falcon", "alibi", "plain"]
)
def test_models_outside_the_registry(build) -> None:
    model, tokens = build(), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W, whole_rows="linear")
    agree(survey, *by_hand(model, tokens, survey.whole.edges))


@pytest.mark.parametrize("name", ["gpt2", "llama", "mistral", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name: str, side: str) -> None:
    model, tokens = tiny.tiny(name), tiny.tokens(3, 30)
    ids, mask, _ = padded(tokens, 6, side)
    alone = [tokens[0, :24], tokens[1], tokens[2]]
    survey = survey_attention(model, ids, window=W, attention_mask=mask, whole_rows="log", batch=3)
    agree(survey, *by_hand(model, alone, survey.whole.edges))


@pytest.mark.parametrize("rooms", [(1, 1), (7, 300), (5, 64), (30, 1 << 20)])
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss", "bert"])
def test_blocks_of_queries_and_keys_change_nothing(monkeypatch, name: str, rooms: tuple[int, int]) -> None:
    """The online softmax over blocks of any size, down to a single key and a single query."""
    model, tokens = tiny.tiny(name), tiny.tokens(2, 30)
    monkeypatch.setattr(whole_rows, "KEYS", rooms[0])
    monkeypatch.setattr(whole_rows, "CPU_ROOM", rooms[1])
    survey = survey_attention(model, tokens, window=W, sink=[0, 3], whole_rows=(5, 20))
    edges = (0, 5, 8, 20) if name != "bert" else (0, 5, 20)
    assert survey.whole.edges == edges
    agree(survey, *by_hand(model, tokens, edges, sink=(0, 3)))


def test_a_learned_sink_is_the_sink_of_whole_rows() -> None:
    model, tokens = tiny.tiny("gpt_oss"), tiny.tokens(3, 30)
    survey = survey_attention(model, tokens, window=W, sink="virtual", whole_rows="log")
    agree(survey, *by_hand(model, tokens, survey.whole.edges, sink=(), virtual=True))
    assert survey.whole.left_out.tolist() == [0] * 4  # a learned sink is seen from everywhere


def test_large_logits_neither_underflow_nor_overflow() -> None:
    model, tokens = tiny.build("llama"), tiny.tokens(2, 30)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 60
    model = model.double()
    survey = survey_attention(model, tokens, window=W, whole_rows="log")
    agree(survey, *by_hand(model, tokens, survey.whole.edges), tolerance=1e-9)


def test_not_finite_logits_outside_the_support_are_told(monkeypatch) -> None:
    """Inf in a key after the support: the fixed rows do not see it, whole rows do."""
    model, tokens = tiny.tiny("llama"), tiny.tokens(2, 30)
    original = whole_rows.row_logits

    def broken(call, rows=slice(None), keys=slice(None), **more):
        logits = original(call, rows, keys, **more)
        if isinstance(keys, slice) and call.layer == 1:
            logits[..., -1, 20] = float("inf")
        return logits

    monkeypatch.setattr(whole_rows, "row_logits", broken)
    with pytest.raises(PerpendError, match=r"layer 1 .*outside the fixed support"):
        survey_attention(model, tokens, window=W, whole_rows="log")


def test_memory_stays_flat_in_the_length(monkeypatch) -> None:
    """No block of logits outgrows its room, however long the text; nothing is T x T."""
    model, sizes = tiny.tiny("llama"), {}
    original = whole_rows.row_logits
    monkeypatch.setattr(whole_rows, "CPU_ROOM", 1 << 14)
    monkeypatch.setattr(whole_rows, "KEYS", 256)
    for length in (200, 800):
        held = []

        def look(call, rows=slice(None), keys=slice(None), held=held, **more):
            logits = original(call, rows, keys, **more)
            held.append(logits.numel())
            return logits

        monkeypatch.setattr(whole_rows, "row_logits", look)
        survey_attention(model, tiny.tokens(1, length), window=W, whole_rows="log", batch=1)
        sizes[length] = max(held)
    assert max(sizes.values()) <= 1 << 14


def test_means_over_positions_and_heads_add_up() -> None:
    model, tokens = tiny.tiny("llama"), tiny.tokens(4, 30)
    whole = survey_attention(model, tokens, window=W, whole_rows="log", block=2).whole
    table = whole.per_position()
    later = table[(table["first"] >= W) & (table["layer"] == 1)]
    weighted = (later["total"] * later["rows"]).sum() / later["rows"].sum()
    heads = whole.per_head(W)
    assert heads[heads["layer"] == 1]["total"].mean() == pytest.approx(weighted)
    assert whole.means(W)["total"][1].mean() == pytest.approx(weighted)
    assert whole.means(W, 16)["total"][1].mean() == pytest.approx(later["total"].iloc[0])
    assert table["last"].isna().sum() == 3
    again = survey_attention(model, tokens[:2], window=W, whole_rows="log").whole
    np.testing.assert_allclose(whole.means(weights=np.array([1.0, 0.0]))["total"], again.means()["total"])
    with pytest.raises(InputError, match="inside a bin"):
        whole.means(5)


def test_bins_of_positions() -> None:
    assert whole_rows.bin_edges("log", 200, 64) == (0, 1, 2, 4, 8, 16, 32, 64, 128)
    assert whole_rows.bin_edges("log", 65, 48) == (0, 1, 2, 4, 8, 16, 32, 48, 64)
    linear = whole_rows.bin_edges("linear", 160, 64)
    assert linear == (0, 10, 20, 30, 40, 50, 60, 64, *range(70, 160, 10))
    assert whole_rows.bin_edges((100, 500), 200, 64) == (0, 64, 100)
