"""Shaded stretches of a training curve leave the curve, and its order, as they are."""

from __future__ import annotations

import re

import pandas as pd
import pytest
import vl_convert

from perpend.commands._checkpoints_figures import _shaded
from perpend.report import charts


@pytest.mark.parametrize("x", ["step", "checkpoint"])
def test_a_shaded_curve_still_has_its_line_and_its_order(x: str) -> None:
    table = pd.DataFrame(
        {
            "step": [1, 10, 100, 1000],
            "checkpoint": ["zero", "ten", "hundred", "thousand"],
            "dispersion": [1.0, 3.0, 2.0, 4.0],
            "disagrees_with_next": [False, False, True, False],
        }
    )
    line = charts.profile(table, "dispersion", x=x, log_x=x == "step")
    picture = vl_convert.vegalite_to_svg(charts.themed(_shaded(table, x, line)).to_dict())
    drawn = re.search(r'mark-line[^>]*><path[^>]*? d="([^"]+)"', picture)
    assert drawn is not None
    across = [float(place) for place in re.findall(r"[ML](-?[\d.]+)", drawn[1])]
    assert len(across) == 4
    assert across == sorted(across)
