"""The update survey against per-token float64 arithmetic, and the laws of its sums and histograms."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import tiny
from perpend.errors import InputError
from perpend.geometry import cosine_identity, decompose
from perpend.models.stream import contributions
from perpend.surveys import _update_sums, histogram
from perpend.surveys.updates import BLOCK, SETS, STATISTICS, random_direction, survey_updates


def per_token(name: str, tokens: torch.Tensor, **inputs) -> dict:
    """(layer, part) -> (Δ, z) of all tokens in float64, from one pass over everything."""
    seen = {}
    with (
        torch.no_grad(),
        contributions(
            tiny.tiny(name),
            lambda c: seen.update({(c.layer, c.part): (c.update.double(), c.reference.double())}),
        ),
    ):
        tiny.tiny(name)(tokens, **inputs)
    return seen


@pytest.mark.parametrize("name", ["llama", "gemma3", "granite", "bloom", "bert", "cohere2", "opt", "dinov2"])
def test_means_are_those_of_the_definitions(name):
    tokens = tiny.pixels(5) if name in tiny.VISION else tiny.tokens(5, 20)
    survey = survey_updates(tiny.tiny(name), tokens, batch=2)
    for (layer, part), (update, reference) in per_token(name, tokens).items():
        i, j = survey.layers.index(layer), survey.parts.index(part)
        split, identity = decompose(update, reference), cosine_identity(update, reference)
        energy = split.parallel.square().sum(-1) / update.square().sum(-1)
        expected = {
            "alpha": split.alpha,
            "ratio": split.ratio,
            "energy": energy,
            "share": energy.sqrt(),
            "update_norm": update.norm(dim=-1),
            "reference_norm": reference.norm(dim=-1),
            "relative_norm": update.norm(dim=-1) / reference.norm(dim=-1),
            "rho": identity.rho,
            "cosine": identity.cosine,
            "second_order": identity.second_order,
        }
        for statistic, value in expected.items():
            got = survey.mean(statistic)[i, j]
            assert got == pytest.approx(float(value.mean()), rel=2e-4, abs=2e-6), (layer, part, statistic)
            if statistic not in ("energy", "second_order"):
                for q in (0.25, 0.5, 0.9):
                    # between neighbouring order statistics, widened by the grid's resolution
                    low, high = np.quantile(value.numpy(), [max(q - 0.02, 0), min(q + 0.02, 1)])
                    slack = abs(np.array([low, high])) * histogram.RESOLUTION + 1e-6
                    got = survey.quantile(statistic, q)[i, j]
                    assert low - slack[0] <= got <= high + slack[1], (layer, part, statistic, q)


def test_sets_of_tokens_are_the_stated_ones():
    tokens = tiny.tokens(6, 40)
    survey = survey_updates(tiny.tiny("gpt2"), tokens, batch=4, parts="mlp")
    for (layer, part), (update, reference) in per_token("gpt2", tokens).items():
        if part != "mlp":
            continue
        ratio = decompose(update, reference).ratio.flatten()
        norm = reference.norm(dim=-1).flatten()
        first = torch.zeros(6, 40, dtype=torch.bool)
        first[:, 0] = True
        top = torch.zeros(240, dtype=torch.bool)
        top[norm.topk(3).indices] = True  # ceil(240 / 100)
        keep = {
            "all": torch.ones(240, dtype=torch.bool),
            "without_first": ~first.flatten(),
            "without_top": ~top,
            "without_both": ~(first.flatten() | top),
        }
        for name, chosen in keep.items():
            assert survey.count("tokens", name)[layer, 0] == int(chosen.sum())
            assert survey.mean("ratio", name)[layer, 0] == pytest.approx(
                float(ratio[chosen].mean()), rel=1e-4
            )


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "opt", "gemma3", "gpt_neox"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_is_left_out_and_changes_nothing(name, side):
    length, lengths = 24, [24, 17, 9]
    tokens, mask = tiny.tokens(3, length), torch.zeros(3, length, dtype=torch.bool)
    padded = torch.zeros_like(tokens)
    for row, count in enumerate(lengths):
        where = slice(length - count, length) if side == "left" else slice(0, count)
        padded[row, where], mask[row, where] = tokens[row, :count], True
    together = survey_updates(tiny.tiny(name), padded, mask=mask, batch=3)
    alone = [
        survey_updates(tiny.tiny(name), tokens[row : row + 1, :count]) for row, count in enumerate(lengths)
    ]
    assert together.padding == 3 * length - sum(lengths)
    assert (together.count("tokens") == sum(lengths)).all()
    for statistic in ("alpha", "ratio", "update_norm"):
        for chosen in ("all", "without_first"):
            total = sum(one.mean(statistic, chosen) * one.count("used", chosen) for one in alone)
            expected = total / sum(one.count("used", chosen) for one in alone)
            np.testing.assert_allclose(together.mean(statistic, chosen), expected, rtol=2e-3, atol=1e-5)


def test_the_result_does_not_depend_on_the_batch_nor_on_resuming():
    tokens = tiny.tokens(BLOCK + 5, 12)
    kept: dict = {}

    def store(name, compute):
        if name not in kept:
            kept[name] = compute()
        return kept[name]

    whole = survey_updates(tiny.tiny("llama"), tokens, batch=8, store=store)
    assert sorted(kept) == ["updates-0", "updates-1"]
    del kept["updates-1"]  # interrupted after the first block
    resumed = survey_updates(tiny.tiny("llama"), tokens, batch=8, store=store)
    for one, two in ((whole.sums, resumed.sums), (whole.bins, resumed.bins), (whole.counts, resumed.counts)):
        assert np.array_equal(one, two)
    single = survey_updates(tiny.tiny("llama"), tokens, batch=1)
    np.testing.assert_allclose(single.sums, whole.sums, rtol=1e-4, atol=1e-5)
    assert np.array_equal(single.counts, whole.counts)


def test_the_sums_do_not_depend_on_how_many_layers_are_reduced_together(monkeypatch):
    tokens = tiny.tokens(3, 12)
    together = survey_updates(tiny.tiny("llama"), tokens)
    monkeypatch.setattr(_update_sums, "TOGETHER", 1)
    alone = survey_updates(tiny.tiny("llama"), tokens)
    for one, two in (
        (together.sums, alone.sums),
        (together.bins, alone.bins),
        (together.counts, alone.counts),
    ):
        assert np.array_equal(one, two)


def test_blocks_merge_exactly():
    """The histograms of a whole are the sum of those of its blocks, cell by cell."""
    tokens = tiny.tokens(2 * BLOCK, 10)
    whole = survey_updates(tiny.tiny("gpt2"), tokens)
    halves = [survey_updates(tiny.tiny("gpt2"), tokens[i * BLOCK : (i + 1) * BLOCK]) for i in range(2)]
    assert np.array_equal(whole.bins, halves[0].bins + halves[1].bins)
    assert np.array_equal(whole.counts, halves[0].counts + halves[1].counts)
    assert np.array_equal(whole.sums, halves[0].sums + halves[1].sums)


def test_degenerate_tokens_are_counted_and_never_averaged():
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()  # Δ = 0: no perpendicular part
        model.model.embed_tokens.weight[5] = 0.0  # z = 0 at layer 0
    tokens = tiny.tokens(4, 16)
    tokens[0, 3] = 5

    def along(c):  # exactly -z, and exactly 0.25 z
        if c.layer == 1 and c.part == "attn":
            return -c.reference
        if c.layer == 2 and c.part == "attn":
            return 0.25 * c.reference
        return None

    fives = int((tokens == 5).sum())
    with contributions(model, along):
        survey = survey_updates(model, tokens)
    attn = survey.parts.index("attn")
    assert survey.count("used")[0, attn] == 0
    assert survey.count("zero_reference")[0, attn] == fives
    assert survey.count("no_perpendicular")[0, attn] == 64 - fives
    assert survey.count("reversal")[1, attn] == 64 - fives  # a stream of zero stays one
    assert survey.count("used")[1, attn] == 0
    assert survey.count("no_perpendicular")[2, attn] + survey.count("zero_reference")[2, attn] == 64
    assert np.isnan(survey.mean("ratio")[0, attn])
    assert survey.results["per_layer"][0]["attn"]["ratio"] is None
    assert any("layer 0 attn" in line for line in survey.undefined)
    assert survey.count("used")[0, survey.parts.index("mlp")] == 64 - fives


def test_nearly_parallel_updates_keep_their_small_part():
    """Δ⊥ is a millionth-scale part of Δ: ‖Δ‖² − ‖Δ∥‖² in fp32 would lose it altogether."""
    torch.manual_seed(0)
    kept = {}

    def nearly(c):
        z = c.reference.double()
        across = torch.randn_like(z)
        across -= (across * z).sum(-1, keepdim=True) / z.square().sum(-1, keepdim=True) * z
        across *= 1e-4 * z.norm(dim=-1, keepdim=True) / across.norm(dim=-1, keepdim=True)
        kept["update"] = (z + across).float()
        kept["reference"] = c.reference
        return kept["update"]

    model = tiny.tiny("llama")
    with contributions(model, nearly, parts="attn", layers=[0]):
        survey = survey_updates(model, tiny.tokens(2, 24), parts="attn", layers=[0])
    exact = decompose(kept["update"].double(), kept["reference"].double())
    assert survey.mean("ratio")[0, 0] == pytest.approx(float(exact.ratio.mean()), rel=1e-2)
    assert survey.mean("alpha")[0, 0] == pytest.approx(float(exact.alpha.mean()), rel=1e-6)


@pytest.mark.parametrize("size", [1e-18, 1e-19, 1e-20, 1e-21])
def test_a_tiny_reference_keeps_its_alpha(size):
    """‖z‖² lies at or below the smallest fp32 number there, ‖z‖ does not."""
    torch.manual_seed(0)
    z = size * torch.randn(8, 32, dtype=torch.float64)
    across = torch.randn_like(z)
    update, reference = (1e20 * z + 0.1 * size * 1e20 * across).float(), z.float()
    _, _, got = _update_sums.three_numbers(update, reference)
    exact = decompose(update.double(), reference.double()).perpendicular.norm(dim=-1)
    torch.testing.assert_close(got.double(), exact, rtol=0.02, atol=0)


def test_a_reference_of_zero_has_no_parallel_part():
    update = torch.ones(1, 4)
    for reference in (torch.zeros(1, 4), torch.full((1, 4), 1e-30)):
        norm, _, across = _update_sums.three_numbers(update, reference)
        assert float(norm) == 0.0
        assert math.isfinite(float(across))


def test_the_largest_hundredth_takes_the_first_of_equals():
    norms = torch.ones(2, 250, dtype=torch.float64)
    norms[0, 100:] = 2.0
    norms[1, 0], norms[1, 249] = math.nan, 5.0
    top = _update_sums._largest(norms)
    assert top[0].nonzero().flatten().tolist() == [100, 101, 102]
    assert top[1].nonzero().flatten().tolist() == [1, 2, 249]


@pytest.mark.parametrize("width", [3, 32, 577])
def test_the_null_is_that_of_a_random_direction(width):
    generator = torch.Generator().manual_seed(1)
    draws = torch.randn(20_000, width, generator=generator, dtype=torch.float64)
    cosine = draws[:, 0].abs() / draws.norm(dim=-1)
    null = random_direction(width)
    assert null["energy"] == 1 / width
    assert null["ratio"] == 1 / math.sqrt(width - 1)
    assert float(cosine.square().mean()) == pytest.approx(null["energy"], rel=0.04)
    assert float(cosine.mean()) == pytest.approx(null["share"], rel=0.02)
    if width > 3:  # in three dimensions the ratio's variance is infinite
        ratio = cosine / (1 - cosine.square()).sqrt()
        assert float(ratio.mean()) == pytest.approx(null["ratio_mean"], rel=0.04)
        assert float(ratio.median()) == pytest.approx(null["ratio_median"], rel=0.04)


def test_the_median_gap_is_the_median_tokens():
    tokens = tiny.tokens(6, 40)
    survey = survey_updates(tiny.tiny("gpt2"), tokens, parts="block")
    for (layer, part), (update, reference) in per_token("gpt2", tokens).items():
        if part == "block":
            expected = float(cosine_identity(update, reference).gap.flatten().median())
            got = survey.quantile("gap", 0.5)[layer, 0]  # the fourth power of ρ: four times its resolution
            assert got == pytest.approx(expected, rel=5 * histogram.RESOLUTION)


def test_turned_tokens_have_negative_cosines():
    model = tiny.tiny("llama")
    with contributions(model, lambda c: c.update - 3 * c.reference, parts="attn", layers=[1]):
        survey = survey_updates(model, tiny.tokens(2, 24), parts="attn", layers=[1])
    assert survey.count("turned")[0, 0] == 48
    assert survey.mean("cosine")[0, 0] < 0
    assert survey.quantile("cosine", 0.5)[0, 0] == pytest.approx(survey.mean("cosine")[0, 0], rel=0.1)
    assert survey.quantile("alpha", 0.95)[0, 0] < 0


def test_tables_arrays_and_results_agree():
    survey = survey_updates(tiny.tiny("gemma3"), tiny.tokens(3, 20), layers=[0, -1])
    assert survey.layers == (0, 3)
    table = survey.tables["updates"]
    assert len(table) == 2 * 3 * len(SETS)
    assert table.groupby(["layer", "part", "set"]).size().eq(1).all()
    row = table[(table.layer == 3) & (table.part == "mlp") & (table.set == "all")].iloc[0]
    assert row.ratio == survey.mean("ratio")[1, survey.parts.index("mlp")]
    assert survey.results["per_layer"][1]["mlp"]["ratio"] == row.ratio
    assert row.gap == pytest.approx(row.cosine - row.second_order)
    assert row.null_ratio == 1 / math.sqrt(31)
    assert survey.arrays["sums"].shape == (4, 2, 3, len(STATISTICS))
    assert survey.arrays["histograms"].sum() > 0
    assert "ratio" in survey._repr_html_()


def test_without_an_adapter_the_blocks_are_profiled_and_it_is_said():
    from transformers import XGLMConfig, XGLMForCausalLM

    from perpend.studies.layer_drop import orders, rank
    from perpend.studies.updates import updates_study

    torch.manual_seed(0)
    config = XGLMConfig(vocab_size=tiny.VOCAB, d_model=32, ffn_dim=48, num_layers=3, attention_heads=4)
    with pytest.warns(UserWarning, match="block updates only"):
        survey = survey_updates(XGLMForCausalLM(config).eval(), tiny.tokens())
    assert survey.parts == ("block",)
    ranking = rank(survey)
    assert len(orders(ranking, "block")["last first"]) == 3
    study = updates_study(survey, None, ranking)
    assert "perpend/models/families" in study.findings[0]
    assert set(study.results["updates"]["per_layer"][0]) == {"layer", "block"}


def test_wrong_inputs_are_named():
    model = tiny.tiny("llama")
    with pytest.raises(InputError, match="tokens have shape"):
        survey_updates(model, tiny.tokens()[0])
    with pytest.raises(InputError, match="mask has shape"):
        survey_updates(model, tiny.tokens(), mask=torch.ones(1, 3))
    with pytest.raises(InputError, match="leaves no token"):
        survey_updates(model, tiny.tokens(), mask=torch.zeros(2, 24))
    survey = survey_updates(model, tiny.tokens(), layers=[0])
    with pytest.raises(InputError, match="statistic with quantiles"):
        survey.quantile("ratios", 0.5)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.floats(1e-5, 1e5), min_size=1, max_size=60),
    st.lists(st.floats(1e-5, 1e5), max_size=60),
    st.floats(0, 1),
)
def test_quantiles_are_within_the_stated_resolution(above, below, q):
    def counts(values):
        bins = histogram.bins_of(torch.tensor(values, dtype=torch.float64))
        return np.bincount(bins.numpy(), minlength=histogram.BINS)

    values = np.sort(np.array([*above, *(-np.array(below))]))
    got = float(histogram.quantile(counts(above), q, counts(below) if below else None))
    place = q * len(values)
    low = values[max(math.ceil(place) - 1, 0)]
    high = values[min(math.floor(place), len(values) - 1)]
    width = 1 + histogram.RESOLUTION + 1e-9
    assert min(low / width, low * width) <= got <= max(high / width, high * width)


def test_empty_histograms_have_no_quantile():
    assert math.isnan(float(histogram.quantile(np.zeros(histogram.BINS), 0.5)))
    assert histogram.edges().shape == (histogram.BINS - 1,)


def test_an_infinite_ratio_stays_in_its_set_of_tokens() -> None:
    """ρ of the second token is beyond float64; the first token is alone in its set."""
    z, dot, across = [1.0, 1e-200, 2.0], [0.0, 0.0, 1.0], [1.0, 1e150, 1.0]
    three = torch.tensor([z, dot, across], dtype=torch.float64).view(3, 1, 1, 3)
    sums, counts, _ = _update_sums._reduce(three, torch.tensor([True, False, False]))
    rho = sums[..., STATISTICS.index("rho")].flatten()
    assert rho[1] == 1.0
    assert not torch.isnan(rho).any()
    assert counts.shape == (4, 1, 1, len(_update_sums.COUNTS))


def test_no_layer_is_refused() -> None:
    with pytest.raises(InputError, match="no layer is chosen"):
        survey_updates(tiny.tiny("llama"), tiny.tokens(2, 12), layers=[])


def test_blocks_that_run_in_turns_unknown_to_perpend_are_refused() -> None:
    config = transformers.AlbertConfig(
        vocab_size=64, embedding_size=16, hidden_size=32, num_hidden_layers=4, num_hidden_groups=2,
        num_attention_heads=4, intermediate_size=48, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.AlbertModel(config).eval()
    with pytest.raises(InputError, match="runs this block several times"):
        survey_updates(model, tiny.tokens(2, 12) % 64, parts=("block",))


def test_a_stream_of_rows_and_columns_is_read_as_its_tokens() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x)

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
            x = pixel_values.movedim(1, -1)  # [B, height, width, 8]
            for block in self.blocks:
                x = block(x)
            return x

    images = torch.randn(3, 8, 4, 5, generator=torch.Generator().manual_seed(1))
    model = Grid().eval()
    survey = survey_updates(model, images, parts=("block",))
    assert (survey.count("tokens") == 3 * 4 * 5).all()
    x = images.movedim(1, -1)
    with torch.no_grad():
        delta = model.blocks[0].linear(x)
        alpha = (delta * x).sum(-1) / x.square().sum(-1)
    assert survey.mean("alpha")[0, 0] == pytest.approx(float(alpha.mean()), rel=1e-5)
