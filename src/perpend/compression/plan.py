"""A setting per layer and part from a sensitivity map, at a budget of bytes.

The loss a setting costs at a site is predicted from surgery and one measurement per setting,

    predicted(site, setting) = change(site) · ε²(site, setting) / ε²(site, reference),

with change(site) the rise of the loss when the reference setting's error is injected there alone and ε² the
mean squared local error (of e, or of e⊥). Sites are taken as independent. The choice that minimises the sum
of predictions within the budget is found exactly, as a small integer program.
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
    solution = milp(
        loss / scale,
        constraints=[
            LinearConstraint(one_each, 1, 1),
            LinearConstraint(size[None] / budget, -np.inf, 1 + 1e-12),
        ],
        integrality=np.ones(len(pairs)),
        bounds=Bounds(0, 1),
        options={"mip_rel_gap": 1e-6},
    )
    if solution.x is None:
        raise InputError(f"no plan fits the budget of {budget:,.0f} bytes: {solution.message}")
    taken = solution.x > 0.5
    choice = {site: option for (site, option), used in zip(pairs, taken) if used}
    return Allocation(choice, float(size[taken].sum()), float(loss[taken].sum()), budget)


def predicted_costs(
    changes: Mapping[Site, float],
    errors: Mapping[Any, Mapping[Site, float]],
    sizes: Mapping[Any, Mapping[Site, float]],
    reference: Any,
) -> dict[Site, dict[Any, tuple[float, float]]]:
    """costs for `allocate`; see the module. errors: option -> site -> mean squared error; sizes likewise in
    bytes.

    A change below zero is noise of a small sample and counts as zero.
    """
    if reference not in errors:
        raise InputError(f"the reference {reference!r} is none of the options {list(errors)}")
    costs: dict[Site, dict[Any, tuple[float, float]]] = {}
    for site, change in changes.items():
        base = errors[reference][site]
        costs[site] = {
            option: (
                sizes[option][site],
                max(change, 0.0) * (errors[option][site] / base if base > 0 else 1.0),
            )
            for option in errors
        }
    return costs
