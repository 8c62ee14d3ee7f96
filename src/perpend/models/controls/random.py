"""A move of the edit's size in a random direction: what any push of that size does."""

from __future__ import annotations

import torch
from torch import Tensor

from perpend.models.controls import Control, Move


def move(m: Move) -> Tensor:
    noise = torch.randn(m.y.shape, generator=m.generator, dtype=torch.float32).to(m.y)
    return m.y + (m.parallel - 1.0) * m.norm(m.along) * (noise / m.norm(noise))


CONTROL = Control("random", "a move of the same norm in a random direction", move, place=1)
