"""Attention watched while a model trains: is a falling entropy the sink that grows, or content that narrows?

    monitor = Monitor(tokens, every=100)             # a few held-out sequences, [n, T]
    for step in range(steps):
        ...
        reading = monitor(step, model)               # None between readings
        if reading: log(reading.logs)

    watch(trainer, tokens, every=100)                # a transformers Trainer; its own log takes it further
    train(..., watch=[monitor])                      # perpend's own, at evaluations

A reading runs the held-out sequences without the language-model head and without gradients, draws no random
number and leaves every module's mode as it was: the training is the same, bit for bit, with and without it.

Source: the split of `perpend.studies.checkpoints`, layer by layer, between two readings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers.trainer_callback import TrainerCallback

from perpend import distributed
from perpend.errors import InputError
from perpend.progress import note
from perpend.studies.checkpoints import FIELDS, measure, sentence, split
from perpend.surveys.attention import survey_attention

LOGGED = ("sink_mass", "total", "content", "dispersion")
CHANGES = ("total", "binary", "sink_growth", "content_change", "covariance")


@dataclass(frozen=True)
class Reading:
    """One look at a model in training.

    `layers`: (layers, FIELDS), means over rows and heads, in nats, NaN for a layer without rows. `changes`:
    `split` of each layer since the reading before, name → (layers,); empty at the first. `sentence`: whether
    the entropy has fallen since it was highest, and through what. `seconds`: what the reading took.
    """

    step: int
    layers: np.ndarray
    indices: tuple[int, ...]
    changes: dict[str, np.ndarray]
    sentence: str
    seconds: float

    @property
    def means(self) -> np.ndarray:
        """FIELDS, means over layers."""
        return np.nanmean(self.layers, axis=0)

    @property
    def logs(self) -> dict[str, float]:
        """Flat numbers for a logger: `attention/content`, `attention/layer_3/content`, `…/change_total`."""
        found: dict[str, float] = {}
        means = self.means
        for name in LOGGED:
            at = FIELDS.index(name)
            found[f"attention/{name}"] = float(means[at])
            for layer, value in zip(self.indices, self.layers[:, at]):
                if np.isfinite(value):
                    found[f"attention/layer_{layer}/{name}"] = float(value)
        for name in CHANGES if self.changes else ():
            for layer, value in zip(self.indices, self.changes[name]):
                if np.isfinite(value):
                    found[f"attention/layer_{layer}/change_{name}"] = float(value)
        return found


class Monitor:
    """A function of (step, model) that reads the model's attention every `every` steps.

    tokens: held-out ids [n, T]; a handful of sequences (4 of 128) is enough to see a sink grow.
    every: steps between readings. most: share of the running time that readings may take; where one would
    exceed it, it is left out and said once. None reads at every `every` steps whatever it costs, as do
    several processes, which must agree on when. With several processes each must call the monitor.
    window, sink, queries, batch: as in `survey_attention`.
    """

    def __init__(
        self,
        tokens: Tensor,
        *,
        every: int = 100,
        most: float | None = 0.02,
        window: int | None = None,
        sink: str | int | Sequence[int] = "first",
        queries: tuple[int, int] | None = None,
        batch: int = 8,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        if every < 1:
            raise InputError(f"every is a number of steps, at least 1, not {every}")
        if most is not None and not 0 < most <= 1:
            raise InputError(f"most is a share of the running time between 0 and 1, not {most}")
        self.tokens, self.every, self.most, self.clock = tokens, every, most, clock
        self.options = dict(window=window, sink=sink, queries=queries, batch=batch)
        self.readings: list[Reading] = []
        self.spent = 0.0
        self._began: float | None = None
        self._told = False

    @property
    def cost(self) -> float:
        """Share of the time since the first call that readings took."""
        elapsed = 0.0 if self._began is None else self.clock() - self._began
        return self.spent / elapsed if elapsed > 0 else 0.0

    def __call__(self, step: int, model: nn.Module) -> Reading | None:
        if self._began is None:
            self._began = self.clock()
        if step % self.every or not self._affordable():
            return None
        return self.read(step, model)

    def read(self, step: int, model: nn.Module) -> Reading:
        """A reading now, due or not."""
        began = self.clock()
        if self._began is None:
            self._began = began
        inner = unwrapped(model)
        with as_evaluated(inner):
            survey = survey_attention(
                inner, self.tokens, block=len(self.tokens), sample=0, importance=False, **self.options
            )
        found = measure(survey, name=f"step {step}", weights="", step=step, replicates=0)
        layers = found.layers[list(FIELDS)].to_numpy(np.float64)
        changes = split(self.readings[-1].layers, layers) if self.readings else {}
        seconds = self.clock() - began
        self.spent += seconds
        indices = tuple(int(layer) for layer in found.layers["layer"])
        reading = Reading(step, layers, indices, changes, self._said(layers), seconds)
        self.readings.append(reading)
        return reading

    def _said(self, layers: np.ndarray) -> str:
        if not self.readings:
            return "entropy: first reading"
        peak = max(self.readings, key=lambda reading: reading.means[FIELDS.index("total")])
        change = split(peak.means, np.nanmean(layers, axis=0))
        return f"since step {peak.step}, {sentence({name: float(v) for name, v in change.items()})}"

    def _affordable(self) -> bool:
        if self.most is None or distributed.world() > 1 or not self.readings:
            return True
        if self.spent <= self.most * (self.clock() - self._began):
            return True
        if not self._told:
            self._told = True
            note(
                f"attention is read less often than every {self.every} steps, to stay below {self.most:.0%} "
                "of the running time (most=None reads at every one)"
            )
        return False


class MonitorCallback(TrainerCallback):
    """A `Monitor` in a transformers Trainer; `watch(trainer, tokens)` makes and adds one.

    With `trainer` a reading goes through the Trainer's own log, and so to whatever it reports to. Without,
    it goes into `state.log_history`. The sentence goes to stderr.
    """

    def __init__(self, monitor: Monitor, trainer: Any = None) -> None:
        self.monitor, self.trainer = monitor, trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self._look(state, model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **more: Any) -> None:
        self._look(state, model)

    def _look(self, state: Any, model: Any) -> None:
        reading = self.monitor(state.global_step, model)
        if reading is None:
            return
        if self.trainer is not None:
            self.trainer.log(reading.logs)
        else:
            state.log_history.append({**reading.logs, "step": state.global_step})
        if distributed.is_main():
            note(f"step {reading.step}: {reading.sentence}")


def watch(trainer: Any, tokens: Tensor, **options: Any) -> Monitor:
    """Adds a monitor to a transformers Trainer; `options` are those of `Monitor`. Returns the monitor."""
    monitor = Monitor(tokens, **options)
    trainer.add_callback(MonitorCallback(monitor, trainer))
    return monitor


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside torch.compile's and DistributedDataParallel's wrappers.

    Raises InputError for sharded parameters: a part of a model cannot be run on one process alone.
    """
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            break
        model = inner
    parameters = (type(value).__name__ for value in model.parameters())
    if any(name in ("DTensor", "FlatParameter") for name in parameters):
        raise InputError(
            "the monitor cannot read a model whose parameters are sharded (FSDP); train with "
            "DistributedDataParallel, or run perpend checkpoints on what is saved"
        )
    return model


@contextmanager
def as_evaluated(model: nn.Module) -> Iterator[None]:
    """Every module in evaluation mode, and back to its own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
