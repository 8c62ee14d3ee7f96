"""The monitor: it changes nothing, costs what it may, and tells a sink from content."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tiny
from perpend import survey_attention
from perpend.errors import InputError
from perpend.studies.checkpoints import FIELDS
from perpend.training.monitor import Monitor, MonitorCallback, unwrapped, watch


def tokens(count: int = 4, length: int = 24, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, tiny.VOCAB, (count, length), generator=torch.Generator().manual_seed(seed))


def trained(monitor: Monitor | None, steps: int = 4) -> torch.nn.Module:
    """A few steps with dropout: random numbers are drawn, so that one more draw would show."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=tiny.VOCAB, n_embd=32, n_layer=3, n_head=4, n_positions=64)
    ).train()
    model.transformer.h[0].mlp.eval()  # a part that its owner keeps frozen
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        rows = tokens(seed=step + 5)
        model(rows, labels=rows).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor(step, model)
    return model


def test_training_is_the_same_with_and_without_it() -> None:
    monitor = Monitor(tokens(), every=1, most=None, window=8)
    watched, alone = trained(monitor), trained(None)
    assert len(monitor.readings) == 4
    for one, other in zip(watched.parameters(), alone.parameters()):
        assert torch.equal(one, other)
    assert watched.training
    assert not watched.transformer.h[0].mlp.training
    assert not any(module._forward_hooks for module in watched.modules())


def test_a_reading_is_the_survey_and_its_changes_add_up() -> None:
    monitor = Monitor(tokens(), every=2, most=None, window=8)
    model = trained(monitor, steps=3)
    first, last = monitor.readings
    assert (first.step, last.step) == (0, 2)
    model.eval()
    expected = survey_attention(model, tokens(), window=8).per_layer()
    np.testing.assert_allclose(last.layers[:, FIELDS.index("total")], expected["total"], rtol=1e-12)
    np.testing.assert_allclose(last.layers[:, FIELDS.index("sink_mass")], expected["row_mass"], rtol=1e-12)
    changes = last.changes
    parts = ("binary", "sink_growth", "content_change", "covariance")
    np.testing.assert_allclose(sum(changes[name] for name in parts), changes["total"], atol=1e-9)
    moved = last.layers[:, FIELDS.index("total")] - first.layers[:, FIELDS.index("total")]
    np.testing.assert_array_equal(changes["total"], moved)
    assert np.abs(moved).max() > 1e-6
    logs = last.logs
    assert logs["attention/layer_1/change_total"] == changes["total"][1]
    assert logs["attention/content"] == pytest.approx(expected["content"].mean())
    assert "attention/layer_0/change_total" not in first.logs


def test_it_tells_a_growing_sink_from_narrowing_content() -> None:
    model = tiny.build("gpt_oss")
    monitor = Monitor(tokens(), window=8, most=None, sink="virtual")
    monitor.read(0, model)
    with torch.no_grad():  # the learned sink's logits alone: no content logit of the first layer moves
        for layer in model.model.layers:
            layer.self_attn.sinks += 6
    assert ": sink (" in monitor.read(1, model).sentence

    model = tiny.build("llama")
    monitor = Monitor(tokens(), window=8, most=None)
    monitor.read(0, model)
    with torch.no_grad():  # sharper queries: every logit grows
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight *= 200
    assert ": content (" in monitor.read(1, model).sentence


def test_readings_stay_below_their_share_of_the_time(capsys) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 0.25  # every look at the clock; a reading takes two, and so at least 0.25 s
        return now[0]

    model = tiny.tiny("llama")
    monitor = Monitor(tokens(1), every=1, most=0.02, window=8, clock=clock)
    for step in range(400):
        monitor(step, model)
        now[0] += 0.5
    assert len(monitor.readings) > 3
    assert monitor.cost < 0.03
    assert Monitor(tokens(1), every=1, most=None, window=8)(0, model) is not None


def test_a_trainer_logs_it(tmp_path) -> None:
    pytest.importorskip("accelerate", reason="transformers' Trainer needs accelerate")
    from transformers import Trainer, TrainingArguments

    rows = tokens(16)
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        str(tmp_path), max_steps=4, per_device_train_batch_size=2, report_to=[], use_cpu=True,
        disable_tqdm=True, save_strategy="no", logging_steps=2,
    )  # fmt: skip
    trainer = Trainer(tiny.build("llama"), arguments, train_dataset=data)
    monitor = watch(trainer, tokens(), every=2, most=None, window=8)
    trainer.train()
    steps = [entry["step"] for entry in trainer.state.log_history if "attention/content" in entry]
    assert steps == [0, 2, 4]
    assert [reading.step for reading in monitor.readings] == [0, 2, 4]


def test_without_a_trainer_the_callback_writes_the_history() -> None:
    from types import SimpleNamespace

    state = SimpleNamespace(global_step=0, log_history=[])
    callback = MonitorCallback(Monitor(tokens(), every=2, window=8, most=None))
    model = tiny.tiny("llama")
    callback.on_train_begin(None, state, None, model=model)
    for step in (1, 2):
        state.global_step = step
        callback.on_step_end(None, state, None, model=model)
    assert [entry["step"] for entry in state.log_history] == [0, 2]


def test_wrapped_and_sharded_models() -> None:
    model = tiny.tiny("llama")
    assert unwrapped(torch.compile(model)) is model

    class FlatParameter(torch.nn.Parameter):
        pass

    sharded = torch.nn.Linear(2, 2)
    sharded.weight = FlatParameter(torch.zeros(2, 2))
    with pytest.raises(InputError, match="sharded"):
        unwrapped(sharded)


def test_arguments_that_make_no_monitor() -> None:
    with pytest.raises(InputError, match="at least 1"):
        Monitor(tokens(), every=0)
    with pytest.raises(InputError, match="between 0 and 1"):
        Monitor(tokens(), most=2.0)


def test_perpends_own_decoder_is_read_while_it_trains() -> None:
    from perpend.training.model import build
    from perpend.training.variants import apply_variant

    for variant in ("baseline", "residual"):
        model = build("tiny", vocab=tiny.VOCAB)
        apply_variant(model, variant)
        reading = Monitor(tokens(2), window=8)(0, model)
        assert reading is not None
        assert len(reading.indices) == model.shape.layers
        parts = dict(zip(FIELDS, reading.means))
        assert parts["total"] == pytest.approx(parts["binary"] + parts["weighted_content"], abs=1e-6)
