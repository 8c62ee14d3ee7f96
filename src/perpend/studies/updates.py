"""What the survey of updates says of a model, in sentences with their numbers.

study = updates_study(survey, generation, ranking, curve)
study.findings, study.results, study.tables
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from perpend.studies.generation_profile import GenerationProfile
from perpend.studies.layer_drop import Ranking
from perpend.surveys.updates import CONVENTIONS, UpdateSurvey

if TYPE_CHECKING:
    import pandas as pd

NAMES = {"attn": "attention", "mlp": "MLP", "block": "block"}
UNITS = {"attn": "attention", "mlp": "MLP", "block": "block", "module": "module"}
GAP = 0.01  # a second-order cosine further off than this is called wrong


@dataclass(frozen=True)
class UpdatesStudy:
    """Everything `perpend updates` found; `curve` is the table of `studies.layer_drop.evaluate`."""

    survey: UpdateSurvey
    generation: GenerationProfile | None
    ranking: Ranking
    curve: pd.DataFrame | None
    unit: str

    @property
    def tables(self) -> dict[str, pd.DataFrame]:
        tables = {"updates": self.survey.table(), "ranking": self.ranking.table}
        if self.generation is not None:
            tables["generation"] = self.generation.table
        if self.curve is not None:
            tables["dropping"] = self.curve
        return tables

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        arrays = self.survey.arrays
        return {**arrays, "histograms": arrays["histograms"].astype(np.int32)}

    @property
    def results(self) -> dict[str, Any]:
        results = {"updates": self.survey.results, "dropping": {"orders": self._orders}}
        if self.generation is not None:
            results["generation"] = self.generation.results
        if self.curve is not None:
            results["dropping"] |= {
                "unit": self.unit,
                "curve": [
                    {"order": row.order, "count": row.count_, "loss": row.loss, "perplexity": row.perplexity}
                    for row in self.curve.rename(columns={"count": "count_"}).itertuples()
                ],
            }
        return results

    @property
    def _orders(self) -> dict[str, dict[str, list[int]]]:
        """criterion -> part -> layers from the most droppable on."""
        return {
            criterion: {
                part: [layer for layer, _ in self.ranking.order(part, criterion)]
                for part in self.ranking.parts
            }
            for criterion in self.ranking.scores
        }

    @property
    def conventions(self) -> dict[str, str]:
        return dict(CONVENTIONS)

    @property
    def undefined(self) -> list[str]:
        return self.survey.undefined

    @property
    def findings(self) -> list[str]:
        survey, found = self.survey, list(self.survey.notes)
        null = survey.null["ratio_mean"]
        over = survey.results["over_layers"]
        means = [
            f"{over[part]['all']['ratio']:.3f} for the {NAMES[part]} "
            f"({over[part]['all']['ratio'] / null:.2f} times that of a random direction)"
            for part in survey.parts
            if over[part]["all"]["ratio"] is not None
        ]
        if means:
            found.append(
                "The part of an update along the stream, over the part across it, averages "
                f"{', '.join(means)}; a random direction has {null:.3f}."
            )
        found += [line for part in survey.parts for line in self._part(part)]
        found += self._second_order() + self._left_out() + self._generation() + self._dropping()
        return found

    def _part(self, part: str) -> list[str]:
        survey, j = self.survey, self.survey.parts.index(part)
        ratio, alpha = survey.mean("ratio")[:, j], survey.mean("alpha")[:, j]
        if not np.isfinite(ratio).any():
            return []
        most = int(np.nanargmax(ratio))
        trimmed = survey.mean("ratio", "without_both")[:, j]
        shrinking = int((alpha < 0).sum())
        low, high = (float(survey.quantile("ratio", q)[most, j]) for q in (0.05, 0.95))
        name = NAMES[part].capitalize() if part != "mlp" else "MLP"
        line = (
            f"{name}: the ratio is largest in layer {survey.layers[most]} (mean over tokens "
            f"{ratio[most]:.3f}, nine tokens in ten {low:.3f} to {high:.3f}; mean {trimmed[most]:.3f} "
            f"without position 0 and the largest 1 % of tokens); {shrinking} of {len(alpha)} layers shrink "
            "the stream on average (α < 0)."
        )
        return [line]

    def _second_order(self) -> list[str]:
        if "block" not in self.survey.parts:
            return []
        j = self.survey.parts.index("block")
        gap = self.survey.quantile("gap", 0.5)[:, j]
        mean = (self.survey.mean("cosine") - self.survey.mean("second_order"))[:, j]
        if not np.isfinite(gap).any():
            return []
        wrong = int((gap > GAP).sum())
        worst = int(np.nanargmax(gap))
        line = (
            f"1 − ρ²/2 is within {GAP} of the exact cosine for the median token in {len(gap) - wrong} of "
            f"{len(gap)} blocks; furthest off is layer {self.survey.layers[worst]} ({gap[worst]:.3g})."
        )
        few = [layer for layer, g, m in zip(self.survey.layers, gap, mean) if abs(m) > max(GAP, 20 * g)]
        if few:
            line += (
                f" Its mean says little in layers {', '.join(map(str, few))}: a few tokens with 1 + α near 0 "
                "make it."
            )
        return [line]

    def _left_out(self) -> list[str]:
        left = {key: value for key, value in self.survey.results["left_out"].items() if value}
        if not left:
            return []
        words = ", ".join(f"{value} {key.replace('_', ' ')}" for key, value in left.items())
        return [f"Tokens counted and not averaged, over layers and parts: {words}."]

    def _generation(self) -> list[str]:
        if self.generation is None or "block" not in self.generation.parts:
            return []
        per_layer = self.generation.results["per_layer"]
        words = [
            f"{entry['block']['first_quarter']:.3f} → {entry['block']['last_quarter']:.3f} in layer "
            f"{entry['layer']}"
            for entry in per_layer
            if entry["block"]["ratio"] is not None
        ]
        change = ", ".join(words)
        return [f"While the model writes, the block's ratio goes (first → last quarter) {change}."]

    def _dropping(self) -> list[str]:
        if self.curve is None:
            return []
        base = float(self.curve[self.curve["count"] == 0].perplexity.iloc[0])
        lines = []
        for count, group in self.curve[self.curve["count"] > 0].groupby("count"):
            best = group.loc[group.loss.idxmin()]
            chance = group[group.order.str.startswith("random")].perplexity
            interval = ""
            if np.isfinite(best.low):
                interval = f"95 % interval {np.exp(best.low):.4g} to {np.exp(best.high):.4g}; "
            line = (
                f"Without {count} {UNITS[self.unit]}{'s' * (count > 1)} perplexity goes from {base:.4g} to "
                f"{best.perplexity:.4g} at best ({interval}order: {best.order})"
            )
            if len(chance) > 1:
                line += f"; {len(chance)} random orders give {chance.min():.4g} to {chance.max():.4g}"
            elif len(chance):
                line += f"; a random order gives {chance.iloc[0]:.4g}"
            lines.append(f"{line}.")
        return lines


def updates_study(
    survey: UpdateSurvey,
    generation: GenerationProfile | None,
    ranking: Ranking,
    curve: pd.DataFrame | None = None,
    unit: str = "block",
) -> UpdatesStudy:
    """Put the pieces together; what was not run is None."""
    return UpdatesStudy(survey, generation, ranking, curve, unit)
