"""What holds of every edit: nothing at (1, 1), decode as prefill, padded as unpadded, restored, composed."""

from __future__ import annotations

import inspect
import json

import pytest
import torch
import transformers

import perpend
import tiny
from attention_oracle import padded, t5
from perpend.errors import InputError
from perpend.models import edit as edit_module
from perpend.models.attention import attach, attention_sites
from perpend.models.edit import SITES, VALUE_SITES, Edit
from perpend.models.stream import contributions

FAMILIES = ["llama", "gemma3", "gpt_oss", "gpt2", "bloom", "gpt_neox"]


def logits(model: torch.nn.Module, *args: torch.Tensor, **inputs: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **inputs)[0]


def pieces(model: torch.nn.Module, ids: torch.Tensor, cuts: list[int], static: bool) -> torch.Tensor:
    """Logits of a run in pieces with a cache."""
    options = {"config": model.config}
    cache = (
        transformers.StaticCache(**options, max_cache_len=ids.shape[1] + 4)
        if static
        else transformers.DynamicCache(**options)
    )
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    found = []
    with torch.no_grad():
        for start, end in zip([0, *cuts], [*cuts, ids.shape[1]]):
            mask = torch.ones(len(ids), end, dtype=torch.long)
            found.append(model(ids[:, start:end], attention_mask=mask, use_cache=True, **{name: cache})[0])
    return torch.cat(found, 1)


@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", FAMILIES)
def test_one_one_is_the_model_to_the_bit(name: str, site: str) -> None:
    model, inputs = tiny.tiny(name), tiny.inputs(name)
    plain = logits(model, **inputs)
    ones = [1.0] * len(attention_sites(model))
    with perpend.edit(model, site, 1.0, 1.0):
        assert torch.equal(logits(model, **inputs), plain)
    with perpend.edit(model, site, ones, ones):
        assert torch.equal(logits(model, **inputs), plain)


@pytest.mark.parametrize("static", [False, True], ids=["dynamic", "static"])
@pytest.mark.parametrize("site", SITES)
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_decoding_is_prefill(name: str, site: str, static: bool) -> None:
    model, ids = tiny.tiny(name), tiny.tokens(2, 24)
    with perpend.edit(model, site, 0.25, 0.75):
        whole = logits(model, ids)
        found = pieces(model, ids, [8, 20, 21, 22, 23], static)
    torch.testing.assert_close(found, whole, atol=2e-5, rtol=1e-4)
    assert (whole - logits(model, ids)).abs().max() > 1e-2


@pytest.mark.parametrize("site", VALUE_SITES)
@pytest.mark.parametrize("name", ["llama", "gpt2", "gpt_oss", "gemma2", "deepseek_v3"])
def test_single_steps_of_a_parallel_scale_are_prefill(name: str, site: str) -> None:
    """The path for one decoded token, taken where s⊥ = 1; the others where a family needs more than it."""
    model, ids = tiny.tiny(name), tiny.tokens(2, 16)
    with perpend.edit(model, site, 0.25):
        found = pieces(model, ids, list(range(8, 16)), False)
        torch.testing.assert_close(found, logits(model, ids), atol=5e-5, rtol=1e-4)


@pytest.mark.parametrize("site", VALUE_SITES)
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_short_way_of_a_step_is_the_long_way(name: str, site: str, monkeypatch) -> None:
    """One decoded token goes past the making of a call; beside another hook it does not."""
    model, ids = tiny.tiny(name), tiny.tokens(2, 16)
    taken = []
    own = edit_module.step
    monkeypatch.setattr(edit_module, "step", lambda *a: taken.append(a[0].shape[1]) or own(*a))
    with perpend.edit(model, site, 0.25):
        short = pieces(model, ids, list(range(8, 16)), False)
        heads = len(attention_sites(model)) * 8
        assert taken == [4] * heads  # the kernel's own layout [B, H, 1, d_v]
        with attach(model, lambda call, output: None):
            long = pieces(model, ids, list(range(8, 16)), False)
    assert taken[heads:] == [1] * heads
    torch.testing.assert_close(short, long, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("site", VALUE_SITES)
def test_single_steps_with_values_of_zero_change_nothing(site: str) -> None:
    model, ids = tiny.build("llama"), tiny.tokens(2, 16)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.v_proj.weight.zero_()
    plain = pieces(model, ids, list(range(8, 16)), False)
    with perpend.edit(model, site, 0.0):
        assert torch.equal(pieces(model, ids, list(range(8, 16)), False), plain)


@pytest.mark.parametrize("name", ["bloom", "gpt_oss"])
def test_decoding_is_prefill_in_families_of_their_own(name: str) -> None:
    model, ids = tiny.tiny(name), tiny.tokens(2, 24)
    with perpend.edit(model, "value.exclude_self", 0.25, 0.75, reference="token"):
        torch.testing.assert_close(
            pieces(model, ids, [20, 21, 22, 23], False), logits(model, ids), atol=2e-5, rtol=1e-4
        )


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("site", ["value.exclude_self", "residual.attn"])
def test_generation_is_greedy_prefill(site: str, cache: str) -> None:
    """`generate` under an edit writes what repeated whole passes under that edit would choose."""
    model, ids = tiny.build("llama"), tiny.tokens(2, 6)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": -1}
    with perpend.edit(model, site, 0.0, 0.8):
        written = model.generate(
            ids, **options, **({"cache_implementation": "static"} if cache == "static" else {})
        )
        row = ids
        for _ in range(6):
            row = torch.cat([row, logits(model, row)[:, -1:].argmax(-1)], 1)
    assert torch.equal(written, row)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("site", SITES)
def test_padding_changes_nothing(site: str, side: str) -> None:
    model, whole = tiny.tiny("llama"), tiny.tokens(2, 20)
    ids, mask, positions = padded(whole, 6, side)
    with perpend.edit(model, site, 0.25, 0.5):
        together = logits(model, input_ids=ids, attention_mask=mask, position_ids=positions)
        alone = logits(model, input_ids=whole[:1, :14])
        full = logits(model, input_ids=whole[1:])
    real = together[:1, 6:] if side == "left" else together[:1, :14]
    torch.testing.assert_close(real, alone, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(together[1:], full, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("site", SITES)
def test_layers_that_are_not_edited_see_what_they_saw(site: str) -> None:
    """Before the edited layer: bits; and other layers' hooks are never there."""
    model, ids = tiny.tiny("llama"), tiny.tokens(1, 12)

    def before(layer: int) -> list[torch.Tensor]:
        seen = []
        with contributions(model, lambda c: seen.append(c.update.clone()) if c.layer < layer else None):
            logits(model, ids)
        return seen

    plain = before(2)
    with perpend.edit(model, site, 0.0, layers=[2]):
        edited = before(2)
    assert len(plain) == 6
    assert all(torch.equal(a, b) for a, b in zip(plain, edited))


@pytest.mark.parametrize("site", SITES)
def test_a_token_mask_edits_those_rows_alone(site: str) -> None:
    model, ids = tiny.tiny("llama"), tiny.tokens(2, 12)
    plain = logits(model, ids)
    tokens = torch.zeros(2, 12, dtype=torch.bool)
    tokens[0, 7:] = True
    with perpend.edit(model, site, 0.0, tokens=tokens):
        found = logits(model, ids)
        cached = pieces(model, ids, [5, 10, 11], False)
    torch.testing.assert_close(found[0, :7], plain[0, :7])
    torch.testing.assert_close(found[1], plain[1])
    assert ((found[0, 7:] - plain[0, 7:]).abs().amax(-1) > 1e-4).all()
    torch.testing.assert_close(cached, found, atol=2e-5, rtol=1e-4)
    with perpend.edit(model, site, 0.0):
        everywhere = logits(model, ids)
    with perpend.edit(model, site, 0.0, tokens=torch.ones_like(tokens)):
        torch.testing.assert_close(logits(model, ids), everywhere)


def test_a_token_mask_holds_past_a_sliding_window() -> None:
    """A sliding cache forgets keys, not positions."""
    model, ids = tiny.tiny("mistral"), tiny.tokens(1, 40)
    tokens = torch.zeros(1, 40, dtype=torch.bool)
    tokens[0, 30:35] = True
    with perpend.edit(model, "value.full", 0.0, tokens=tokens):
        whole = logits(model, ids)
        torch.testing.assert_close(
            pieces(model, ids, list(range(24, 40)), False), whole, atol=2e-5, rtol=1e-4
        )


def test_positions_past_the_mask_are_left_alone() -> None:
    model, ids = tiny.tiny("llama"), tiny.tokens(1, 10)
    short = torch.ones(1, 4, dtype=torch.bool)
    long = torch.cat([short, torch.zeros(1, 6, dtype=torch.bool)], 1)
    with perpend.edit(model, "residual.mlp", 0.0, tokens=short):
        found = logits(model, ids)
    with perpend.edit(model, "residual.mlp", 0.0, tokens=long):
        assert torch.equal(logits(model, ids), found)


@pytest.mark.parametrize("site", SITES)
def test_nested_edits_compose(site: str) -> None:
    """Scales multiply on one reference; the outer edit acts first."""
    model, ids = tiny.build("llama").double(), tiny.tokens(1, 12)
    with perpend.edit(model, site, 0.5, 2.0), perpend.edit(model, site, 0.5, 0.25):
        nested = logits(model, ids)
    with perpend.edit(model, site, 0.25, 0.5):
        torch.testing.assert_close(nested, logits(model, ids), atol=1e-9, rtol=1e-9)


def test_the_outer_edit_acts_first() -> None:
    """Full and exclude-self do not commute: full s∥ = 0 after exclude-self leaves nothing along v."""
    model, ids = tiny.build("llama").double(), tiny.tokens(1, 12)
    left: list[torch.Tensor] = []

    def look(call, output) -> None:
        value = call.value.repeat_interleave(call.groups, 1).transpose(1, 2)
        left.append((output * value).sum(-1).abs().max())

    for sites in (("value.exclude_self", "value.full"), ("value.full", "value.exclude_self")):
        outer, inner = (perpend.edit(model, site, 0.0, layers=[0]) for site in sites)
        with outer, inner, attach(model, look, layers=[0]):
            logits(model, ids)
    assert left[0] < 1e-12 < 1e-3 < left[1]


@pytest.mark.parametrize("site", SITES)
def test_the_model_is_restored_also_by_an_exception(site: str) -> None:
    model, ids = tiny.build("llama"), tiny.tokens(1, 12)
    plain = logits(model, ids)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    tokens = torch.ones(1, 12, dtype=torch.bool)

    def stopped() -> None:
        with perpend.edit(model, site, 0.0, tokens=tokens):
            assert not torch.equal(logits(model, ids), plain)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        stopped()
    assert torch.equal(logits(model, ids), plain)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks


@pytest.mark.parametrize("name", ["qwen3_next", "llama"])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_implementations_agree(name: str, implementation: str) -> None:
    """Gated attention included: the aggregate is edited before its gate."""
    model, ids = tiny.build(name), tiny.tokens(1, 12)
    with perpend.edit(model, "value.exclude_self", 0.0):
        own = logits(model, ids)
        model.set_attn_implementation(implementation)
    with perpend.edit(model, "value.exclude_self", 0.0):
        torch.testing.assert_close(logits(model, ids), own, atol=2e-5, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("site", ["value.exclude_self", "residual.mlp"])
def test_compiled_edits_agree(site: str) -> None:
    """Several scales and lengths through one compiled function; decoding is not compiled."""
    model, ids = tiny.tiny("llama"), tiny.tokens(2, 24)
    for parallel, across in ((0.25, 1.0), (0.0, 0.5), ([0.1, 0.2, 0.3], 1.0)):
        with perpend.edit(model, site, parallel, across):
            plain = logits(model, ids)
        with perpend.edit(model, site, parallel, across, compile=True):
            torch.testing.assert_close(logits(model, ids), plain, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(logits(model, ids[:, :9]), plain[:, :9], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(
                pieces(model, ids, [20, 21, 22, 23], False), plain, atol=2e-5, rtol=1e-4
            )


def test_without_a_compiler_the_plain_path_runs_and_says_so_once(monkeypatch, capsys) -> None:
    from perpend.models.edit_arithmetic import compiled

    def refuses(function, **options):
        def run(*args):
            raise torch._dynamo.exc.TorchDynamoException("No working C++ compiler found")

        return run

    monkeypatch.setattr(torch, "compile", refuses)
    compiled.cache_clear()
    model, ids = tiny.tiny("llama"), tiny.tokens(1, 12)
    try:
        with perpend.edit(model, "value.exclude_self", 0.5, 0.25):
            plain = logits(model, ids)
        with perpend.edit(model, "value.exclude_self", 0.5, 0.25, compile=True):
            torch.testing.assert_close(logits(model, ids), plain)
            logits(model, ids)
    finally:
        compiled.cache_clear()
    assert capsys.readouterr().err.count("torch.compile does not work here (No working C++ compiler") == 1


EDITS = [
    Edit("value.exclude_self", 0.0),
    Edit("value.full", [0.0, 0.5, 1.0], 0.5, layers=(0, 2), heads=(1,), reference="token"),
    Edit("value.full", [[0.0, 1.0, 1.0, 0.5]] * 3),
    Edit("residual.block", -1.0, 2.0),
]


@pytest.mark.parametrize("change", EDITS, ids=[e.site for e in EDITS])
def test_an_edit_goes_through_json(change: Edit, tmp_path) -> None:
    change.save(tmp_path / "edit.json")
    assert Edit.load(tmp_path / "edit.json") == change
    model, ids = tiny.tiny("llama"), tiny.tokens(1, 12)
    with perpend.edit(model, change) as used:
        found = logits(model, ids)
    assert used is change
    with perpend.edit(model, json.loads(change.to_json())):
        assert torch.equal(logits(model, ids), found)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "JSON object"),
        ("{}", "needs a `site`"),
        ('{"site": "value.ful"}', "did you mean 'value.full'"),
        ('{"site": "value.full", "paralel": 0}', "did you mean 'parallel'"),
        ('{"site": "value.full", "parallel": NaN}', "not finite"),
        ('{"site": "residual.attn", "heads": [0]}', "has no heads"),
        ('{"site": "residual.attn", "parallel": [[0.0]]}', "at most layers"),
        ('{"site": "value.full", "reference": "tokens"}', "did you mean 'token'"),
        ('{"site": "value.full", "parallel": "0"}', "is a number, a list by layer"),
        ('{"site": "value.full", "parallel": [[1], [1, 2]]}', "lists of one length"),
        ('{"site": "value.full", "layers": [1.5]}', "list of whole numbers"),
        ('{"site": "value.full", "layers": []}', "leave it out for all layers"),
        ('{"site": 3}', "`site` is one of"),
    ],
)
def test_json_that_is_no_edit_says_why(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Edit.from_json(text)


def test_a_file_that_is_not_there_says_so(tmp_path) -> None:
    with pytest.raises(InputError, match="cannot read the edit"):
        Edit.load(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"site": "value.full", "parallel": 0.0, "layers": [3]}, "layer 3 is out of range"),
        ({"site": "residual.mlp", "parallel": 0.0, "layers": [-1]}, "layer -1 is out of range"),
        ({"site": "value.full", "parallel": 0.0, "heads": [4]}, "heads 0 to 3"),
        ({"site": "value.full"}, "without a scale changes nothing; give parallel=0.0"),
        ({"site": "value.ful"}, "did you mean 'value.full'"),
        ({"site": "value.full", "parallel": [0.0, 1.0]}, "2 layers and the model 3"),
        ({"site": "value.full", "parallel": [[0.0]] * 3}, "1 heads and the layer 4"),
        ({"site": "value.full", "parallel": 0.0, "tokens": torch.ones(1, 4)}, "boolean mask"),
    ],
)
def test_an_edit_that_does_not_fit_the_model_is_refused(options: dict, message: str) -> None:
    with pytest.raises(InputError, match=message), perpend.edit(tiny.tiny("llama"), **options):
        pass


def test_cross_attention_is_no_site_and_refused_by_name() -> None:
    model = t5()
    names = [site.name for site in attention_sites(model)]
    assert names
    assert not any("EncDecAttention" in name for name in names)
    outside = perpend.edit(model, "value.full", 0.0, layers=[len(names)])
    with pytest.raises(InputError, match="EncDecAttention and 1 more are cross-attention"), outside:
        pass
    with pytest.raises(InputError, match="cross-attention cannot be edited"):
        Edit("value.cross")
    inputs = {"input_ids": tiny.tokens(1, 8), "decoder_input_ids": tiny.tokens(1, 5)}
    plain = logits(model, **inputs)
    for site in VALUE_SITES:
        with perpend.edit(model, site, 0.0):
            assert not torch.equal(logits(model, **inputs), plain)


def test_an_edit_given_whole_takes_no_scale_beside_it() -> None:
    model = tiny.tiny("llama")
    for whole in (Edit("value.full", 0.5), {"site": "value.full", "parallel": 0.5}):
        for more in ({"parallel": 0.0}, {"layers": [0]}, {"reference": "token"}):
            with pytest.raises(InputError, match="given whole"), perpend.edit(model, whole, **more):
                pass


def test_scales_beyond_float32_and_files_that_are_no_text_are_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="float32's largest"):
        Edit("residual.mlp", 1e39)
    (tmp_path / "e.json").write_bytes(b"\xff\xfe\x00{")
    with pytest.raises(InputError, match="is no text"):
        Edit.load(tmp_path / "e.json")
