"""What a prune study says: criteria that remove the same heads are named together."""

from __future__ import annotations

from types import SimpleNamespace

from perpend.studies.prune_study import findings

LOSSES = SimpleNamespace(base_perplexity=100.0, tokens=1000, sets=[1], cost=1.0, zero_anyway=[])
CHANGE = {"loss_change": 0.0, "loss_change_low": -0.1, "loss_change_high": 0.1, "sparsity": 0.25}


def said(**perplexities: float) -> str:
    records = [
        {"criterion": name, "perplexity": value, "over_base": value / 100, **CHANGE}
        for name, value in perplexities.items()
    ]
    return findings(records, LOSSES, None, {}, None)[1]


def test_tied_criteria_are_named_together_in_one_rounding() -> None:
    line = said(js=101.0, content=100.4, js_l1=101.0)
    assert line.startswith("At 25% sparsity content costs least (perplexity 100.40, 1.00 × base")
    assert line.endswith("and js and js_l1 most (101.00, 1.01 × base).")


def test_where_all_criteria_tie_none_costs_most() -> None:
    line = said(js=101.0, content=101.0)
    assert line.startswith("At 25% sparsity js and content cost the same (perplexity 101.00")
    assert "most" not in line
    assert "js costs least" in said(js=101.0)
