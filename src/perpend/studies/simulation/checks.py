"""A published number or statement beside what was computed, and whether the two agree.

exact      agrees if the computed value rounds to the printed digits
sampled    agrees if the printed value lies within computed ± (99 % of the sampling error of both sides, plus
           half a printed digit)
statement  agrees if a quantity that the paper says is zero, positive or bounded is so, to a stated limit
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from perpend.geometry import METRICS
from perpend.papers import Entry

if TYPE_CHECKING:
    import pandas as pd

CONFIDENCE = 0.99
Z = 2.5758293035489004  # its two-sided normal quantile
TITLE = {name: metric.title for name, metric in METRICS.items()}
ROUNDING = 1e-9  # slack of a comparison with half a digit: a value printed from a tie may go either way


@dataclass(frozen=True)
class Settings:
    """What scales a simulation: `samples` triples a grid point (other draws in proportion), and the seed."""

    samples: int = 20_000
    seed: int = 7

    def generator_seed(self, *names: int) -> list[int]:
        """A seed of its own for each part, so that parts do not depend on what ran before them."""
        return [self.seed, *names]


@dataclass(frozen=True)
class Check:
    """One line of the comparison. `off`: by how much the interval is missed, 0 where it is not."""

    item: str
    quantity: str
    paper: str
    measured: float
    low: float | None
    high: float | None
    reproduced: bool
    off: float
    kind: str
    note: str = ""


@dataclass
class Part:
    """What one part of the simulation found: plain data, so that a run folder can keep it."""

    checks: list[Check] = field(default_factory=list)
    tables: dict[str, pd.DataFrame] = field(default_factory=dict)
    results: dict[str, Any] = field(default_factory=dict)
    findings: list[str] = field(default_factory=list)

    def packed(self) -> dict[str, Any]:
        """As nested dicts, lists and tables."""
        return {**vars(self), "checks": [asdict(check) for check in self.checks]}

    @classmethod
    def unpacked(cls, packed: dict[str, Any]) -> Part:
        """The inverse of `packed`."""
        return cls(**{**packed, "checks": [Check(**check) for check in packed["checks"]]})


def exact(item: str, quantity: str, entry: Entry, measured: float, *, note: str = "") -> Check:
    """A closed form against its printed digits."""
    off = abs(measured - entry.value) - entry.half_digit * (1 + ROUNDING) - 1e-15
    return _check(item, quantity, entry.printed, measured, off, "exact", note)


def sampled(
    item: str, quantity: str, entry: Entry, measured: float, sd: float, paper_sd: float, *, note: str = ""
) -> Check:
    """A Monte Carlo value against a printed one; sd: sampling errors of the two, in the printed unit."""
    half = Z * math.hypot(sd, paper_sd) + entry.half_digit
    off = abs(measured - entry.value) - half
    limits = (measured - half, measured + half)
    return _check(item, quantity, entry.printed, measured, off, "sampled", note, limits)


def share(item: str, quantity: str, entry: Entry, rate: float, trials: int, *, note: str = "") -> Check:
    """A sampled percentage: `rate` (a fraction) over `trials` draws against the paper's over its own."""
    # Rates of exactly 0 or 1 still have an error: one expected event sets its scale.
    spread = math.sqrt(max(rate * (1 - rate), 1 / trials))
    errors = (100 * spread / math.sqrt(n) for n in (trials, entry.trials or trials))
    return sampled(item, quantity, entry, 100 * rate, *errors, note=note)


def bound(item: str, quantity: str, entry: Entry, measured: float, *, note: str = "") -> Check:
    """A value that the paper says lies above (">") or below ("<") a printed one."""
    off = measured - entry.value if entry.relation == "<" else entry.value - measured
    return _check(item, quantity, f"{entry.relation} {entry.printed}", measured, off, "exact", note)


def holds(
    item: str,
    quantity: str,
    paper: str,
    measured: float,
    *,
    most: float | None = None,
    least: float | None = None,
    note: str = "",
) -> Check:
    """A statement made a number: it holds if least ≤ measured ≤ most; NaN never does."""
    over = -math.inf if most is None else measured - most
    under = -math.inf if least is None else least - measured
    off = max(over, under) if math.isfinite(measured) else math.inf
    return _check(item, quantity, paper, measured, off, "statement", note, (least, most))


def _check(
    item: str,
    quantity: str,
    paper: str,
    measured: float,
    off: float,
    kind: str,
    note: str,
    limits: tuple[float | None, float | None] = (None, None),
) -> Check:
    low, high = (None if limit is None else float(limit) for limit in limits)
    missed = max(0.0, float(off))
    return Check(item, quantity, paper, float(measured), low, high, missed == 0, missed, kind, note)
