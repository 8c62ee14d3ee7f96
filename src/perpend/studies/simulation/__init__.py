"""Every number of the attention-rows paper that needs no model, computed and set beside what is printed.

    simulation = simulate(Settings(samples=20_000, seed=7))
    simulation.checks        # a table: paper value, measured value, interval, reproduced or by how much not

A part is one module here with `ORDER` and `part(settings) -> Part`; a new one is found by itself.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from perpend.progress import Progress, silent
from perpend.studies.simulation.checks import CONFIDENCE, Check, Part, Settings

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Check", "Part", "Settings", "Simulation", "parts", "simulate"]

Store = Callable[[str, Callable[[], Any]], Any]


@dataclass(frozen=True)
class Simulation:
    """All parts together: the comparison and the tables behind the figures."""

    checks: pd.DataFrame
    tables: dict[str, pd.DataFrame]
    results: dict[str, Any]
    findings: list[str]
    conventions: dict[str, Any]


def parts() -> Iterator[tuple[str, Callable[[Settings], Part]]]:
    """(name, part) of every module here that has one, in their order."""
    names = (info.name for info in pkgutil.iter_modules(__path__))
    modules = [importlib.import_module(f"{__name__}.{name}") for name in names]
    for module in sorted((m for m in modules if hasattr(m, "part")), key=lambda m: m.ORDER):
        yield module.__name__.rpartition(".")[2], module.part


@contextmanager
def one_thread() -> Iterator[None]:
    """torch on one thread inside: arrays here are small, and sums keep their order on any machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def simulate(
    settings: Settings = Settings(),  # noqa: B008  (frozen)
    *,
    store: Store = lambda name, compute: compute(),
    progress: Progress = silent,
) -> Simulation:
    """Runs every part. The same settings give the same numbers on one machine.

    store(name, compute): returns compute() or what an interrupted run has kept, see perpend.runs.
    """
    import pandas as pd

    found = list(parts())
    done: dict[str, Part] = {}
    with one_thread(), progress(total=len(found), unit="parts", description="simulate") as advance:
        for name, part in found:
            packed = store(name, lambda part=part: part(settings).packed())
            done[name] = Part.unpacked(packed)
            advance(1)
    checks = pd.DataFrame([vars(check) for part in done.values() for check in part.checks])
    missed = checks[~checks["reproduced"]]
    by_kind = checks.groupby("kind")["reproduced"].agg(["sum", "size"])
    words = ", ".join(f"{int(row['sum'])} of {int(row['size'])} {kind}" for kind, row in by_kind.iterrows())
    findings = [f"Reproduced: {words} values and statements."]
    findings += [
        f"Not reproduced: {line.item}, {line.quantity}: the paper has {line.paper}, measured "
        f"{line.measured:.6g}, off by {line.off:.3g} beyond the interval."
        for line in missed.itertuples()
    ]
    results = {
        "checks": len(checks),
        "reproduced": int(checks["reproduced"].sum()),
        "by_item": {
            str(item): {"checks": len(own), "reproduced": int(own["reproduced"].sum())}
            for item, own in checks.groupby("item", sort=False)
        },
        "not_reproduced": [
            {"item": x.item, "quantity": x.quantity, "paper": x.paper, "measured": x.measured, "off": x.off}
            for x in missed.itertuples()
        ],
        **{name: part.results for name, part in done.items() if part.results},
    }
    return Simulation(
        checks=checks,
        tables={name: table for part in done.values() for name, table in part.tables.items()},
        results=results,
        findings=findings + [line for part in done.values() for line in part.findings],
        conventions={
            "units": "the comparison is in percent where the paper prints percent; tables hold fractions",
            "interval": f"measured ± {CONFIDENCE:.0%} of both sides' sampling error + half a printed digit",
            "content": "clipped at 1e-12 and re-closed before rows are built",
            "jensen_shannon": "nats, not the square root",
            "samples": settings.samples,
        },
    )
