"""What does the loss do when the parallel or the perpendicular part is scaled, and beside what controls?

    base, found = sweep(model, windows, cells)   # each cell's loss, KL and top-1 agreement, per token
    study = edit_study(model, windows, cells)    # one row a cell, with paired intervals, and the basins

The unedited body runs once for all cells and its last hidden states are kept; GROUP cells at a time share the
unedited head. A cell costs one edited pass and 1/GROUP of a pass of the head.

Source: "Disentangling Representation Evolution in Transformers through Directional Decomposition", Section 6
(edits), and its "tolerance basin", here made a number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from perpend.batching import batches
from perpend.distributed import Store, direct, map_blocks
from perpend.errors import InputError
from perpend.evaluation.windows import Windows, as_windows
from perpend.models.controls import control
from perpend.models.edit import Edit, edit
from perpend.models.head import halves
from perpend.models.placement import input_device
from perpend.progress import Progress, silent
from perpend.report.notebook import Rich
from perpend.studies.resampling import draws

if TYPE_CHECKING:
    import pandas as pd

BASIN_TOLERANCES = (0.01, 0.05)  # nats
CHUNK = 512  # tokens whose two sets of logits exist at a time
GROUP = 4  # cells whose hidden states of one batch exist at a time, and that are stored together


@dataclass(frozen=True)
class Cell:
    """One point of a sweep: an edit, or with `control` its control of that kind. `compile` as in `edit`."""

    edit: Edit
    control: str | None = None
    seed: int = 0
    compile: bool = False

    @property
    def name(self) -> str:
        e = self.edit
        reference = f" {e.reference}" if e.site.startswith("value.") else ""
        name = f"{e.site}{reference} s∥={_short(e.parallel)} s⊥={_short(e.perpendicular)}"
        name += "".join(f" {what} {_listed(chosen)}" for what, chosen in self.chosen.items() if chosen)
        return f"{name} {self.control} control" if self.control else name

    @property
    def chosen(self) -> dict[str, tuple[int, ...] | None]:
        """The layers and heads that the edit is restricted to, None for all."""
        return {"layers": self.edit.layers, "heads": self.edit.heads}

    def applied(self, model: nn.Module) -> AbstractContextManager[Any]:
        """The context in which the model runs for this cell."""
        if self.control:
            return control(model, self.edit, self.control, self.seed)
        return edit(model, self.edit, compile=self.compile)


def _short(scale: Any) -> str:
    return f"{scale:g}" if isinstance(scale, (int, float)) else "by layer"


def _listed(indices: Sequence[int] | None) -> str | None:
    return None if indices is None else ",".join(map(str, indices))


@dataclass(frozen=True)
class Losses:
    """Per token [n, T − 1]: `loss` in nats; `kl` (base ‖ edited) in nats; `agreement` of the top token."""

    loss: Tensor
    kl: Tensor
    agreement: Tensor


def sweep(
    model: nn.Module,
    tokens: Tensor | Windows,
    cells: Sequence[Cell],
    *,
    batch: int = 4,
    store: Store = direct,
    progress: Progress = silent,
) -> tuple[Tensor, dict[str, Losses]]:
    """The unedited losses [n, T − 1] and each cell's, by its name.

    `tokens` [n, T] or Windows. Cells are stored in groups (`store`), so that a resumed sweep goes on.
    """
    windows = _all_scored(as_windows(tokens))
    names = [cell.name for cell in cells]
    if len(set(names)) != len(names):
        raise InputError(f"a sweep names a cell twice: {sorted({n for n in names if names.count(n) > 1})[0]}")
    total = len(cells) * windows.tokens.numel()
    with (
        torch.no_grad(),
        _base(model, windows, batch) as (hidden, base),
        progress(total=total, unit="tokens", description="edits") as done,
    ):

        def compute(index: int) -> dict[str, Tensor]:
            return _run(model, windows, groups[index], hidden, batch, done)

        groups = [cells[start : start + GROUP] for start in range(0, len(cells), GROUP)]
        stored = map_blocks(len(groups), compute, store=store, name="cells")
    found = {
        cell.name: Losses(*torch.as_tensor(measures))
        for group, one in zip(groups, stored)
        for cell, measures in zip(group, one["measures"])
    }
    return base, found


def _all_scored(windows: Windows) -> Windows:
    """Windows as the sweep reads them: every token but the first of each counts."""
    if not bool(windows.scored[:, 1:].all()):
        raise InputError(
            "a sweep scores every token but the first of each sequence, and these windows leave some out; "
            "give it sequences of one length, or take their perplexity under an edit with "
            "perpend.evaluation.perplexity"
        )
    return windows


@contextmanager
def _base(model: nn.Module, windows: Windows, batch: int) -> Iterator[tuple[list[Tensor], Tensor]]:
    """Last hidden states by batch, and the unedited losses."""
    parts, device = halves(model), input_device(model)
    hidden, losses = [], []
    for rows in batches(windows.tokens, batch):
        rows = rows.to(device)
        hidden.append(parts.trunk(rows[:, :-1]))
        losses.append(token_losses(model, hidden[-1], rows))
    yield hidden, torch.cat(losses)


def _run(
    model: nn.Module,
    windows: Windows,
    cells: Sequence[Cell],
    hidden: Sequence[Tensor],
    batch: int,
    done: Callable[[int], object],
) -> dict[str, Tensor]:
    """`measures` [cells, 3, n, T − 1]: loss, KL and agreement of the top token."""
    parts, device = halves(model), input_device(model)
    found: list[Tensor] = []
    for rows, plain in zip(batches(windows.tokens, batch), hidden):
        rows = rows.to(device)
        states = [plain]
        for cell in cells:
            with cell.applied(model):
                states.append(parts.trunk(rows[:, :-1]))
            done(rows.numel())

        def compare(together: Tensor, target: Tensor) -> tuple[Tensor, ...]:
            first, *others = (h.contiguous() for h in together.unbind(-1))
            log_p = torch.log_softmax(parts.head(first).float(), -1)
            p, top = log_p.exp(), log_p.argmax(-1)
            measures = []
            for other in others:
                log_q = torch.log_softmax(parts.head(other).float(), -1)
                loss = -log_q.gather(-1, target[..., None])[..., 0]
                agreement = (top == log_q.argmax(-1)).float()
                kl = torch.sub(log_p, log_q, out=log_q).mul_(p).nan_to_num_(0.0).sum(-1)
                measures += [loss, kl, agreement]
            return tuple(measures)

        columns = _map(torch.stack(states, -1), rows, compare)
        found.append(torch.stack(columns).unflatten(0, (len(cells), 3)))
    return {"measures": torch.cat(found, 2)}


def _map(hidden: Tensor, rows: Tensor, apply: Callable[..., tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """`apply(hidden, target)` on a few tokens at a time, joined along them, on the CPU."""
    step = max(1, CHUNK // len(rows))
    spans = [slice(a, a + step) for a in range(0, hidden.shape[1], step)]
    parts = [apply(hidden[:, span], rows[:, 1:][:, span]) for span in spans]
    return tuple(torch.cat(part, 1).cpu() for part in zip(*parts))


def token_losses(model: nn.Module, hidden: Tensor, rows: Tensor) -> Tensor:
    """Losses [n, T − 1] in nats of last hidden states [n, T − 1, d], by slices of the tokens."""
    head = halves(model).head
    return _map(hidden, rows, lambda h, target: (_loss(head(h).float(), target),))[0]


def _loss(logits: Tensor, target: Tensor) -> Tensor:
    return torch.logsumexp(logits, -1) - logits.gather(-1, target[..., None])[..., 0]


def summary(
    base: Tensor,
    found: Mapping[str, Losses],
    cells: Sequence[Cell],
    *,
    words: int | None = None,
    resamples: int = 1000,
    seed: int = 0,
) -> list[dict[str, Any]]:
    """One record a cell: loss, perplexities, paired change with its 95 % interval, KL, agreement.

    Losses in nats per token; agreement a fraction. `perplexity` is exp(nats per token) on these fixed windows
    (C4 style), `word_perplexity` exp(nats of all tokens / `words`), the whitespace words they spell (WikiText
    style); None without `words`. The first record is the unedited model.
    """
    unedited = base.double().mean().item()
    weights = draws(len(base), resamples, seed)

    def perplexities(loss: float) -> dict[str, float | None]:
        by_word = None if not words else _exp(loss * base.numel() / words)
        return {"perplexity": _exp(loss), "word_perplexity": by_word}

    records = [{"site": "unedited", "loss": unedited, **perplexities(unedited), "change": 0.0}]
    for cell in cells:
        losses = found[cell.name]
        change = (losses.loss.double() - base.double()).mean(1).numpy()
        low, high = np.quantile(weights @ change, [0.025, 0.975])
        loss = losses.loss.double().mean().item()
        records.append(
            {
                "site": cell.edit.site,
                "reference": cell.edit.reference if cell.edit.site.startswith("value.") else None,
                "parallel": cell.edit.parallel,
                "perpendicular": cell.edit.perpendicular,
                "control": cell.control,
                **{what: _listed(chosen) for what, chosen in cell.chosen.items()},
                "loss": loss,
                **perplexities(loss),
                "change": float(change.mean()),
                "change_low": float(low),
                "change_high": float(high),
                "kl": losses.kl.double().mean().item(),
                "top1_agreement": losses.agreement.double().mean().item(),
            }
        )
    return records


def _exp(loss: float) -> float | None:
    return math.exp(loss) if loss < 700 else None


def by_position(base: Tensor, found: Mapping[str, Losses], cells: Sequence[Cell]) -> dict[str, np.ndarray]:
    """Means over sequences at each token: columns `cell` (row of `cells`), `edit`, `token`, `loss`, `kl`,
    `top1_agreement`; cell 0 is the unedited model.
    """
    count = base.shape[1]
    same = Losses(base, torch.zeros_like(base), torch.ones_like(base))
    all_of = {"unedited": same, **{cell.name: found[cell.name] for cell in cells}}
    columns = {"loss": "loss", "kl": "kl", "top1_agreement": "agreement"}
    return {
        "cell": np.repeat(np.arange(len(all_of)), count),
        "edit": np.repeat(np.array(list(all_of), dtype=object), count),
        "token": np.tile(np.arange(1, count + 1), len(all_of)),
        **{
            name: np.concatenate([getattr(one, own).double().mean(0).numpy() for one in all_of.values()])
            for name, own in columns.items()
        },
    }


@dataclass(frozen=True)
class Basin:
    """The widest interval of a scale around 1 within which the loss rises by at most `tolerance` nats.

    Ends are interpolated linearly between the points of the sweep; `open_low`, `open_high` say that the loss
    was still within the tolerance at the last point measured, so that the basin is at least this wide.
    """

    tolerance: float
    low: float
    high: float
    open_low: bool
    open_high: bool

    @property
    def width(self) -> float:
        return self.high - self.low


def tolerance_basin(scales: Sequence[float], changes: Sequence[float], tolerance: float) -> Basin:
    """The basin of one curve: changes of the loss (nats) at scales, 1 among them (its change is 0)."""
    order = np.argsort(scales)
    x, y = np.asarray(scales, float)[order], np.asarray(changes, float)[order]
    at = np.flatnonzero(x == 1.0)
    if not len(at):
        raise InputError("a tolerance basin is measured around the scale 1: the sweep must contain it")
    low, open_low = _edge(x[at[0] :: -1], y[at[0] :: -1], tolerance)
    high, open_high = _edge(x[at[0] :], y[at[0] :], tolerance)
    return Basin(tolerance, low, high, open_low, open_high)


def _edge(x: np.ndarray, y: np.ndarray, tolerance: float) -> tuple[float, bool]:
    outside = np.flatnonzero(~(y <= tolerance))
    if not len(outside):
        return float(x[-1]), True
    i = int(outside[0])
    if i == 0:
        return float(x[0]), False
    inside, beyond = y[i - 1], y[i]
    share = (tolerance - inside) / (beyond - inside) if np.isfinite(beyond) else 0.0
    return float(x[i - 1] + share * (x[i] - x[i - 1])), False


@dataclass(frozen=True, repr=False)
class EditStudy(Rich):
    """A sweep's `results` as in run.json, `tables` (cells, positions, basins), `arrays`, `findings`."""

    results: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    arrays: dict[str, np.ndarray]
    findings: list[str]
    conventions: dict[str, Any]


def edit_study(
    model: nn.Module,
    tokens: Tensor | Windows,
    cells: Sequence[Cell],
    *,
    batch: int = 4,
    basin: bool = False,
    store: Store = direct,
    progress: Progress = silent,
) -> EditStudy:
    """Run a sweep and say what it shows. With `basin`, the tolerance basin of each site and scale.

    Windows that carry `words` (whitespace words of each sequence's scored tokens) give word perplexities too.
    """
    import pandas as pd

    windows = as_windows(tokens)
    words = None if windows.words is None else int(windows.words.sum())
    base, found = sweep(model, windows, cells, batch=batch, store=store, progress=progress)
    records = summary(base, found, cells, words=words)
    table = pd.DataFrame(records).reindex(columns=COLUMNS)
    tables = {"cells": table, "positions": pd.DataFrame(by_position(base, found, cells))}
    basins = _basins(records) if basin else []
    if basins:
        tables["basins"] = pd.DataFrame(basins)
    return EditStudy(
        {"cells": records, **({"basins": basins} if basins else {})},
        tables,
        {
            "unedited_loss": base.double().mean(1).numpy(),
            **{f"loss_{i}": found[cell.name].loss.double().mean(1).numpy() for i, cell in enumerate(cells)},
        },
        _said(records, basins),
        {
            "loss": "nats per token; mean over all tokens but the first of each sequence",
            "perplexity": "C4 style: exp(nats per token) on disjoint windows of `context` tokens",
            "word_perplexity": "WikiText style: exp(nats of these tokens / whitespace words they spell)",
            "words": words,
            "context": int(windows.tokens.shape[1]),
            "sequences": len(windows.tokens),
            "tokens": int(base.numel()),
            "interval": "95 %, bootstrap over sequences, paired with the unedited model",
            "reference": "head: each query head against its own KV head's value; token: all heads together",
            "controls": "moves of the same norm per token: random direction, an earlier token's reference "
            "(same edit), the opposite component",
        },
    )


COLUMNS = [
    *("site", "reference", "parallel", "perpendicular", "control", "layers", "heads"),
    *("loss", "perplexity", "word_perplexity"),
    *("change", "change_low", "change_high", "kl", "top1_agreement"),
]


def _curves(
    records: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[str, str | None, str, dict[float, float]]]:
    """(site, reference, scale, {value: change}) of each curve along which one scale varies, the other 1.

    Edits of all layers and heads only: a curve compares like with like.
    """
    plain = [r for r in records[1:] if r["control"] is None and r["layers"] is None and r["heads"] is None]
    for site, reference in sorted({(r["site"], r["reference"]) for r in plain}, key=str):
        for scale, other in (("parallel", "perpendicular"), ("perpendicular", "parallel")):
            curve = {
                float(r[scale]): r["change"]
                for r in plain
                if (r["site"], r["reference"]) == (site, reference)
                and r[other] == 1.0
                and isinstance(r[scale], float)
            }
            if len(curve) > 1:
                yield site, reference, scale, {**curve, 1.0: 0.0}


def _basins(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for site, reference, scale, curve in _curves(records):
        for tolerance in BASIN_TOLERANCES:
            b = tolerance_basin(list(curve), list(curve.values()), tolerance)
            row = {"site": site, "reference": reference, "scale": scale, "tolerance": tolerance}
            rows.append(
                {**row, "low": b.low, "high": b.high, "open_low": b.open_low, "open_high": b.open_high}
            )
    return rows


def _said(records: Sequence[Mapping[str, Any]], basins: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = [f"Unedited: {records[0]['loss']:.3f} nats per token, perplexity {records[0]['perplexity']:.2f}."]
    edits = [r for r in records[1:] if r["control"] is None]
    lost = [r for r in records[1:] if not math.isfinite(r["loss"])]
    if lost:
        first = lost[0]
        lines.append(
            f"{len(lost)} of {len(records) - 1} cells have no loss, as logits are not finite; the first: "
            f"{first['site']}, s∥ {first['parallel']}, s⊥ {first['perpendicular']}. Use smaller scales."
        )
    for r in edits:
        if r["parallel"] != 0.0 or r["perpendicular"] != 1.0:
            continue
        reference = f" ({r['reference']} reference)" if r["reference"] else ""
        line = (
            f"Removing the parallel part at {r['site']}{reference} changes the loss by {r['change']:+.3f} "
            f"nats (95 % interval over sequences {r['change_low']:+.3f} to {r['change_high']:+.3f})"
        )
        same = [
            c
            for c in records[1:]
            if c["control"] and all(c[k] == r[k] for k in ("site", "reference", "parallel"))
        ]
        if same:
            line += "; controls: " + ", ".join(f"{c['control']} {c['change']:+.3f}" for c in same)
        lines.append(line + ".")
    for b in basins:
        if b["tolerance"] == BASIN_TOLERANCES[-1] and b["scale"] == "parallel":
            low, high = ("≤ " if b["open_low"] else "", "≥ " if b["open_high"] else "")
            ends = f"{low}{b['low']:.2f} to {high}{b['high']:.2f}"
            reference = f" ({b['reference']} reference)" if b["reference"] else ""
            lines.append(f"Tolerance basin of s∥ at {b['site']}{reference}, {b['tolerance']} nats: {ends}.")
    return lines
