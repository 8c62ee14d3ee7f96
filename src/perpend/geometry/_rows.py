"""What a metric sees of a set of rows: their composition, its logs, their sink, after the sink policy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..errors import InputError
from ._arrays import Array, Kind, Sink, log_ratios, parts, positive, probabilities, sink_parts
from .sink import drop

POLICIES = ("keep", "drop")


@dataclass(frozen=True)
class Rows:
    """Rows (..., parts) in float64, as probabilities or as logs.

    policy "keep" compares whole rows; "drop" compares what is left, re-closed, when the sink's columns go.
    `weight` is λ of the weighted family, for the metric that takes it.
    """

    values: Tensor
    log: bool = False
    sink: Sink | None = None
    policy: str = "keep"
    weight: float | None = None
    name: str = "rows"
    room: float | None = None

    @classmethod
    def checked(
        cls,
        kind: Kind,
        rows: Array,
        *,
        log: bool,
        sink: Sink | None,
        policy: str,
        weight: float | None,
        name: str = "rows",
    ) -> Rows:
        """Rows with their conventions checked; the values are checked where a metric reads them."""
        values = kind.take(rows).double().contiguous()  # equal rows have equal sums, to the bit
        parts(values, 2, name)
        if policy not in POLICIES:
            raise InputError(f"unknown sink policy {policy!r}; known: {', '.join(POLICIES)}")
        if sink is not None:
            sink_parts(sink, values.shape[-1])
        elif policy == "drop":
            raise InputError("policy 'drop' needs to know the sink: pass sink=0, or the indices of a block")
        return cls(values, log, sink, policy, weight, name, kind.room)

    @cached_property
    def probabilities(self) -> Tensor:
        """The compared composition, summing to one; a row that does not is refused."""
        p = probabilities(self.values, log=self.log, name=self.name, room=self.room)
        if self.policy == "keep":
            return p
        left = self._without_sink(self.values if self.log else p)
        return probabilities(left, log=self.log, name=f"content of {self.name}")

    @cached_property
    def logs(self) -> Tensor:
        """Logs of the compared parts, which must be positive, on a scale of their own."""
        values = positive(self.values, log=self.log, name=self.name)
        return log_ratios(values if self.policy == "keep" else self._without_sink(values), log=self.log)

    @cached_property
    def content_logs(self) -> Tensor:
        """Logs of the content's parts, whatever the policy."""
        return replace(self, policy="drop").logs

    def _without_sink(self, values: Tensor) -> Tensor:
        if self.sink is None:
            raise InputError(
                "the content of a row is what the sink leaves: pass sink=0, or the indices of a block"
            )
        return drop(values, self.sink)

    def detached_from_zero(self) -> Tensor:
        """Probabilities no smaller than the smallest normal number, for formulas that divide by them."""
        return self.probabilities.clamp_min(torch.finfo(torch.float64).tiny)
