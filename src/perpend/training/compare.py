"""Several variants, several seeds: curves with bands, and paired differences at equal tokens and equal time.

A seed decides the initial weights and the order of the data, and every variant gets both alike, so a
difference is taken within a seed and its interval over seeds. Three budgets:

    tokens      the last evaluation of each run
    wall clock  each pair at the time that the quicker of the two needed: the slower one is read off its
    curve there processor   the same with processor seconds, which a busy machine disturbs less

Read off before its end, a slower run has not finished its cosine, which counts against it a little more than
its speed does.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

BUDGETS = {"tokens": "tokens", "wall clock": "seconds", "processor": "cpu_seconds"}
LEVEL, POWER = 0.95, 0.80


@dataclass(frozen=True)
class Comparison:
    """results, tables and findings of a set of training runs."""

    results: dict[str, Any]
    tables: dict[str, pd.DataFrame]
    findings: list[str]


def interval(differences: Sequence[float]) -> dict[str, float | None]:
    """Mean, sd (n − 1), the 95 % t interval, and the effect that as many seeds would detect.

    `detectable` is the true difference that a two-sided 5 % t test on n pairs finds with 80 % power, with
    this sd. One difference has no interval: None.
    """
    from scipy.stats import t

    values = np.asarray(differences, dtype=float)
    n, mean = len(values), float(values.mean())
    out: dict[str, float | None] = {
        "n": n,
        "mean": mean,
        "sd": None,
        "low": None,
        "high": None,
        "detectable": None,
    }
    if n > 1:
        sd = float(values.std(ddof=1))
        half = float(t.ppf(0.5 + LEVEL / 2, n - 1)) * sd / math.sqrt(n)
        found = float(t.ppf(0.5 + LEVEL / 2, n - 1) + t.ppf(POWER, n - 1)) * sd / math.sqrt(n)
        out |= {"sd": sd, "low": mean - half, "high": mean + half, "detectable": found}
    return out


def loss_at(log: pd.DataFrame, column: str, budget: float) -> float:
    """The validation loss when `column` (tokens or seconds) had reached `budget`, linear between
    evaluations."""
    curve = log.dropna(subset=["valid_loss"])
    if not curve[column].iloc[0] <= budget <= curve[column].iloc[-1] * (1 + 1e-12):
        return math.nan
    return float(np.interp(budget, curve[column], curve["valid_loss"]))


def compare(logs: Mapping[tuple[str, int], pd.DataFrame]) -> Comparison:
    """Compares finished runs, (variant, seed) -> log; the first variant is the one that others are held
    against."""
    import pandas as pd

    variants = list(dict.fromkeys(variant for variant, _ in logs))
    seeds = list(dict.fromkeys(seed for _, seed in logs))
    base = variants[0]
    curves = pd.concat(
        [
            log.dropna(subset=["valid_loss"]).assign(variant=variant, seed=seed)
            for (variant, seed), log in logs.items()
        ],
        ignore_index=True,
    )[["variant", "seed", "step", "tokens", "seconds", "cpu_seconds", "valid_loss"]]
    bands = _bands(curves)
    runs = pd.DataFrame([_run(variant, seed, log) for (variant, seed), log in logs.items()])
    summary = (
        runs.groupby("variant", sort=False)
        .agg(
            seeds=("seed", "size"),
            valid_loss=("valid_loss", "mean"),
            sd=("valid_loss", "std"),
            tokens=("tokens", "first"),
            tokens_per_second=("tokens_per_second", "median"),
            tokens_per_cpu_second=("tokens_per_cpu_second", "median"),
        )
        .reset_index()
    )
    paired, each = [], []
    for variant in variants[1:]:
        for budget, column in BUDGETS.items():
            rows = [_pair(logs[variant, s], logs[base, s], column) for s in seeds]
            each += [{"variant": variant, "budget": budget, "seed": s, **row} for s, row in zip(seeds, rows)]
            kept = [row["difference"] for row in rows if math.isfinite(row["difference"])]
            if kept:
                paired.append({"variant": variant, "against": base, "budget": budget, **interval(kept)})
    tables = {"runs": runs, "summary": summary, "curves": curves, "bands": bands}
    if paired:
        tables |= {"paired": pd.DataFrame(paired), "pairs": pd.DataFrame(each)}
    results = {
        "variants": variants,
        "seeds": seeds,
        "final": {
            row.variant: {"mean": row.valid_loss, "sd": None if math.isnan(row.sd) else row.sd}
            for row in summary.itertuples()
        },
        "paired": paired,
    }
    return Comparison(results, tables, _findings(summary, paired, base))


def _run(variant: str, seed: int, log: pd.DataFrame) -> dict[str, Any]:
    last = log.iloc[-1]
    rates = {
        "tokens_per_second": last["tokens"] / last["seconds"] if last["seconds"] else math.nan,
        "tokens_per_cpu_second": last["tokens"] / last["cpu_seconds"] if last["cpu_seconds"] else math.nan,
    }
    mfu = log["mfu"].dropna() if "mfu" in log else []
    return {
        "variant": variant,
        "seed": seed,
        "steps": int(last["step"]),
        "tokens": int(last["tokens"]),
        "valid_loss": float(log["valid_loss"].dropna().iloc[-1]),
        "train_loss": float(log["loss"].dropna().iloc[-1]),
        "seconds": float(last["seconds"]),
        "cpu_seconds": float(last["cpu_seconds"]),
        **rates,
        "mfu": float(np.median(mfu)) if len(mfu) else None,
    }


def _pair(log: pd.DataFrame, base: pd.DataFrame, column: str) -> dict[str, float]:
    budget = float(min(log[column].iloc[-1], base[column].iloc[-1]))
    mine, other = loss_at(log, column, budget), loss_at(base, column, budget)
    return {"at": budget, "valid_loss": mine, "against": other, "difference": mine - other}


def _bands(curves: pd.DataFrame) -> pd.DataFrame:
    """Mean and range over seeds of every variant's curve, at each evaluation; seconds are the mean over
    seeds. One seed has no range: its ends are missing."""
    grouped = curves.groupby(["variant", "step", "tokens"], sort=False)
    bands = grouped.agg(
        valid_loss=("valid_loss", "mean"),
        low=("valid_loss", "min"),
        high=("valid_loss", "max"),
        seconds=("seconds", "mean"),
        cpu_seconds=("cpu_seconds", "mean"),
        seeds=("seed", "nunique"),
    )
    bands.loc[bands.pop("seeds") < 2, ["low", "high"]] = math.nan
    return bands.reset_index()


def _findings(summary: pd.DataFrame, paired: list[dict[str, Any]], base: str) -> list[str]:
    best = summary.loc[summary["valid_loss"].idxmin()]
    spread = "" if math.isnan(best["sd"]) else f" (sd over seeds {best['sd']:.4f})"
    told = [
        f"Lowest validation loss after {int(best['tokens']):,} tokens: {best['variant']}, "
        f"{best['valid_loss']:.4f} nats per token{spread}."
    ]
    for row in paired:
        if row["low"] is None:
            told.append(
                f"{row['variant']} − {base} at equal {row['budget']}: {row['mean']:+.4f} nats, one seed: "
                "no interval, nothing can be said of chance."
            )
            continue
        sure = "undecided" if row["low"] <= 0 <= row["high"] else ("better" if row["high"] < 0 else "worse")
        told.append(
            f"{row['variant']} − {base} at equal {row['budget']}: {row['mean']:+.4f} nats "
            f"[{row['low']:+.4f}, {row['high']:+.4f}] over {row['n']} seeds: {sure}; "
            f"a difference of {row['detectable']:.4f} would have been found with 80 % power."
        )
    return told
