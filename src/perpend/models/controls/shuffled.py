"""The same edit against the reference of another, earlier token: a reference, but not the vector's own."""

from __future__ import annotations

import torch
from torch import Tensor

from perpend.models.controls import Control, Move, along


def move(m: Move) -> Tensor:
    # An earlier token's, so that nothing of the future leaks in; token 0 has only its own.
    steps = torch.arange(m.z.shape[1])
    order = (torch.rand(len(steps), generator=m.generator) * steps).long().to(m.z.device)
    return m.y + (m.parallel - 1.0) * along(m.y, m.z[:, order], m.axes)


CONTROL = Control("shuffled", "the same edit against another token's reference", move, place=2)
