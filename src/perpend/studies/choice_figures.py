"""The figures of an audit of choices: which one decides, and how far its outcomes lie apart."""

from __future__ import annotations

from typing import Any

from perpend.report import charts
from perpend.report.figure import Figure


def figures(choices: Any) -> list[Figure]:
    """Shares by choice, and what each level of each choice gives, of what `studies.choices.audit` found."""
    shares, kind = choices.tables["shares"], choices.results["kind"]
    ends = {"low": "low", "high": "high"} if "low" in shares else {}
    found = [
        Figure(
            "What decides the statistic",
            "Which convention does the outcome depend on?",
            charts.bars(
                shares,
                "involved",
                by="choice",
                label="share of the variance over settings",
                percent=True,
                ticks={"alone": "by itself"},
                **ends,
            ),
            shares,
            "A bar is the share of everything in which the choice takes part, a mark the share it has by "
            "itself; bars of choices that work together overlap. Lines are 95 % intervals over text.",
        )
    ]
    levels = choices.tables["levels"].assign(
        setting=lambda t: [f"{a}: {b}" for a, b in zip(t["choice"], t["level"])]
    )
    if kind == "number":
        chart = charts.bars(levels, "mean", by="setting", low="least", high="most", label="statistic")
        said = "Mean over all settings with that level; lines from the least to the most."
    else:
        name = {"ranking": "Kendall's τ", "partition": "adjusted Rand index"}[kind]
        chart = charts.bars(shares, "agreement", by="choice", label=name, reference={"the same": 1.0})
        said = "Mean agreement of outcomes that differ in this one choice alone: 1 is the same outcome."
    table = levels.drop(columns="setting") if kind == "number" else shares
    title = "Levels" if kind == "number" else "Agreement"
    found.append(Figure(title, "How far do the outcomes lie apart?", chart, table, said))
    return found
