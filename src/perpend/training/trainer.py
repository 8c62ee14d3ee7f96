"""The training loop: a variant of the decoder, on prepared tokens, by a recipe, in a folder that survives
kills.

A folder holds `settings.json` (what was asked), `log.jsonl` (the curve), `state.pt` (weights, optimizer,
counters: replaced atomically), `snapshots/step-…/` and `final/` (models that `perpend.load` and transformers
open). Running the same call again goes on from `state.pt`; on a CPU the curve is then the uninterrupted one,
bit for bit.
"""

from __future__ import annotations

import json
import math
import os
import pickle
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from perpend import distributed
from perpend.errors import InputError, PerpendError
from perpend.progress import Progress, note, silent
from perpend.runs import differences
from perpend.runs.files import TEMPORARY, explained, read_json, write_atomically
from perpend.training import parallel
from perpend.training.data import TokenData, batch_at
from perpend.training.export import export
from perpend.training.model import Shape, build
from perpend.training.recipe import Recipe, flops_per_token, peak_flops
from perpend.training.variants import apply_variant

if TYPE_CHECKING:
    import pandas as pd

# (steps done, model), called after each evaluation, to look at the model
Watch = Callable[[int, nn.Module], None]


@dataclass(frozen=True)
class Rhythm:
    """How often things happen, in steps; 0 is never, except that every run ends with an evaluation."""

    log: int = 10
    evaluate: int = 100
    sequences: int = 64  # of the validation stream, its first, in every evaluation
    save: int = 200
    snapshot: int = 0


@dataclass(frozen=True)
class Trained:
    """A finished training run."""

    folder: Path
    model_folder: Path
    log: pd.DataFrame  # step, tokens, seconds, cpu_seconds, loss (of the interval), valid_loss, lr, grad_norm

    @property
    def valid_loss(self) -> float:
        """The last evaluation, nats per token."""
        return float(self.log["valid_loss"].dropna().iloc[-1])


def train(
    shape: Shape,
    variant: str,
    data: TokenData,
    recipe: Recipe,
    out: str | Path,
    *,
    rhythm: Rhythm = Rhythm(),
    strategy: str = "ddp",
    tensorboard: bool = False,
    watch: Sequence[Watch] = (),
    progress: Progress = silent,
) -> Trained:
    """Trains one variant, or goes on with the run that `out` holds, or returns it where it is finished.

    Under torchrun every process calls this. Losses are means over tokens, in nats.

    Raises:
        InputError: `out` holds another run; the vocabulary or the context does not fit.
        PerpendError: the loss is not finite.
    """
    job = _Training(shape, variant, data, recipe, Path(out), rhythm, strategy, tensorboard, watch, progress)
    return job.run()


class _Training:
    def __init__(
        self,
        shape: Shape,
        variant: str,
        data: TokenData,
        recipe: Recipe,
        out: Path,
        rhythm: Rhythm,
        strategy: str,
        tensorboard: bool,
        watch: Sequence[Watch],
        progress: Progress,
    ) -> None:
        if data.vocab > shape.vocab or recipe.context > shape.context:
            raise InputError(
                f"the model has {shape.vocab} token ids and a context of {shape.context}; the data needs "
                f"{data.vocab} and the recipe {recipe.context}"
            )
        _check_streams(data, recipe.context)
        self.shape, self.variant, self.data, self.recipe = shape, variant, data, recipe
        self.out, self.rhythm, self.watch, self.progress = out, rhythm, watch, progress
        self.micro, self.passes = recipe.accumulation(distributed.world())
        self.device = parallel.device()
        self.settings = {
            "variant": variant,
            "shape": asdict(shape),
            "recipe": recipe.identity(),
            "evaluation": {"every": rhythm.evaluate, "sequences": rhythm.sequences},
            "data": data.identity(),
        }
        distributed.main_first(self._claim)

        model = apply_variant(build(shape, seed=recipe.seed), variant).to(self.device)
        if recipe.compile:
            model.compile()
        self.model = parallel.spread(model, strategy)
        self.optimizer = _adamw(self.model, recipe, fused=strategy == "ddp" or self.device.type == "cuda")
        self.step = 0
        self.clock = _Clock(self.device)
        self.pending = torch.zeros((), dtype=torch.float64, device=self.device)  # losses not yet logged
        self.logged = (0, 0.0)  # step and seconds of the last log line
        self.board = _board(out) if tensorboard and distributed.is_main() else None
        self.peak = peak_flops(torch.cuda.get_device_name()) if self.device.type == "cuda" else None

    def run(self) -> Trained:
        if not (self.out / "final" / "config.json").exists():
            self._restore()
            r = self.rhythm
            title = f"{self.variant}, seed {self.recipe.seed}"
            with self.progress(total=self.recipe.steps, description=title) as advance:
                advance(self.step)
                if r.snapshot and not self.step:
                    self._snapshot()
                while self.step < self.recipe.steps:
                    self.clock.start()
                    norm = self._one_step()
                    self.step += 1
                    end = self.step == self.recipe.steps
                    if _due(self.step, r.log) or end:
                        self._log(norm)
                    if _due(self.step, r.evaluate) or end:
                        self.clock.stop()
                        self._evaluate()
                    if _due(self.step, r.snapshot):
                        self.clock.stop()
                        self._snapshot()
                    if _due(self.step, r.save) or end:
                        self.clock.stop()
                        self._save()
                    advance(1)
            self._export(self.out / "final")
        if self.board is not None:
            self.board.close()
        return Trained(self.out, self.out / "final", read_log(self.out))

    def _one_step(self) -> Tensor:
        recipe = self.recipe
        rate = recipe.lr_at(self.step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        rows = batch_at(self.data.train, self.step, recipe.batch, recipe.context, recipe.seed)
        share = len(rows) // distributed.world()
        mine = torch.from_numpy(rows[distributed.rank() * share :][:share])
        for number, part in enumerate(mine.split(self.micro)):
            with parallel.last_pass(self.model, number == self.passes - 1):
                loss = self._loss(part) / self.passes
                loss.backward()
            self.pending += loss.detach()
        norm = parallel.clip_gradient(self.model, recipe.clip)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    def _loss(self, rows: Tensor) -> Tensor:
        rows = rows.to(self.device, non_blocking=True)
        low = self.recipe.dtype == "bfloat16"
        with torch.autocast(self.device.type, torch.bfloat16) if low else nullcontext():
            logits = self.model(rows[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())

    @torch.no_grad()
    def _evaluate(self) -> None:
        """The mean loss of the first `sequences` sequences of the validation stream."""
        stream, context, world = self.data.valid, self.recipe.context, distributed.world()
        count = min(self.rhythm.sequences, (len(stream) - 1) // context) // world
        if not count:
            raise InputError(
                f"{len(stream):,} validation tokens hold no {world} sequences of {context}, one for each "
                "process; shorten context=, or keep more with valid="
            )
        first = distributed.rank() * count
        starts = [i * context for i in range(first, first + count)]
        rows = torch.from_numpy(np.stack([stream[s : s + context + 1] for s in starts]).astype(np.int64))
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        self.model.eval()
        for part in rows.split(self.micro):
            total += self._loss(part).double() * len(part)
        self.model.train()
        loss = float(parallel.mean(total / count))
        self._write({"valid_loss": loss})
        for look in self.watch:
            look(self.step, self.model)

    def _log(self, norm: Tensor) -> None:
        since, before = self.logged
        steps = self.step - since
        loss = float(parallel.mean(self.pending)) / steps
        if not math.isfinite(loss):
            raise PerpendError(
                f"the loss of {self.variant} became {loss} before step {self.step}; "
                f"lower lr=, and start it again in another folder, out= ({self.out} keeps this one's)"
            )
        seconds = self.clock.now()[0]
        rate = steps * self.recipe.tokens_per_step / max(seconds - before, 1e-9)
        mfu = None
        if self.peak is not None and self.recipe.dtype == "bfloat16":
            mfu = rate * flops_per_token(self.shape) / (self.peak * distributed.world())
        norm, lr = float(norm), self.optimizer.param_groups[0]["lr"]
        self._write({"loss": loss, "lr": lr, "grad_norm": norm, "tokens_per_second": rate, "mfu": mfu})
        self.pending.zero_()
        self.logged = (self.step, seconds)

    def _write(self, values: dict[str, Any]) -> None:
        if not distributed.is_main():
            return
        seconds, cpu = self.clock.now()
        tokens = self.step * self.recipe.tokens_per_step
        line = {"step": self.step, "tokens": tokens, "seconds": seconds, "cpu_seconds": cpu, **values}
        with explained("write", self.out / "log.jsonl"), (self.out / "log.jsonl").open("a") as log:
            log.write(json.dumps(line) + "\n")
        if self.board is not None:
            for name in values:
                if values[name] is not None:
                    self.board.add_scalar(name, values[name], self.step)

    def _claim(self) -> None:
        """settings.json, or a refusal where the folder holds other ones."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "settings.json"
        settings = json.loads(json.dumps(self.settings))
        if path.exists():
            differ = differences(read_json(path), settings)
            if differ:
                told = "; ".join(f"{name}: it has {old}, you ask for {new}" for name, old, new in differ)
                raise InputError(f"{self.out} holds another training run ({told}); choose another folder")
        else:
            write_atomically(path, json.dumps(settings, indent=1))

    def _save(self) -> None:
        state = parallel.whole_state(self.model, self.optimizer)
        pending = float(parallel.mean(self.pending))
        if not distributed.is_main():
            return
        log = self.out / "log.jsonl"
        with log.open("rb") as file:
            os.fsync(file.fileno())
        state |= {
            "step": self.step,
            "clock": self.clock.now(),
            "pending": pending,
            "logged": self.logged,
            "log_bytes": log.stat().st_size,
        }
        path, temporary = self.out / "state.pt", self.out / f"{TEMPORARY}state.pt"
        with explained("write", path), temporary.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)

    def _restore(self) -> None:
        path, log = self.out / "state.pt", self.out / "log.jsonl"
        if not path.exists():
            distributed.main_first(lambda: log.unlink(missing_ok=True))
            return
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise PerpendError(
                f"{path} is damaged ({str(error).splitlines()[0]}); delete it, and this model starts again "
                "from its first step"
            ) from error
        parallel.restore(self.model, self.optimizer, state)
        self.step, self.logged = state["step"], tuple(state["logged"])
        self.clock = _Clock(self.device, *state["clock"])
        self.pending.fill_(state["pending"])
        distributed.main_first(lambda: os.truncate(log, state["log_bytes"]))
        note(f"{self.out}: going on at step {self.step} of {self.recipe.steps}")

    def _snapshot(self) -> None:
        self._export(self.out / "snapshots" / f"step-{self.step:07d}")

    def _export(self, folder: Path) -> None:
        weights = parallel.whole_weights(self.model)
        distributed.main_first(
            lambda: export(weights, self.shape, self.variant, folder, tokenizer=self.data.tokenizer_folder)
        )


class _Clock:
    """Seconds and processor seconds spent training: evaluations and checkpoints do not count."""

    def __init__(self, device: torch.device, seconds: float = 0.0, cpu: float = 0.0) -> None:
        self.device, self.total, self.began = device, (seconds, cpu), None

    def start(self) -> None:
        if self.began is None:
            self.began = self._read()

    def stop(self) -> None:
        self.total, self.began = self.now(), None

    def now(self) -> tuple[float, float]:
        if self.began is None:
            return self.total
        wall, cpu = self._read()
        return self.total[0] + wall - self.began[0], self.total[1] + cpu - self.began[1]

    def _read(self) -> tuple[float, float]:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter(), time.process_time()


def _check_streams(data: TokenData, context: int) -> None:
    """InputError, before the first step, where a part of the data holds no sequence."""
    for name, stream, remedy in (
        ("training", data.train, "give more text"),
        ("validation", data.valid, "keep more with valid=, or give more text"),
    ):
        if len(stream) < context + 1:
            raise InputError(
                f"{len(stream):,} {name} tokens hold no sequence of {context} and its target; shorten "
                f"context=, or {remedy}"
            )


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _adamw(model: nn.Module, recipe: Recipe, fused: bool) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    decayed = [p for name, p in named if p.dim() > 1 and ".scale." not in name]
    kept = [p for name, p in named if not (p.dim() > 1 and ".scale." not in name)]
    groups = [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2), fused=fused)


def _board(out: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise PerpendError("tensorboard=True needs `pip install perpend[train]`") from error
    return SummaryWriter(out / "tensorboard")


def read_log(folder: str | Path) -> pd.DataFrame:
    """The curve of a training folder: a row a line of log.jsonl."""
    import pandas as pd

    path = Path(folder) / "log.jsonl"
    with explained("read", path), path.open(encoding="utf-8") as lines:
        return pd.DataFrame([json.loads(line) for line in lines])
