"""What calibration leaves behind of a matrix's inputs: sums, never the activations.

A method names what it needs ("squares", "magnitudes", "moment"), and only that is accumulated.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from perpend.errors import InputError
from perpend.models.placement import input_device
from perpend.surveys.capture import NO_DOUBLE

NEEDS = ("squares", "magnitudes", "moment")


def check_double(model: nn.Module) -> None:
    """InputError for a model on a device without float64, in which importances, errors and sums are taken."""
    place = input_device(model)
    if place.type in NO_DOUBLE:
        raise InputError(
            f"compression and its error are computed in float64, which {place.type} has not; load the model "
            "with device=cpu"
        )


@dataclass
class Moment:
    """Second moment X^T X of the inputs, exact: the rows themselves until they outnumber the width."""

    width: int
    rows: list[Tensor] = field(default_factory=list)
    held: int = 0
    gram: Tensor | None = None

    def add(self, rows: Tensor) -> None:
        """rows: [tokens, in]."""
        rows = rows.float()
        if self.gram is None and self.held + len(rows) <= self.width:
            self.rows.append(rows.clone())
            self.held += len(rows)
            return
        if self.gram is None:
            self.gram = torch.zeros(self.width, self.width, device=rows.device)
            for earlier in self.rows:
                self.gram.addmm_(earlier.T, earlier)
            self.rows = []
        self.gram.addmm_(rows.T, rows)
        self.held += len(rows)

    def energy(self, delta: Tensor) -> float:
        """Σ_t ‖delta x_t‖² for delta [out, in]: the output error of a change of weights."""
        delta = delta.float()
        if self.gram is not None:
            return float(((delta @ self.gram) * delta).sum(dtype=torch.float64))
        return sum(float((rows @ delta.T).square().sum(dtype=torch.float64)) for rows in self.rows)

    def diagonal_blocks(self, size: int) -> Tensor:
        """[width / size, size, size]: the second moment within each group of consecutive inputs."""
        if self.gram is not None:
            groups = self.width // size
            return torch.stack(
                [self.gram[g * size : (g + 1) * size, g * size : (g + 1) * size] for g in range(groups)]
            )
        rows = torch.cat(self.rows) if self.rows else torch.zeros(0, self.width)
        split = rows.reshape(len(rows), -1, size).transpose(0, 1)
        return split.transpose(1, 2) @ split


@dataclass
class Statistics:
    """Of one matrix's inputs over the calibration text. tokens: how many it saw (an expert may see none)."""

    width: int
    tokens: int = 0
    squares: Tensor | None = None  # [in] float64, Σ x²
    magnitudes: Tensor | None = None  # [in] float64, Σ |x|
    moment: Moment | None = None

    def add(self, rows: Tensor, needs: Iterable[str]) -> None:
        """rows: [tokens, in], what the matrix is multiplied with."""
        self.tokens += len(rows)
        wide = rows.double()
        if "squares" in needs:
            total = wide.square().sum(0)
            self.squares = total if self.squares is None else self.squares + total
        if "magnitudes" in needs:
            total = wide.abs().sum(0)
            self.magnitudes = total if self.magnitudes is None else self.magnitudes + total
        if "moment" in needs:
            if self.moment is None:
                self.moment = Moment(self.width)
            self.moment.add(rows)
