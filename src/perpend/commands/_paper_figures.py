"""The figures of a table or figure that was made again: from its runs, and against the printed values."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from perpend.report import charts
from perpend.report.figure import Figure


def figures(run: Any) -> list[Figure]:
    """The item's figures, one a model; a chart over its models where it has one; printed against measured."""
    from perpend.papers.protocol import find

    item = find(run.results["item"])
    comparison = run.tables["comparison"] if "comparison" in run.tables else pd.DataFrame()
    found = _over_models(item, comparison, run.results["runs"])
    for model, folders in run.results["runs"].items():
        for folder in folders:
            found += _lifted(Path(folder), item.figure, model)
    return [*found, *_against(comparison)]


def _lifted(folder: Path, titles: tuple[str, ...], model: str) -> list[Figure]:
    """Figures of a run by their titles; none where the run is no longer there."""
    from perpend.runs import Run

    if not (folder / "run.json").is_file():
        return []
    source = Run.open(folder)
    module = importlib.import_module(f"perpend.commands.{source.command.replace('-', '_')}")
    return [
        replace(figure, title=f"{figure.title} · {model}" if model else figure.title)
        for figure in module.figures(source)
        if figure.title in titles
    ]


def _over_models(item: Any, comparison: pd.DataFrame, runs: Any) -> list[Figure]:
    """Figure 5a: sink mass over parameters, reversal over sink mass, the paper's models beside those here."""
    if item.compare != "scale" or not len(comparison):
        return []
    from perpend.models.catalog import find as entry_of
    from perpend.papers import published

    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in published("attention", "table-2").entries.values():
        key = (str(entry.more["model"]), "printed")
        rows.setdefault(key, {})[str(entry.more["quantity"])] = entry.value
    for line in comparison.itertuples():
        rows.setdefault((str(line.model), "measured"), {})[line.name] = line.measured
    points = []
    for (model, source), values in rows.items():
        entry = entry_of(model)
        size = entry.parameters if entry else _parameters(runs.get(model, ()))
        if size and "sink_signature" in values and "jensen_shannon" in values:
            points.append(
                {
                    "model": model,
                    "source": source,
                    "parameters": size,
                    "row_sink": values["sink_row"],
                    "signature_sink": values["sink_signature"],
                    "reversal": values["jensen_shannon"],
                }
            )
    table = pd.DataFrame(points)
    drawn = {"name": "model", "series": "source"}
    return [
        Figure(
            "Scale",
            "Do sink mass and reversal rise with scale?",
            {
                "Sink mass over parameters": charts.scatter(
                    table, "parameters", "row_sink", log_x=True, y_label="row sink mass", **drawn
                ),
                "Reversal over sink mass": charts.scatter(
                    table,
                    "signature_sink",
                    "reversal",
                    x_label="signature sink mass",
                    y_label="JS reversal, %",
                    **drawn,
                ),
            },
            table,
            "One point a model; printed ones are Table 2's. A law of scale would be a rise within a family.",
        )
    ]


def _parameters(folders: Any) -> int | None:
    """How many a run's model has; None where the run is no longer there."""
    from perpend.runs import Run

    for folder in folders:
        if (Path(folder) / "run.json").is_file():
            return (Run.open(folder).document.get("model") or {}).get("parameters")
    return None


def _against(comparison: pd.DataFrame) -> list[Figure]:
    """Bars of measured values with their intervals, printed ones as ticks, one figure a unit."""
    if not len(comparison):
        return []
    found = []
    for unit, rows in comparison.groupby(comparison["unit"].fillna(""), sort=False):
        table = rows.reset_index(drop=True)
        names = table["model"].fillna("").astype(str) + " " + table["name"].astype(str)
        table = table.assign(quantity=names.str.strip())
        ticks = {"published": "printed"}
        if not table["published"].notna().any():  # a model that the paper does not have
            ticks = {"range_low": "smallest printed of the paper's models", "range_high": "largest"}
        ends = {"low": "low", "high": "high"} if table["low"].notna().any() else {}
        marks = {"ticks": ticks} if table[list(ticks)].notna().any(axis=None) else {}
        found.append(
            Figure(
                f"Printed and measured{f', {unit}' if unit else ''}",
                "Does this machine measure what the paper prints?",
                charts.bars(table, "measured", by="quantity", label=unit or "value", **marks, **ends),
                table,
                "Bars are measured, thin lines their 95 % intervals where a run has one; ticks are printed.",
            )
        )
    return found
