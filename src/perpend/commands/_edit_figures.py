"""The figures of a sweep of edits, from its run folder."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from perpend.commands._edit_study_figures import figures as studies
from perpend.report import charts
from perpend.report.figure import Figure


def figures(run: Any) -> list[Figure]:
    """Changes by edit and control, curves over each scale, the loss over the grid; then the other studies."""
    found = _sweep(run.tables["cells"]) if "cells" in run.tables else []
    if (
        "positions" in run.tables and "kl" in run.tables["positions"]
    ):  # runs of old had losses alone, one a column
        found += _positions(run.tables["positions"], run.tables["cells"])
    return found + studies(run)


def _sweep(cells: pd.DataFrame) -> list[Figure]:
    choices = [name for name in ("layers", "heads") if name not in cells]
    edits = cells[cells["site"] != "unedited"].assign(**dict.fromkeys(choices))
    edits["name"] = [_name(row) for row in edits.to_dict("records")]
    edits["kind"] = edits["control"].astype(object).where(edits["control"].notna(), "edit")
    found = [
        Figure(
            "Change of the loss",
            "What does scaling one part cost, beside moves of the same size that go elsewhere?",
            _changes(edits),
            edits,
            "Paired with the unedited model on the same tokens; intervals over sequences. An edit that costs "
            "less than its random control is tolerated for its direction, not for its size.",
        )
    ]
    plain = edits[edits["control"].isna() & edits["layers"].isna() & edits["heads"].isna()]
    for scale, other, symbol in (("parallel", "perpendicular", "s∥"), ("perpendicular", "parallel", "s⊥")):
        curve = plain[(plain[other] == 1.0)]
        if not len(curve) or curve.groupby("site")[scale].nunique().max() < 2:
            continue
        points = pd.concat([curve, *(_one(curve, site, scale) for site in curve["site"].unique())])
        points = points.assign(series=_series(points)).sort_values(["series", scale])
        found.append(
            Figure(
                f"Loss over {symbol}",
                f"How far from 1 may {symbol} go before the model notices?",
                charts.profile(
                    points,
                    "change",
                    x=scale,
                    series="series",
                    low="change_low",
                    high="change_high",
                    label="change of the loss (nats)",
                    x_label=symbol,
                    reference={"0.05 nats": 0.05},
                ),
                points,
                "Each line is a site. The wider the flat stretch around 1, the less the model depends on it.",
            )
        )
    # a cross through (1, 1) is what the two curves above show; a map needs edits of both scales at once
    grid = plain.groupby(["site", "reference"], dropna=False).filter(
        lambda part: ((part["parallel"] != 1.0) & (part["perpendicular"] != 1.0)).any()
    )
    if len(grid):
        found.append(_surfaces(grid))
    return found


def _changes(edits: pd.DataFrame) -> Any:
    """Bars of all edits, or of each site on an axis of its own where they are many; controls below theirs."""
    one = edits["name"].nunique() <= 8
    named = edits.assign(
        row=[
            _row(row["name"] if one else _scales(row), str(row["kind"])) for row in edits.to_dict("records")
        ],
        series=_series(edits),
    )
    told = {
        "low": "change_low",
        "high": "change_high",
        "label": "change of the loss (nats per token)",
        "reference": {"unedited": 0.0},
        "grouped": False,
    }
    charts_of = {
        "" if one else str(site): charts.bars(
            part,
            "change",
            by="row",
            series="kind" if edits["kind"].nunique() > 1 else None,
            kinds=list(dict.fromkeys(edits["kind"])),
            **told,
        )
        for site, part in ([("", named)] if one else named.groupby("series", sort=False))
    }
    return charts_of[""] if one else charts_of


def _row(name: str, kind: str) -> str:
    return name if kind == "edit" else f"{name}: {kind}"


SHOWN = 5  # lines in colours of their own


def _positions(positions: pd.DataFrame, cells: pd.DataFrame) -> list[Figure]:
    """KL along the sequence, in stretches that double; the farthest edits where there are many."""
    edits = cells.reset_index(drop=True)
    edits = edits[(edits["site"] != "unedited") & edits["control"].isna()]
    scales = [edits[name].map(_number) for name in ("parallel", "perpendicular")]
    edits = edits.assign(
        across=scales[1] != 1.0,  # parallel edits first, the farthest of each site
        near=-sum((scale - 1).abs() for scale in scales).fillna(0.0),
    ).sort_values(["across", "near"], kind="stable")
    turn = edits.groupby(["site", "reference"], dropna=False).cumcount()
    first = edits.assign(turn=turn).sort_values("turn", kind="stable").index[:SHOWN]
    own = positions[positions["cell"].isin(list(first))]
    if not len(own):
        return []
    start = 2 ** np.floor(np.log2(own["token"])).astype(int)
    means = own.assign(token=start).groupby(["edit", "token"], sort=False, as_index=False)
    means = means[["loss", "kl", "top1_agreement"]].mean()
    return [
        Figure(
            "Along the sequence",
            "Does an edit do more where there is more context?",
            charts.profile(
                means,
                "kl",
                x="token",
                series="edit",
                label="KL from the unedited model (nats)",
                x_label="first token of the stretch",
                log_x=True,
            ),
            means,
            "Means over sequences and over stretches that double in length. Every token by itself is in "
            "positions.csv.",
        )
    ]


def _number(scale: object) -> float:
    return float(scale) if isinstance(scale, (int, float)) else float("nan")


def _surfaces(grid: pd.DataFrame) -> Figure:
    return Figure(
        "Loss over both scales",
        "How do the two scales act together?",
        {
            str(name): charts.surface(part, "change", x="parallel", y="perpendicular", middle=0.0)
            for name, part in grid.assign(series=_series(grid)).groupby("series")
        },
        grid,
        "Change of the loss in nats against the unedited model at (1, 1).",
    )


def _one(curve: pd.DataFrame, site: str, scale: str) -> pd.DataFrame:
    """The unedited model as a point of each of a site's curves."""
    rows = curve[curve["site"] == site].drop_duplicates("reference").copy()
    rows[[scale]] = 1.0
    rows[["change", "change_low", "change_high", "kl"]] = 0.0
    return rows


def _series(table: pd.DataFrame) -> list[str]:
    return [
        site if not isinstance(reference, str) else f"{site} ({reference})"
        for site, reference in zip(table["site"], table["reference"])
    ]


def _name(row: dict[str, Any]) -> str:
    reference = f" ({row['reference']})" if isinstance(row["reference"], str) else ""
    return f"{row['site']}{reference}  {_scales(row)}"


def _scales(row: dict[str, Any]) -> str:
    chosen = "".join(f"  {key} {row[key]}" for key in ("layers", "heads") if pd.notna(row[key]))
    return f"s∥ {row['parallel']}  s⊥ {row['perpendicular']}{chosen}"
