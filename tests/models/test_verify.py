"""Every check on every tiny family, and for every check a fault that it must catch."""

from __future__ import annotations

import dataclasses
from contextlib import contextmanager

import pytest
import torch
import transformers as t
from test_families import more

import tiny
from perpend.errors import InputError
from perpend.models import checks, inputs
from perpend.models.checks import CHECKS
from perpend.models.families import known
from perpend.models.layout import family_or_none
from perpend.models.stream import contributions
from perpend.models.verify import verify

NAMES = [check.title for check in CHECKS]


def outcome(model, *names: str, **more_options) -> dict[str, str]:
    rows = verify(model, only=names or None, **more_options).rows
    return {row.name: row.status for row in rows}


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_every_family_passes(name):
    verification = verify(tiny.tiny(name))
    assert verification.passed, str(verification)
    assert [row.name for row in verification.rows] == NAMES
    skipped = {row.name for row in verification.rows if row.status == "skipped"}
    if name in tiny.CAUSAL:
        assert skipped <= {"decode = prefill, static cache"}
    else:
        assert skipped == {
            row for row in NAMES if "decode" in row or (name in tiny.VISION and "padded" in row)
        }
    assert all(row.detail for row in verification.rows if row.status == "skipped")


@pytest.mark.parametrize("name", ["distilbert", "roberta", "gpt1", "albert", "cohere", "mixtral"])
def test_families_beyond_pass_or_say_what_does_not_apply(name):
    verification = verify(more(name))
    assert verification.passed, str(verification)


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral", "bert"])
def test_a_model_without_its_head_passes_too(name):
    verification = verify(tiny.tiny(name).base_model)
    assert verification.passed, str(verification)


def test_windows_on_both_sides_are_left_to_the_other_checks():
    from transformers import ModernBertConfig, ModernBertForMaskedLM

    torch.manual_seed(0)
    config = ModernBertConfig(
        **{**tiny._SMALL, "num_key_value_heads": None}, local_attention=16, global_attn_every_n_layers=3,
        cls_token_id=1, sep_token_id=2,
    )  # fmt: skip
    verification = verify(ModernBertForMaskedLM(config).eval())
    assert verification.passed, str(verification)


def test_static_caches_are_really_tried():
    with_static = [
        name
        for name in ("llama", "gpt2", "gemma3", "qwen3", "olmo2")
        if outcome(tiny.tiny(name), "decode = prefill, static cache")
        == {"decode = prefill, static cache": "ok"}
    ]
    assert "llama" in with_static
    assert len(with_static) >= 3


def test_half_precision_is_held_to_its_own_tolerance():
    verification = verify(tiny.build("llama").to(torch.bfloat16))
    assert verification.passed, str(verification)
    for name in ("bert", "granite"):
        double = verify(tiny.build(name).double())
        assert double.passed, str(double)
    assert max(row.tolerance for row in double.rows if row.name.startswith("decode")) <= 1e-8


def test_without_an_adapter_the_rest_is_still_proved():
    torch.manual_seed(0)
    config = t.XGLMConfig(vocab_size=tiny.VOCAB, d_model=32, ffn_dim=48, num_layers=3, attention_heads=4)
    verification = verify(t.XGLMForCausalLM(config).eval())
    status = {row.name: row.status for row in verification.rows}
    assert status["stream adds up"] == "skipped"
    assert status["observing is bit-exact"] == "ok"
    assert verification.passed, str(verification)


def test_the_result_as_text_table_and_numbers():
    verification = verify(tiny.tiny("qwen3_next"), only=["aggregate to contribution", "padded = unpadded"])
    text = str(verification)
    assert "all checks passed" in text
    assert "linear attention have no rows" in text
    assert list(verification.table["check"]) == ["aggregate to contribution", "padded = unpadded"]
    assert verification.results["passed"] is True
    assert verification.results["checks"]["padded = unpadded"]["status"] == "ok"
    assert "aggregate" in verification._repr_html_()


def test_wrong_requests_are_named():
    with pytest.raises(InputError, match="did you mean 'padded = unpadded'"):
        verify(tiny.tiny("llama"), only=["padded = unpaded"])
    with pytest.raises(InputError, match=r"call model.eval\(\)"):
        verify(tiny.build("gpt2").train())


def with_record(monkeypatch, name: str, **changes) -> torch.nn.Module:
    model = tiny.build(name)
    own = family_or_none(model)
    records = tuple(dataclasses.replace(r, **changes) if r is own else r for r in known())
    monkeypatch.setattr("perpend.models.layout.known", lambda: records)
    return model


def test_a_wrong_adapter_fails(monkeypatch):
    model = with_record(monkeypatch, "gemma3", mlp_update="mlp")
    verification = verify(model, only=["stream adds up"])
    assert not verification.passed
    assert "does not fit this model" in verification.failures[0].detail
    assert "FAILED" in str(verification)


def test_a_forgotten_gate_fails(monkeypatch):
    model = with_record(monkeypatch, "qwen3_next", gate="")
    assert outcome(model, "aggregate to contribution") == {"aggregate to contribution": "failed"}


def test_a_wrong_self_weight_fails(monkeypatch):
    own = checks.self_weight
    monkeypatch.setattr(checks, "self_weight", lambda call: own(call) * 1.01)
    assert outcome(tiny.tiny("llama"), "self message apart") == {"self message apart": "failed"}


def test_a_wrong_log_sum_exp_fails(monkeypatch):
    from perpend.models.attention import fused

    own = fused.log_sum_exp
    monkeypatch.setattr(fused, "log_sum_exp", lambda call: own(call) + 0.01)
    assert outcome(tiny.tiny("gpt2"), "rows sum to one") == {"rows sum to one": "failed"}


def test_a_forgotten_learned_sink_fails(monkeypatch):
    own = checks.row_logits

    def forgets(call):
        object.__setattr__(call, "sinks", None)
        return own(call)

    monkeypatch.setattr(checks, "row_logits", forgets)
    assert outcome(tiny.tiny("gpt_oss"), "self message apart") == {"self message apart": "failed"}


def test_a_window_off_by_one_fails(monkeypatch):
    own = checks.attach

    @contextmanager
    def shifted(model, hook, **options):
        def look(call, output):
            window = call.site.window
            site = dataclasses.replace(call.site, window=window and window + 1)
            return hook(dataclasses.replace(call, site=site), output)

        with own(model, look, **options) as sites:
            yield sites

    monkeypatch.setattr(checks, "attach", shifted)
    assert outcome(tiny.tiny("mistral"), "sinks and windows") == {"sinks and windows": "failed"}


def test_an_observer_that_touches_something_fails(monkeypatch):
    own = checks.contributions

    def touches(model, visit, **options):
        return own(model, lambda c: c.update * 1.0000002, **options)

    monkeypatch.setattr(checks, "contributions", touches)
    assert outcome(tiny.tiny("llama"), "observing is bit-exact") == {"observing is bit-exact": "failed"}


def test_an_edit_that_never_acts_fails(monkeypatch):
    @contextmanager
    def idle(model, site, **scales):
        yield

    monkeypatch.setattr(checks, "edit", idle)
    assert outcome(tiny.tiny("llama"), "no-op edit is bit-exact") == {"no-op edit is bit-exact": "failed"}


def test_an_edit_of_the_prompt_alone_fails(monkeypatch):
    """The edit acts in prefill and not in decoded tokens."""

    @contextmanager
    def prompt_only(model, site, **scales):
        def visit(c):
            return 0.9 * c.update if c.update.shape[1] > 1 else None

        with contributions(model, visit, parts="attn"):
            yield

    monkeypatch.setattr(checks, "edit", prompt_only)
    title = "decode = prefill, dynamic cache"
    assert outcome(tiny.tiny("llama"), title) == {title: "failed"}


def test_padding_without_positions_fails(monkeypatch):
    monkeypatch.setattr(inputs, "_counts_its_padding", lambda model: True)
    assert outcome(tiny.tiny("gpt2"), "padded = unpadded") == {"padded = unpadded": "failed"}


def test_a_model_whose_sequences_meet_fails():
    model = tiny.build("llama")
    model.model.layers[1].mlp.register_forward_hook(lambda m, a, out: out + 0.01 * out.mean(0, keepdim=True))
    assert outcome(model, "batch of 1 = batch of 8") == {"batch of 1 = batch of 8": "failed"}


def test_a_context_that_leaves_a_hook_behind_fails(monkeypatch):
    model, own = tiny.build("llama"), checks.contributions

    @contextmanager
    def leaks(model, visit, **options):
        model.model.norm.register_forward_hook(lambda m, a, out: out * 1.01)
        with own(model, visit, **options) as watched:
            yield watched

    monkeypatch.setattr(checks, "contributions", leaks)
    assert outcome(model, "restored after an error") == {"restored after an error": "failed"}


def test_a_stream_that_is_not_finite_fails():
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[0, 0] = float("nan")
    assert "failed" in outcome(model, "observing is bit-exact").values()


def test_images_and_tokens_can_be_given():
    assert verify(tiny.tiny("vit"), tokens=tiny.pixels(3), only=["stream adds up"]).passed
    assert verify(tiny.tiny("bloom"), tokens=tiny.tokens(8, 30), only=["padded = unpadded"]).passed
