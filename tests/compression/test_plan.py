"""Plans: the integer program against all choices, and the budget."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from perpend.compression.plan import allocate, site_costs
from perpend.errors import InputError


@pytest.mark.parametrize("seed", range(12))
def test_the_choice_is_the_best_of_all(seed):
    rng = np.random.default_rng(seed)
    sites = [(layer, part) for layer in range(3) for part in ("attn", "mlp")]
    costs = {
        site: {
            bits: (float(bits * rng.integers(50, 99)), float(rng.normal(1 / bits, 0.1))) for bits in (2, 3, 4)
        }
        for site in sites
    }
    budget = sum(options[3][0] for options in costs.values())
    best = min(
        sum(costs[s][o][1] for s, o in zip(sites, pick))
        for pick in itertools.product((2, 3, 4), repeat=len(sites))
        if sum(costs[s][o][0] for s, o in zip(sites, pick)) <= budget
    )
    got = allocate(costs, budget)
    assert got.loss == pytest.approx(best, abs=1e-9)
    assert got.bytes <= budget
    assert got.bytes == pytest.approx(sum(costs[s][o][0] for s, o in got.choice.items()))
    assert set(got.choice) == set(sites)


def test_budgets_that_cannot_be_met_and_empty_plans():
    costs = {(0, "attn"): {2: (10.0, 1.0), 4: (20.0, 0.5)}}
    with pytest.raises(InputError, match="smallest options need 10"):
        allocate(costs, 9.0)
    assert allocate(costs, 10.0).choice == {(0, "attn"): 2}
    with pytest.raises(InputError, match="at least one site"):
        allocate({}, 1.0)
    with pytest.raises(InputError, match="finite"):
        allocate({(0, "attn"): {2: (10.0, float("nan"))}}, 100.0)


def test_costs_are_laid_out_by_site():
    changes = {3: {(0, "attn"): 0.0}, 2: {(0, "attn"): 0.3}}
    sizes = {3: {(0, "attn"): 30.0}, 2: {(0, "attn"): 20.0}}
    assert site_costs(changes, sizes) == {(0, "attn"): {3: (30.0, 0.0), 2: (20.0, 0.3)}}


def test_a_byte_too_much_is_too_much():
    """Of a billion bytes the solver takes a few for none."""
    large = 10**9
    costs = {
        (0, "attn"): {2: (large, 0.0), 3: (large + 2, -1.0)},
        (1, "attn"): {2: (large, 0.0), 3: (large + 1, -0.5)},
    }
    assert allocate(costs, 2 * large).choice == {(0, "attn"): 2, (1, "attn"): 2}
    within = allocate(costs, 2 * large + 1)
    assert within.choice == {(0, "attn"): 2, (1, "attn"): 3}
    assert within.bytes == 2 * large + 1
    assert allocate(costs, 2 * large + 3).loss == -1.5
