"""Which channel would pruning follow in this model, by the dispersion of its sink over heads?

The rule of the attention paper (Appendix E.2): the coefficient of variation over heads of the signature sink
share, CV = population sd / mean; at most 0.36 "content", at least 0.42 "js", between them "abstain".

The paper's own frozen test of it gave one confirmation, one abstention and one failure; it calls the rule
descriptive of the models it was read off, not a validated decision procedure, and so does `CAVEAT`.

The rule was read off trained language models, all of which have a sink. Where the sink gets about what any
other key gets, its spread over heads says nothing of a sink: the verdict stands, by the published thresholds,
and `Regime.applies` is False.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CONTENT_AT_MOST = 0.36
JS_AT_LEAST = 0.42
NO_SINK = 2.0  # times what uniform attention gives; below it there is no sink whose spread could be read
CAVEAT = (
    "descriptive of nine language models, not validated: its frozen test on three unseen models gave one "
    "confirmation, one abstention and one failure (Appendix E.2)"
)


@dataclass(frozen=True)
class Regime:
    """The verdict (`content`, `js` or `abstain`) and the coefficient of variation it rests on.

    `applies`: whether there is a sink at all, that is, a mean share of at least NO_SINK times uniform.
    """

    verdict: str
    cv: float
    applies: bool = True


def coefficient_of_variation(sink_shares: np.ndarray) -> float:
    """Population sd over mean of the heads' sink shares (any shape; NaN marks an undefined head)."""
    shares = np.asarray(sink_shares, np.float64)
    shares = shares[np.isfinite(shares)]
    if not shares.size or shares.mean() <= 0:
        return float("nan")
    return float(shares.std() / shares.mean())


def has_sink(mean_share: float, uniform: float) -> bool:
    """Whether a mean sink share is at least NO_SINK times the share that uniform attention gives."""
    return bool(mean_share >= NO_SINK * uniform)


def regime(sink_shares: np.ndarray, uniform: float | None = None) -> Regime:
    """Apply the rule to signature sink shares (layers, heads), as fractions.

    `uniform`: the sink's share under uniform attention, by which `applies` is told; None takes it to apply.
    """
    cv = coefficient_of_variation(sink_shares)
    shares = np.asarray(sink_shares, np.float64)
    shares = shares[np.isfinite(shares)]
    applies = uniform is None or not shares.size or has_sink(float(shares.mean()), uniform)
    if cv <= CONTENT_AT_MOST:
        return Regime("content", cv, applies)
    return Regime("js" if cv >= JS_AT_LEAST else "abstain", cv, applies)
