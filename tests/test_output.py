"""Numbers in tables on stdout: as many digits as tell a column's rows apart."""

from __future__ import annotations

import math

import pandas as pd

from perpend import output


def cells(values: list[float], name: str = "x") -> list[str]:
    return list(output.table(pd.DataFrame({name: values})).columns[0].cells)


def shown(values: list[float]) -> list[str]:
    return [str(cell) for cell in cells(values)]


def test_numbers_have_the_digits_that_tell_them_apart() -> None:
    assert shown([10.8101, 10.8123]) == ["10.8101", "10.8123"]
    assert shown([0.5, 0.25]) == ["0.5", "0.25"]
    assert shown([10.81012345, 10.81012345]) == ["10.81", "10.81"]
    assert shown([1 / 3, 1 / 3 + 1e-12]) == ["0.3333333", "0.3333333"], "no more digits than mean something"
    assert shown([1234.5678, 2.0]) == ["1235", "2"]


def test_zero_has_no_sign_and_gaps_are_a_dash() -> None:
    assert shown([-0.0, 0.5]) == ["0", "0.5"]
    assert shown([math.nan, 0.5, math.inf]) == ["–", "0.5", "inf"]
