"""Does the error across an update say more about a compressed model than the error as a whole?

Regimes (a method with its settings) are applied to one base model; of each we have the directional error per
layer and part, and the rise of the loss on the same tokens. This module sets them side by side:

    ordering    do the regimes keep one order, layer by layer, in ε⊥, in e∥, in e?  (Fig. 6)
    relations   rank and linear correlation of every error measure with the loss change, over regimes and over
                layers, and with changes of downstream scores
    sentence    what follows from them, in words

ε⊥ is part of e. In d dimensions an error of random direction has all but 1/d of its energy across any given
vector, so that r(ε⊥, e) is close to 1 whatever the model does: the isotropic value stands beside every r.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.progress import Progress, silent

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from perpend.compression.method import Regime

FIGURE_6 = ("awq", "wanda", "wanda:4:8", "wanda:2:4")  # the paper's regimes, from best to worst
MEASURES = ("perpendicular", "parallel", "total", "kappa", "angle")
"""ε⊥, ‖e∥‖, ‖e‖ (all over ‖Δ_base‖), |κ| and the rotation in degrees."""

Store = Callable[[str, Callable[[], Any]], Any]


def direct(name: str, compute: Callable[[], Any]) -> Any:
    """The store that keeps nothing."""
    return compute()


@dataclass(frozen=True)
class Setting:
    """What every regime of a study shares. layers: also the loss change of each layer alone, on so many of
    the tokens' sequences (0: not measured).
    """

    calibration: Tensor | None
    tokens: Tensor  # [n, T], for the error
    windows: Any  # evaluation.Windows, for the loss
    modes: Sequence[str] = ("local", "propagated")
    along: Sequence[str] = ("update",)
    batch: int = 4
    keep: Sequence[str] = ()
    layer_sequences: int = 0
    progress: Progress = silent


def run_regime(base: nn.Module, regime: Regime, setting: Setting, base_nll: Any) -> tuple[dict, nn.Module]:
    """Compress a copy of the base model and measure it. Returns plain values and tables, and the copy."""
    from perpend.compression import compress
    from perpend.training.export import copied

    other = copied(base)
    record = compress(
        other, setting.calibration, regime, batch=setting.batch, keep=setting.keep, progress=setting.progress
    )
    out = measure_pair(base, other, setting, base_nll)
    return {"compression": record.results, "facts": record.facts, **out}, other


def measure_pair(base: nn.Module, other: nn.Module, setting: Setting, base_nll: Any) -> dict[str, Any]:
    """Error, loss and (where asked for) loss change per layer of a model against its base."""
    from perpend.compression import layer_changes, measure
    from perpend.evaluation.perplexity import paired, perplexity, token_nll

    error = measure(
        base, other, setting.tokens, modes=setting.modes, along=setting.along, batch=setting.batch,
        progress=setting.progress,
    )  # fmt: skip
    nll = token_nll(other, setting.windows, batch=setting.batch)
    gap = paired(base_nll, nll)
    out: dict[str, Any] = {
        "error": error.table,
        "summary": error.summary,
        "error_tokens": error.tokens,
        "quantiles_from": error.quantiles_from,
        "loss": perplexity("loss", nll).results,
        "change": {"difference": gap.difference, "low": _finite(gap.low), "high": _finite(gap.high)},
    }
    if setting.layer_sequences:
        rows = setting.tokens[: setting.layer_sequences]
        out["layers"] = layer_changes(base, other, rows, batch=setting.batch, progress=setting.progress)
    return out


def layer_table(outcomes: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """The error tables of all regimes, one below the other, with a column regime and the angle in degrees."""
    import pandas as pd

    frames = [outcome["error"].assign(regime=name) for name, outcome in outcomes.items()]
    table = pd.concat(frames, ignore_index=True)
    table["angle"] = np.degrees(np.arccos(np.clip(table["rotation"].astype(float), -1, 1)))
    return table[["regime", *(c for c in table.columns if c != "regime")]]


def regime_table(outcomes: Mapping[str, Mapping[str, Any]], mode: str, part: str) -> pd.DataFrame:
    """One row per regime: means over layers of one mode and part (along the update), and the loss change."""
    import pandas as pd

    table = layer_table(outcomes)
    table = table[(table["mode"] == mode) & (table["part"] == part) & (table["along"] == "update")]
    rows = []
    for name, outcome in outcomes.items():
        own = table[table["regime"] == name]
        rows.append(
            {
                "regime": name,
                "perplexity": outcome["loss"]["perplexity"],
                "change": outcome["change"]["difference"],
                **{m: float(own[m].mean()) for m in MEASURES},
                "energy_share": float(own["energy_share"].mean()),
                "isotropy": float(own["isotropy"].mean()),
                "bytes": outcome.get("compression", {}).get("bytes"),
            }
        )
    return pd.DataFrame(rows)


def ordering(table: pd.DataFrame, order: Sequence[str], mode: str, part: str) -> dict[str, Any]:
    """Do the regimes, listed from best to worst, rise in each measure: in the mean, and at how many layers?

    table: `layer_table`. Per measure: `mean`, whether the means over layers rise strictly; `layers`, the
    share of layers at which all regimes rise strictly; `pairs`, the share of (layer, adjacent pair) that
    rise.
    """
    own = table[(table["mode"] == mode) & (table["part"] == part) & (table["along"] == "update")]
    out: dict[str, Any] = {"order": list(order), "mode": mode, "part": part}
    for measure in MEASURES:
        own_size = own.assign(size=own[measure].abs())
        frame = own_size.pivot(index="layer", columns="regime", values="size")
        values = frame[list(order)].to_numpy(float)
        rises = np.diff(values, axis=1) > 0
        out[measure] = {
            "mean": bool((np.diff(values.mean(0)) > 0).all()),
            "layers": float(rises.all(1).mean()),
            "pairs": float(rises.mean()),
        }
    return out


def correlations(values: np.ndarray, loss: np.ndarray) -> dict[str, float | None]:
    """Spearman's and Pearson's r of two series, None where fewer than three points or no spread."""
    from scipy import stats

    ok = np.isfinite(values) & np.isfinite(loss)
    values, loss = values[ok], loss[ok]
    if len(values) < 3 or np.ptp(values) == 0 or np.ptp(loss) == 0:
        return {"spearman": None, "pearson": None, "points": len(values)}
    return {
        "spearman": float(stats.spearmanr(values, loss).statistic),
        "pearson": float(stats.pearsonr(values, loss).statistic),
        "points": len(values),
    }


def relations(outcomes: Mapping[str, Mapping[str, Any]]) -> pd.DataFrame:
    """Every error measure against what compression costs: columns mode, part, over, target, measure,
    spearman, pearson, points.

    over: "regimes" (means over layers against the loss change, or the change of a downstream score),
    "layers of NAME" (layers of one regime against the loss change of that layer alone).
    """
    import pandas as pd

    table = layer_table(outcomes)
    table = table[table["along"] == "update"]
    rows = []
    for (mode, part), own in table.groupby(["mode", "part"], sort=False):
        means = own.groupby("regime", sort=False)[list(MEASURES)].agg(lambda v: float(np.abs(v).mean()))
        names = list(means.index)
        targets = {"loss change": [outcomes[n]["change"]["difference"] for n in names]}
        for task in _tasks(outcomes):
            targets[task] = [-outcomes[n]["scores"][task] for n in names]  # a fall of the score, as a cost
        for target, cost in targets.items():
            for measure in MEASURES:
                got = correlations(means[measure].to_numpy(float), np.array(cost, dtype=float))
                rows.append(
                    {
                        "mode": mode,
                        "part": part,
                        "over": "regimes",
                        "target": target,
                        "measure": measure,
                        **got,
                    }
                )
        if part != "block":
            continue
        for name in names:
            if "layers" not in outcomes[name]:
                continue
            one = own[own["regime"] == name].sort_values("layer")
            cost = outcomes[name]["layers"].sort_values("layer")["change"].to_numpy(float)
            for measure in MEASURES:
                got = correlations(np.abs(one[measure].to_numpy(float)), cost)
                rows.append(
                    {"mode": mode, "part": part, "over": f"layers of {name}", "target": "loss change",
                     "measure": measure, **got}
                )  # fmt: skip
    return pd.DataFrame(rows)


def _tasks(outcomes: Mapping[str, Mapping[str, Any]]) -> list[str]:
    scored = [set(outcome["scores"]) for outcome in outcomes.values() if outcome.get("scores")]
    return sorted(set.intersection(*scored)) if len(scored) == len(outcomes) and scored else []


def sentence(outcomes: Mapping[str, Mapping[str, Any]], related: pd.DataFrame, mode: str, part: str) -> str:
    """Whether ε⊥ says more than e here, or is geometry."""
    table = layer_table(outcomes)
    own = table[(table["mode"] == mode) & (table["part"] == part) & (table["along"] == "update")]
    share, isotropy = float(own["energy_share"].mean()), float(own["isotropy"].mean())
    tokens, null = float(own["r_perpendicular_total"].mean()), float(own["r_isotropic"].mean())
    if not (own["total"] > 0).any():
        if own["total"].isna().any():
            return f"{part}, {mode}: the error is undefined, as no token has finite updates in both models."
        return (
            f"{part}, {mode}: no error at any layer, so there is nothing to split: the updates are the same."
        )
    told = f"{tokens:.3f}" if math.isfinite(tokens) else "undefined (one of them is the same at every token)"
    start = (
        f"{part}, {mode}: {100 * share:.1f} % of the error's energy is across the update "
        f"(parallel energy {isotropy:.1f} times that of a random direction); "
        f"r(e⊥, e) over tokens is {told}"
        + (f", {null:.3f} for an error without direction" if math.isfinite(null) else "")
    )
    scores = {m: _one(related, mode, part, m) for m in ("perpendicular", "parallel", "total")}
    if any(value is None for value in scores.values()):
        return start + "; fewer than three regimes, so nothing is said of the loss."
    names = {"perpendicular": "e⊥", "total": "e", "parallel": "e∥"}
    told = ", ".join(f"{name} {scores[key]:.2f}" for key, name in names.items())
    gap = scores["perpendicular"] - scores["total"]
    if abs(gap) < 0.02:
        verdict = "e⊥ says no more than the whole error here: what it predicts is geometry"
    elif gap > 0:
        verdict = "e⊥ ranks the regimes better than the whole error"
    else:
        verdict = "e⊥ ranks the regimes worse than the whole error"
    if scores["parallel"] >= scores["perpendicular"] - 0.02:
        verdict += ", and e∥ ranks them as well as e⊥"
    points = int(related[(related["over"] == "regimes")]["points"].max())
    return f"{start}; rank correlation with the loss change over {points} regimes: {told}. So {verdict}."


def _one(related: pd.DataFrame, mode: str, part: str, measure: str) -> float | None:
    row = related[
        (related["mode"] == mode) & (related["part"] == part) & (related["over"] == "regimes")
        & (related["target"] == "loss change") & (related["measure"] == measure)
    ]  # fmt: skip
    if row.empty or row["spearman"].iloc[0] is None or not math.isfinite(row["spearman"].iloc[0]):
        return None
    return float(row["spearman"].iloc[0])


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None
