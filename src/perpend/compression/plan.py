"""A setting per layer and part from sensitivity maps, at a budget of bytes.

The cost of giving a site another setting is measured, not extrapolated: the change of the uniformly
compressed model's loss when that site alone moves to it (surgery between two compressed models). Sites are
then taken as independent, and the choice with the least summed cost within the budget is found exactly, as
an integer program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from perpend.errors import InputError

Site = tuple[int, str]


@dataclass(frozen=True)
class Allocation:
    """choice: site -> option. bytes and loss are totals; loss is the prediction, in nats a token."""

    choice: dict[Site, Any]
    bytes: float
    loss: float
    budget: float


def allocate(costs: Mapping[Site, Mapping[Any, tuple[float, float]]], budget: float) -> Allocation:
    """costs: site -> option -> (bytes, predicted loss). InputError where even the smallest are too large."""
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import csr_matrix

    sites = list(costs)
    pairs = [(site, option) for site in sites for option in costs[site]]
    size = np.array([costs[s][o][0] for s, o in pairs])
    loss = np.array([costs[s][o][1] for s, o in pairs])
    if not pairs or not np.isfinite(size).all() or not np.isfinite(loss).all():
        raise InputError(
            "a plan needs at least one site, and finite bytes and losses for each of its options"
        )
    least = sum(min(b for b, _ in costs[s].values()) for s in sites)
    if least > budget * (1 + 1e-12):
        raise InputError(f"the smallest options need {least:,.0f} bytes, the budget is {budget:,.0f}")
    index = {site: i for i, site in enumerate(sites)}
    rows = np.array([index[s] for s, _ in pairs])
    one_each = csr_matrix(
        (np.ones(len(pairs)), (rows, np.arange(len(pairs)))), shape=(len(sites), len(pairs))
    )
    scale = max(float(np.abs(loss).max()), 1e-300)
    constraints = [
        LinearConstraint(one_each, 1, 1),
        LinearConstraint(size[None] / budget, -np.inf, 1 + 1e-12),
    ]
    while True:
        solution = milp(
            loss / scale,
            constraints=constraints,
            integrality=np.ones(len(pairs)),
            bounds=Bounds(0, 1),
            options={"mip_rel_gap": 1e-6},
        )
        if solution.x is None:
            raise InputError(f"no plan fits the budget of {budget:,.0f} bytes: {solution.message}")
        taken = solution.x > 0.5
        if size[taken].sum() <= budget * (1 + 1e-12):
            break
        # the solver takes a millionth too much for equal, we do not: this one choice is no solution
        constraints.append(LinearConstraint(taken[None].astype(float), -np.inf, len(sites) - 1))
    choice = {site: option for (site, option), used in zip(pairs, taken) if used}
    return Allocation(choice, float(size[taken].sum()), float(loss[taken].sum()), budget)


def site_costs(
    changes: Mapping[Any, Mapping[Site, float]], sizes: Mapping[Any, Mapping[Site, float]]
) -> dict[Site, dict[Any, tuple[float, float]]]:
    """costs for `allocate`; changes, sizes: option -> site -> loss change of moving there, bytes."""
    first = next(iter(changes.values()))
    return {site: {o: (sizes[o][site], changes[o][site]) for o in changes} for site in first}
