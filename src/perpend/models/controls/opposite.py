"""A move of the edit's size along y⊥: s⊥ = 1 − |1 − s∥|·‖y∥‖/‖y⊥‖."""

from __future__ import annotations

import torch
from torch import Tensor

from perpend.models.controls import Control, Move


def move(m: Move) -> Tensor:
    along = m.along
    across = m.y - along
    length = m.norm(across)
    share = torch.where(length > 0, m.norm(along) / torch.where(length > 0, length, 1.0), 0.0)
    return m.y - abs(1.0 - m.parallel) * share * across


CONTROL = Control("opposite", "a move of the same norm across the reference", move, place=3)
