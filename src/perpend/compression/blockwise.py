"""Compress a model block by block with constant memory.

The convention is that of the Wanda and AWQ reference code: the calibration inputs enter the first block once;
each block is measured uncompressed on what comes out of the *compressed* blocks before it (sequential
propagation), then compressed, then run again to carry the stream on. Only the stream of the calibration text
and one block's statistics exist at a time. Methods without needs (rtn, magnitude) see no text at all.
"""

from __future__ import annotations

import fnmatch
import hashlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from perpend.batching import batches
from perpend.compression.matrices import Matrix, block_matrices
from perpend.compression.method import Regime
from perpend.compression.method import regime as read_regime
from perpend.compression.observe import observe
from perpend.compression.replay import Replay, capture
from perpend.compression.statistics import Statistics, check_double
from perpend.errors import InputError, PerpendError, unknown_name
from perpend.models.limits import check_ids
from perpend.models.placement import held
from perpend.models.stream import Block, blocks, contributions
from perpend.progress import Progress, silent

Plan = Mapping[tuple[int, str], Mapping[str, Any]]  # (layer, part) -> settings that differ there

CONVENTION = "sequential: each block is measured on the output of the compressed blocks before it"


@dataclass
class Calibrated:
    """One block, uncompressed, with what the calibration text says of it. Methods change it in place."""

    model: nn.Module = field(repr=False)
    block: Block
    matrices: tuple[Matrix, ...]
    statistics: dict[str, Statistics]
    replays: Sequence[Replay] = field(repr=False)  # one per batch
    hidden: Sequence[Tensor] = field(repr=False)  # the stream entering the block, one [batch, T, d] per batch
    updates: dict[str, list[Tensor]] = field(
        default_factory=dict, repr=False
    )  # uncompressed, part -> batches
    warnings: list[str] = field(default_factory=list)

    @property
    def layer(self) -> int:
        return self.block.index

    def run(self, batch: int, visit: Any = None) -> Tensor:
        """The block's output for one calibration batch; `visit` sees its contributions."""
        if visit is None:
            return self.replays[batch].run(self.layer, self.hidden[batch])
        with contributions(self.model, visit, parts=("attn", "mlp"), layers=[self.layer]):
            return self.replays[batch].run(self.layer, self.hidden[batch])


@dataclass(frozen=True, repr=False)
class Compression:
    """What was done to a model. bytes, dense_bytes: of the compressed matrices alone, dense at 16 bits."""

    regime: Regime
    facts: dict[str, dict[str, Any]]
    left: dict[str, str]
    warnings: tuple[str, ...]
    bytes: float
    dense_bytes: float
    calibration: dict[str, Any] | None

    def __repr__(self) -> str:
        masked = "" if self.zeros is None else f", {self.zeros:.1%} of their weights masked"
        warned = f", {len(self.warnings)} warnings" if self.warnings else ""
        return (
            f"Compression({self.regime.name}: {len(self.facts)} matrices, {self.bytes:,.0f} bytes of "
            f"{self.dense_bytes:,.0f} at 16 bits{masked}, {len(self.left)} left as they were{warned}; "
            "facts, left, warnings, results)"
        )

    @property
    def zeros(self) -> float | None:
        """Share of the compressed weights that are masked; None for a quantization."""
        counted = [f for f in self.facts.values() if "zeros" in f]
        return sum(f["zeros"] for f in counted) / sum(f["of"] for f in counted) if counted else None

    @property
    def results(self) -> dict[str, Any]:
        """For run.json."""
        return {
            "name": self.regime.name,
            **self.regime.described,
            "bytes": self.bytes,
            "dense_bytes": self.dense_bytes,
            "sparsity": self.zeros,
            "matrices": len(self.facts),
            "left": self.left,
            "warnings": list(self.warnings),
            "calibration": self.calibration,
            "propagation": CONVENTION if self.calibration else "none: the method reads no text",
        }


@torch.no_grad()
def compress(
    model: nn.Module,
    tokens: Tensor | None,
    regime: str | Regime,
    *,
    batch: int = 4,
    layers: Sequence[int] | None = None,
    plan: Plan | None = None,
    keep: Sequence[str] = (),
    progress: Progress = silent,
) -> Compression:
    """Compress a model's block matrices in place (embeddings and head are never touched).

    tokens: calibration sequences [n, T]; None for methods that read none. regime: see `method.regime`.
    layers: block indices to compress, the others only carry the stream. plan: settings per (layer, part).
    keep: shell patterns of matrices to leave. The model is checked as a whole before anything is changed;
    InputError: a width that a pattern or group does not divide, a tensor of unknown layout, both by name.
    """
    regime = read_regime(regime)
    found = blocks(model)
    chosen, work, left, settings_of = _checked(model, regime, layers, plan, keep)
    reads = bool(regime.method.needs) or regime.repair is not None
    if reads and tokens is None:
        raise InputError(f"{regime.name} needs calibration text: pass tokens")
    if reads:
        check_ids(model, tokens)
    size = sum(regime.method.bytes(m, settings_of(m)) for some in work.values() for m in some)
    dense = sum(2.0 * m.weight.numel() for some in work.values() for m in some)
    replays = [capture(model, part) for part in batches(tokens, batch)] if reads else []
    hidden = [r.hidden for r in replays]
    facts: dict[str, dict[str, Any]] = {}
    notes: list[str] = []
    with progress(len(found), "blocks", f"compress {regime.name}") as advance:
        for block in found:
            with held(block.module, write=block.index in work):
                if block.index in work:
                    # looked up again: the weights of a block that was out of memory are other objects now
                    matrices = _matrices(model, found, [block.index], keep)[0][block.index]
                    job = _calibrate(model, block, matrices, replays, hidden, regime)
                    for name, more in regime.method.compress(job, settings_of).items():
                        facts.setdefault(name, {}).update(more)
                    if regime.repair is not None:
                        for name, more in regime.repair.fit(job, regime.repair_settings).items():
                            facts.setdefault(name, {})[regime.repair.name] = more
                    notes += job.warnings
                    del job
                if replays and block.index < chosen[-1]:
                    for i, replay in enumerate(replays):
                        hidden[i] = replay.run(block.index, hidden[i])
            advance(1)
    size += sum(f.get("extra_bytes", 0) for f in facts.values())
    for note in notes:
        warnings.warn(note, stacklevel=2)
    return Compression(
        regime, facts, left, tuple(notes), size, dense, describe_calibration(tokens) if reads else None
    )


def check(
    model: nn.Module,
    regime: str | Regime,
    *,
    layers: Sequence[int] | None = None,
    plan: Plan | None = None,
    keep: Sequence[str] = (),
) -> None:
    """InputError, naming the matrix, for whatever `compress` would refuse."""
    _checked(model, read_regime(regime), layers, plan, keep)


def _checked(
    model: nn.Module, regime: Regime, layers: Sequence[int] | None, plan: Plan | None, keep: Sequence[str]
) -> tuple[list[int], dict[int, tuple[Matrix, ...]], dict[str, str], Any]:
    """The layers and matrices to compress, what is left and why, and each matrix's settings."""
    check_double(model)
    found = blocks(model)
    chosen = list(range(len(found))) if layers is None else sorted({_layer(l, len(found)) for l in layers})
    if not chosen:
        raise InputError("no layer to compress")
    if model.training:
        raise InputError(
            "the model is in training mode: call model.eval() first, dropout would blur calibration"
        )
    if regime.repair is not None:
        regime.repair.check(regime.repair_settings)
    settings_of = _settings(regime, plan or {}, len(found))
    work, left = _matrices(model, found, chosen, keep)
    if not any(work.values()):
        raise InputError(f"nothing is left to compress with keep={list(keep)}; keep fewer matrices")
    for matrix in (m for some in work.values() for m in some):
        regime.method.check(matrix, settings_of(matrix))
    return chosen, work, left, settings_of


def describe_calibration(tokens: Tensor) -> dict[str, Any]:
    """Size and sha256 of calibration tokens (int64, little endian, row by row)."""
    data = tokens.cpu().contiguous().to(torch.int64).numpy().astype("<i8").tobytes()
    return {
        "sequences": tokens.shape[0],
        "length": tokens.shape[1],
        "tokens": tokens.numel(),
        "tokens_sha256": hashlib.sha256(data).hexdigest(),
    }


def compressible(model: nn.Module, *, keep: Sequence[str] = ()) -> dict[int, tuple[Matrix, ...]]:
    """Per layer, the matrices that methods may change."""
    found = blocks(model)
    return _matrices(model, found, range(len(found)), keep)[0]


def _matrices(
    model: nn.Module, found: Sequence[Block], chosen: Sequence[int], keep: Sequence[str]
) -> tuple[dict[int, tuple[Matrix, ...]], dict[str, str]]:
    work: dict[int, tuple[Matrix, ...]] = {}
    left: dict[str, str] = {}
    known = dict(model.named_parameters(remove_duplicate=False))
    names = [*known, *(name.removesuffix(".weight") for name in known)]
    for pattern in keep:
        if not fnmatch.filter(names, pattern):
            inside = (n for n in known if n.startswith(found[0].name) and known[n].ndim > 1)
            raise InputError(
                f"keep={pattern!r} matches no weight of the model; a name is such as "
                f"{next(inside, names[0]).removesuffix('.weight')}, and * stands for anything"
            )
    for index in chosen:
        block = found[index]
        own = block_matrices(block.module, index, prefix=block.name, attention=block.attention, keep=keep)
        work[index], left = own.matrices, {**left, **own.left}
    outside = {id(p): n for n, p in model.named_parameters(remove_duplicate=False) if not _within(n, found)}
    for matrix in (m for some in work.values() for m in some):
        if id(matrix.parameter) in outside:
            raise InputError(
                f"{matrix.name} shares its weights with {outside[id(matrix.parameter)]} outside the blocks; "
                f"leave it uncompressed with keep={matrix.name!r}"
            )
    return work, left


def _within(name: str, found: Sequence[Block]) -> bool:
    root = found[0].name.rsplit(".", 1)[0]
    return name.startswith(root + ".")


def _calibrate(
    model: nn.Module,
    block: Block,
    matrices: tuple[Matrix, ...],
    replays: Sequence[Replay],
    hidden: Sequence[Tensor],
    regime: Regime,
) -> Calibrated:
    needs = regime.method.needs
    job = Calibrated(model, block, matrices, {m.name: Statistics(m.width) for m in matrices}, replays, hidden)
    if not replays:
        return job
    wanted = regime.repair is not None or regime.settings.get("objective") == "update"
    job.updates = {"attn": [], "mlp": []} if wanted else {}

    def keep_update(seen: Any) -> None:
        job.updates[seen.part].append(seen.update.clone())

    def watch(matrix: Matrix, rows: Tensor, out: Tensor) -> None:
        job.statistics[matrix.name].add(rows, needs)

    with observe(matrices if needs else (), watch):
        for i in range(len(replays)):
            job.run(i, keep_update if wanted else None)
    if needs:
        for matrix in matrices:
            if job.statistics[matrix.name].tokens == 0:
                _unseen(matrix, job)
    return job


def _unseen(matrix: Matrix, job: Calibrated) -> None:
    if matrix.expert is None and ".experts." not in matrix.name:
        raise PerpendError(
            f"no product with {matrix.name} was seen while its block ran, so its inputs are unknown; "
            f"leave it uncompressed with keep={matrix.name!r}"
        )
    job.warnings.append(f"{matrix.name} saw no calibration token: compressed by its weights alone")


def _layer(index: int, count: int) -> int:
    if not -count <= index < count:
        raise InputError(f"layer {index} is outside the model's {count} layers")
    return index % count


def _settings(regime: Regime, plan: Plan, count: int) -> Any:
    for (layer, part), changes in plan.items():
        _layer(layer, count)
        if part not in ("attn", "mlp"):
            raise unknown_name("part of a plan", part, ("attn", "mlp"))
        for key in changes:
            if key not in regime.method.defaults:
                raise unknown_name(f"setting of {regime.method.name}", key, regime.method.defaults)

    def settings_of(matrix: Matrix) -> Mapping[str, Any]:
        return {**regime.settings, **plan.get((matrix.layer, matrix.part), {})}

    return settings_of
