"""Which blocks, attentions and MLPs can be left out: rankings by what they turn, and the price of dropping.

    ranking = rank(survey_updates(model, tokens))
    curve = evaluate(model, windows, orders(ranking, "block"), counts=(1, 2, 4))

Criteria, each a mean over tokens of the update survey; what turns the stream least goes first:

    cosine       1 − cos(x, x+Δ), exact                   He et al. (LLM-Drop), per part
    rotation     ‖Δ⊥‖/‖x+Δ∥‖                              the directional-decomposition paper's appendix on
                                                          layer dropping: cos ≈ 1 − rotation²/2
    influence    1 − cos(x, y) of the whole block         ShortGPT's block influence

For blocks cosine and influence are one number by definition, so their orders are one. For an attention or an
MLP, influence is that of the block it sits in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.distributed import Store, direct, map_blocks
from perpend.errors import InputError, unknown_name
from perpend.models.smaller import Drop, dropped
from perpend.progress import Progress, silent
from perpend.surveys.updates import UpdateSurvey

if TYPE_CHECKING:
    import pandas as pd
    from torch import Tensor, nn

    from perpend.evaluation.perplexity import Windows

CRITERIA = ("cosine", "rotation", "influence")
UNITS = {"block": ("block",), "attn": ("attn",), "mlp": ("mlp",), "module": ("attn", "mlp")}


@dataclass(frozen=True)
class Ranking:
    """`scores[criterion]` [layers, parts], small = droppable; NaN where every update was zero."""

    layers: tuple[int, ...]
    parts: tuple[str, ...]
    scores: dict[str, np.ndarray]

    def order(self, unit: str, criterion: str) -> list[Drop]:
        """(layer, part) from the most droppable on; ties keep the deeper layer first."""
        if unit not in UNITS:
            raise unknown_name("unit", unit, UNITS)
        if criterion not in CRITERIA:
            raise unknown_name("criterion", criterion, CRITERIA)
        missing = set(UNITS[unit]) - set(self.parts)
        if missing:
            raise InputError(
                f"{', '.join(sorted(missing))} not in the survey: it has {', '.join(self.parts)}"
            )
        entries = []
        for i, layer in enumerate(self.layers):
            for part in UNITS[unit]:
                score = self.scores[criterion][i, self.parts.index(part)]
                # a part that adds nothing changes nothing
                entries.append((-np.inf if np.isnan(score) else score, -layer, part))
        return [(-layer, part) for _, layer, part in sorted(entries)]

    @property
    def table(self) -> pd.DataFrame:
        """One row a layer and part: the scores, and its rank (0 = dropped first) by each of them."""
        import pandas as pd

        rows = []
        for unit in self.parts:
            ranks = {c: {drop: i for i, drop in enumerate(self.order(unit, c))} for c in CRITERIA}
            j = self.parts.index(unit)
            for i, layer in enumerate(self.layers):
                row: dict[str, Any] = {"layer": layer, "part": unit}
                row |= {c: self.scores[c][i, j] for c in CRITERIA}
                row |= {f"{c}_rank": ranks[c][layer, unit] for c in CRITERIA}
                rows.append(row)
        return pd.DataFrame(rows)


def rank(survey: UpdateSurvey, tokens: str = "all") -> Ranking:
    """Scores of every layer and part from a survey, over one of its sets of tokens."""
    cosine = 1 - survey.mean("cosine", tokens)
    influence = cosine.copy()
    if "block" in survey.parts:  # a module's influence is that of the block it sits in
        influence[:] = cosine[:, [survey.parts.index("block")]]
    return Ranking(
        layers=survey.layers,
        parts=survey.parts,
        scores={"cosine": cosine, "rotation": survey.mean("rho", tokens), "influence": influence},
    )


def orders(ranking: Ranking, unit: str, seeds: Sequence[int] = (0, 1, 2)) -> dict[str, list[Drop]]:
    """Orders of dropping: by each criterion, from the last layer on, and at random by seed.

    Criteria that give one order are one entry, named by all of them ("cosine = influence").
    """
    found: dict[str, list[Drop]] = {}
    for criterion in CRITERIA:
        order = ranking.order(unit, criterion)
        same = next((name for name, other in found.items() if other == order), None)
        if same is None:
            found[criterion] = order
        else:
            found[f"{same} = {criterion}"] = found.pop(same)
    every = sorted(ranking.order(unit, "cosine"))
    found["last first"] = sorted(every, key=lambda drop: (-drop[0], drop[1]))
    for seed in seeds:
        shuffled = np.random.default_rng(seed).permutation(len(every))
        found[f"random {seed}"] = [every[i] for i in shuffled]
    return found


def evaluate(
    model: nn.Module,
    windows: Windows | Tensor,
    orders: dict[str, list[Drop]],
    *,
    counts: Sequence[int],
    batch: int = 8,
    store: Store = direct,
    progress: Progress = silent,
) -> pd.DataFrame:
    """Perplexity with the first `count` of each order dropped, and with none.

    Columns order, count, dropped, loss (nats a token), low, high (95 %, sequences resampled), perplexity.
    Sets of parts that several orders share are run once.
    """
    import pandas as pd

    from perpend.evaluation.perplexity import perplexity, token_nll

    longest = max(len(order) for order in orders.values())
    for count in counts:
        if not 0 < count <= longest:
            raise InputError(
                f"{count} parts cannot be dropped: there are {longest}, and at least one must go"
            )
    plan = [
        (name, count, frozenset(order[:count])) for name, order in orders.items() for count in (0, *counts)
    ]
    sets = list(dict.fromkeys(drops for _, _, drops in plan))
    with progress(total=len(sets), unit="models", description="dropping") as advance:

        def compute(index: int) -> dict[str, Any]:
            with dropped(model, sets[index]):
                found = perplexity("drop", token_nll(model, windows, batch=batch))
            advance(1)
            return {"loss": found.loss, "low": found.low, "high": found.high, "perplexity": found.perplexity}

        losses = dict(zip(sets, map_blocks(len(sets), compute, store=store, name="drop")))
    rows = []
    for name, count, drops in plan:
        words = " ".join(f"{layer}.{part}" for layer, part in sorted(drops))
        rows.append({"order": name, "count": count, "dropped": words, **losses[drops]})
    return pd.DataFrame(rows)
