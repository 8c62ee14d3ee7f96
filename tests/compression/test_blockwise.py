"""The driver: every family, what is left alone, experts, ties, texts, and refusals by name."""

from __future__ import annotations

import contextlib
import copy
import itertools
import re
import warnings

import pytest
import torch

from perpend.compression.blockwise import check, compress, compressible
from perpend.compression.calibration import calibration
from perpend.compression.matrices import block_matrices
from perpend.compression.observe import observe
from perpend.compression.replay import capture, check_replay
from perpend.errors import InputError, PerpendError
from perpend.models.stream import blocks
from tiny import CAUSAL, LANGUAGE, VOCAB, build, tokens


@pytest.mark.parametrize("family", LANGUAGE)
def test_replay_gives_the_models_own_stream(family):
    model, ids = build(family), tokens(3, 24)
    wanted = []
    handles = [
        b.module.register_forward_hook(
            lambda m, a, out: wanted.append(out if torch.is_tensor(out) else out[0])
        )
        for b in blocks(model)
    ]
    with torch.no_grad():
        model(input_ids=ids)
    for handle in handles:
        handle.remove()
    replay = capture(model, ids)
    hidden = replay.hidden
    with torch.no_grad():
        for layer, own in enumerate(wanted):
            hidden = replay.run(layer, hidden)
            assert torch.equal(hidden, own), layer


@pytest.mark.parametrize("family", CAUSAL)
def test_every_matrix_of_every_family_is_pruned_or_left_by_name(family):
    model, ids = build(family), tokens(4, 24)
    outside = {n: p.clone() for n, p in model.named_parameters() if not n.startswith(_root(model))}
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # four sequences reach all experts
        done = compress(model, ids, "wanda:2:4")
    assert done.zeros == 0.5
    inside = [n for n, p in model.named_parameters() if n.startswith(_root(model)) and p.ndim >= 2]
    covered = {n.split("[")[0].removesuffix(".weight") for n in done.facts} | {
        n.removesuffix(".weight") for n in done.left
    }
    assert {n.removesuffix(".weight") for n in inside} == covered
    for name, before in outside.items():
        assert torch.equal(dict(model.named_parameters())[name], before), name
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=ids).logits).all()


def _root(model):
    return blocks(model)[0].name.rsplit(".", 1)[0] + "."


def test_tied_embeddings_stay_bit_identical():
    for family in ("gpt2", "gemma3"):
        model = build(family)
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert head.data_ptr() == embedding.data_ptr(), "this tiny model ties its head"
        before = embedding.clone()
        for spec in ("awq:3,group=8,grid=3,clip=false", "wanda"):
            compress(model, tokens(4, 24), spec)
            assert torch.equal(model.get_input_embeddings().weight, before)
            assert (
                model.get_output_embeddings().weight.data_ptr()
                == model.get_input_embeddings().weight.data_ptr()
            )


def test_a_matrix_tied_to_the_embeddings_is_refused_by_name():
    model = build("llama")
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.randn(VOCAB, 32))
    model.model.embed_tokens.weight = model.model.layers[1].mlp.up_proj.weight
    with pytest.raises(InputError, match=r"up_proj.*embed_tokens"):
        check(model, "rtn:group=8")
    check(model, "rtn:group=8", keep=["model.layers.1.mlp.up_proj"])


def test_experts_without_tokens_are_warned_about_and_pruned_by_weight():
    model = build("qwen3_moe")
    with torch.no_grad():
        for layer in model.model.layers:  # the router prefers experts 0 and 1 whatever it reads
            layer.mlp.gate.weight.zero_()
            layer.post_attention_layernorm.weight.fill_(1.0)
        hook = [
            layer.mlp.gate.register_forward_hook(
                lambda m, a, out: (
                    out[0],
                    torch.full_like(out[1], 0.5),
                    torch.tensor([0, 1]).expand_as(out[2]),
                )
            )
            for layer in model.model.layers
        ]
    dense = model.model.layers[0].mlp.experts.down_proj.detach()[3].clone()
    with pytest.warns(UserWarning, match=r"experts\.down_proj\[3\] saw no calibration token"):
        done = compress(model, tokens(2, 16), "wanda")
    assert len(done.warnings) == 3 * 2 * 2  # layers × unused experts × matrices
    pruned = model.model.layers[0].mlp.experts.down_proj.detach()[3]
    order = dense.abs().argsort(dim=1, stable=True)[:, : dense.shape[1] // 2]
    assert torch.equal(pruned == 0, torch.zeros_like(dense, dtype=torch.bool).scatter(1, order, True))
    with pytest.warns(UserWarning, match="saw no calibration token"):
        done = compress(model, tokens(2, 16), "awq:3,group=8,grid=3,clip=false")
    unseen = done.facts["model.layers.0.mlp.experts.gate_up_proj[3]"]
    assert unseen["alpha"] == 0
    assert unseen["group_loss"] is None
    for h in hook:
        h.remove()


def test_fused_tensors_of_unknown_layout_are_refused_by_name():
    model = build("llama")

    class Fused(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w = torch.nn.Parameter(torch.randn(4, 32, 8))

        def forward(self, x):
            return x

    model.model.layers[0].mlp.extra = Fused()
    with pytest.raises(InputError, match=r"model\.layers\.0\.mlp\.extra\.w \(4, 32, 8\) in Fused"):
        check(model, "wanda")
    check(model, "wanda", keep=["model.layers.0.mlp.extra.w"])


def test_widths_that_do_not_divide_are_refused_before_anything_changes():
    model = build("llama", 0)
    model.model.layers[2].mlp.down_proj = torch.nn.Linear(48, 32, bias=False)
    model.model.layers[2].self_attn.o_proj = torch.nn.Linear(32, 32, bias=False)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=r"model\.layers\.0\..* has 32 input features, not a multiple of 5"):
        compress(model, tokens(2, 16), "wanda:3:5")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_layers_plan_and_keep():
    model, ids = build("llama"), tokens(3, 16)
    before = copy.deepcopy(model)
    plan = {(0, "attn"): {"sparsity": 0.25}, (0, "mlp"): {"sparsity": 0.75}}
    done = compress(model, ids, "wanda", layers=[0, -1], plan=plan, keep=["*.q_proj"])
    assert "model.layers.0.self_attn.q_proj.weight" in done.left
    assert not any("layers.1" in name for name in done.facts)
    zeros = {n: f["zeros"] / f["of"] for n, f in done.facts.items()}
    assert zeros["model.layers.0.self_attn.k_proj"] == 0.25
    assert zeros["model.layers.0.mlp.up_proj"] == 0.75
    assert zeros["model.layers.2.mlp.up_proj"] == 0.5
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, before.model.layers[1].mlp.up_proj.weight)
    with pytest.raises(InputError, match="outside the model's 3 layers"):
        compress(model, ids, "wanda", layers=[3])
    with pytest.raises(InputError, match="did you mean 'sparsity'"):
        compress(model, ids, "wanda", plan={(0, "attn"): {"sparcity": 0.2}})
    with pytest.raises(InputError, match="part of a plan"):
        compress(model, ids, "wanda", plan={(0, "block"): {"sparsity": 0.2}})


def test_training_mode_and_missing_text_are_refused():
    model = build("llama")
    with pytest.raises(InputError, match="needs calibration text"):
        compress(model, None, "wanda")
    with pytest.raises(InputError, match="eval"):
        compress(model.train(), tokens(1, 8), "wanda")


def test_batches_do_not_change_the_masks():
    ids = tokens(6, 20)
    one, many = build("qwen3"), build("qwen3")
    compress(one, ids, "wanda:2:4", batch=6)
    compress(many, ids, "wanda:2:4", batch=2)
    same = [float(((a == 0) == (b == 0)).float().mean()) for a, b in zip(one.parameters(), many.parameters())]
    assert min(same) > 0.995  # later blocks read streams that differ in the last bit


def test_compression_says_what_its_calibration_was():
    a = compress(build("llama"), tokens(2, 16), "wanda").calibration
    b = compress(build("llama"), tokens(2, 16, seed=1), "wanda").calibration
    assert (a["sequences"], a["length"], a["tokens"]) == (2, 16, 32)
    assert len(a["tokens_sha256"]) == 64
    assert a["tokens_sha256"] != b["tokens_sha256"]


def test_something_between_blocks_is_caught():
    model = build("mistral")
    check_replay(model)

    class Shifted(type(model)):
        pass

    model.__class__ = Shifted
    handle = model.model.layers[1].register_forward_pre_hook(
        lambda m, a, k: ((a[0] + 1,), k) if a else None, with_kwargs=True
    )
    with pytest.raises(PerpendError, match=r"layers\.1: its input is not the output"):
        check_replay(model)
    handle.remove()


def test_shared_blocks_are_refused():
    model = build("llama")
    model.model.layers[2] = model.model.layers[1]

    class Repeats(type(model)):
        pass

    model.__class__ = Repeats
    with pytest.raises(PerpendError, match="share one block's weights"):
        compress(model, tokens(2, 8), "wanda")


def test_products_are_seen_once_each_and_the_model_is_left_as_it_was():
    model, ids = build("qwen3_moe"), tokens(2, 16)
    implementation = model.config._experts_implementation
    block = blocks(model)[0]
    found = block_matrices(block.module, 0, prefix=block.name, attention=block.attention)
    seen: dict[str, int] = {}
    with torch.no_grad():
        plain = model(input_ids=ids).logits
        with observe(found, lambda m, x, y: seen.__setitem__(m.name, seen.get(m.name, 0) + len(x))):
            watched = model(input_ids=ids).logits
    assert torch.allclose(plain, watched, atol=1e-5)
    assert model.config._experts_implementation == implementation
    assert seen["model.layers.0.self_attn.q_proj"] == 32
    assert sum(n for name, n in seen.items() if "gate_up_proj[" in name) == 32 * 2, "two experts a token"
    assert {m.part for m in found if "self_attn" in m.name} == {"attn"}
    assert {m.part for m in found if "experts" in m.name} == {"mlp"}


def test_compressible_lists_all_layers():
    found = compressible(build("gpt2"))
    assert list(found) == [0, 1, 2]
    assert {m.weight.shape for m in found[0] if "c_attn" in m.name} == {(96, 32)}


class _Words:
    """A tokenizer of one id per word, with the shape of a Hugging Face one."""

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [3 + sum(map(ord, w)) % (VOCAB - 5) for w in text.split()]}

    def convert_ids_to_tokens(self, ids):
        return [str(i) for i in ids]


def test_short_calibration_text_and_a_huge_maximum():
    """Reference scripts take the length from the model and fail on short texts; here they are apart."""
    model = build("llama")
    model.config.max_position_embeddings = 1_000_000
    got = calibration(["a few words that make one short text " * 3], _Words())
    assert got.tokens.shape == (1, 24)
    assert got.record["notes"]
    assert compress(model, got.tokens, "wanda").zeros == 0.5


def test_calibration_never_reads_what_is_evaluated():
    from perpend import texts

    text = texts.read_text([" ".join(str(i) for i in range(400))])
    evaluated = texts.sequences(text, _Words(), length=20)
    got = calibration(text, _Words(), length=30, sequences=3, avoid=evaluated, used=4)
    assert got.record["skipped"] == 3  # 80 tokens are evaluated: 2.67 sequences of 30
    stream = texts.encode(_Words(), text.text)
    assert got.tokens[0].tolist() == stream[90:120]
    with pytest.raises(InputError, match="no tokens left"):
        calibration(text, _Words(), length=100, avoid=evaluated, used=20)
    with pytest.raises(InputError, match="were asked for"):
        calibration(text, _Words(), length=100, sequences=50)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("rtn:group=-1", "0 for one group per row, got -1"),
        ("wanda:nan", r"\[0, 1\), got nan"),
        ("wanda:2:4,sparsity=0.7", "fixes the sparsity at 0.5, 0.7 was asked for"),
        ("magnitude:1:4,sparsity=0.3", "fixes the sparsity at 0.75"),
        ("awq:group=8,objective=update,sample=0", "at least 1 batch"),
        ("awq:group=8,objective=update,perpendicular=nan", "must be finite"),
        ("awq:group=8,objective=update,parallel=inf", "must be finite"),
        ("wanda+gain:parallel=0", "at 0 the best update is none"),
        ("wanda+gain:perpendicular=nan", "finite weights"),
        ("wanda+refit:iterations=0", "at least 1 iteration"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_changes(spec, message):
    model = build("llama")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(InputError, match=message):
        check(model, spec)
    with pytest.raises(InputError, match=message):
        compress(model, tokens(2, 12), spec)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_sparsity_of_a_pattern_may_be_said():
    assert compress(build("llama"), tokens(2, 12), "wanda:1:4,sparsity=0.75", layers=[0]).zeros == 0.75


def test_keep_that_matches_nothing_or_everything_is_refused():
    model = build("llama")
    with pytest.raises(InputError, match=r"matches no weight .* model.layers.0.self_attn.q_proj"):
        check(model, "wanda", keep=["*.down_porj"])
    with pytest.raises(InputError, match="nothing is left to compress"):
        check(model, "wanda", keep=["*"])
    check(model, "wanda", keep=["lm_head", "*.down_proj"])


def test_the_remedy_for_an_expert_is_one_that_works():
    """A slice of fused experts is named with its number, which as a pattern would match nothing."""
    model, kept = build("qwen3_moe"), []  # its experts are 16 wide inside
    for _ in range(9):
        with contextlib.suppress(InputError):
            check(model, "wanda:10:32", keep=kept)
            break
        with pytest.raises(InputError) as refused:
            check(model, "wanda:10:32", keep=kept)
        kept.append(re.search(r"keep='([^']+)'", str(refused.value))[1])
    assert kept == [f"model.layers.{i}.mlp.experts.down_proj" for i in range(3)]


def test_a_model_with_few_positions_shortens_the_calibration():
    from transformers import LlamaConfig, LlamaForCausalLM

    from tiny import byte_tokenizer

    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=259, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=1, max_position_embeddings=256)
    )  # fmt: skip
    got = calibration(["words and words " * 80], byte_tokenizer(), model=model, sequences=2)
    assert got.tokens.shape == (2, 256)
    assert "256 positions" in got.record["notes"][0]


def test_a_text_shorter_than_a_sequence_is_used_whole_beside_its_bos():
    from tiny import byte_tokenizer

    tokenizer = byte_tokenizer()
    got = calibration(["a"], tokenizer, bos="always")
    assert got.tokens.tolist() == [[tokenizer.bos_token_id, tokenizer.convert_tokens_to_ids("a")]]
    assert calibration(["abc"], tokenizer, bos="never").tokens.shape == (1, 3)


@pytest.mark.parametrize("bos", ["never", "always"])
@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(("evaluated", "length"), [(64, 10), (10, 64), (20, 30)])
def test_calibration_shares_no_token_with_the_evaluation_whatever_the_seed(bos, seed, evaluated, length):
    """With a BOS a sequence holds one token of the text less, and a seed above 0 evaluates anywhere."""
    from perpend import texts
    from tiny import byte_tokenizer

    # position i of the text is told by the two bytes from i on: no pair occurs twice
    letters = [chr(33 + i) for i in range(90)]
    text = texts.read_text(["".join(a + b for a in letters[:30] for b in letters[30:60])])
    tokenizer = byte_tokenizer()
    cut = texts.sequences(text, tokenizer, length=evaluated, bos=bos)
    used = 6
    got = calibration(text, tokenizer, length=length, bos=bos, avoid=cut, used=used, seed=seed)

    def pairs(rows):
        special = {tokenizer.bos_token_id}
        return {
            (a, b)
            for row in rows.tolist()
            for a, b in itertools.pairwise(row)
            if not special & {a, b}
        }  # fmt: skip

    assert not pairs(cut.take(used, seed)) & pairs(got.tokens)
    whole = calibration(text, tokenizer, length=length, bos=bos, sequences=None)
    assert got.record["skipped"] == len(texts.sequences(text, tokenizer, length=length, bos=bos)) - len(
        [1 for row in texts.sequences(text, tokenizer, length=length, bos=bos).tokens
         if not pairs(row[None]) & pairs(cut.take(used, seed))]
    )  # fmt: skip
    assert len(got.tokens) <= len(whole.tokens)


def test_a_device_without_float64_is_refused_before_anything_is_changed(monkeypatch):
    from perpend.compression.error import measure

    model = build("llama")
    before = [p.clone() for p in model.parameters()]
    monkeypatch.setattr("perpend.compression.statistics.NO_DOUBLE", {"cpu"})
    with pytest.raises(InputError, match="float64, which cpu has not; load the model with device=cpu"):
        compress(model, None, "magnitude")
    with pytest.raises(InputError, match="device=cpu"):
        measure(model, model, tokens(1, 8))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters()))
