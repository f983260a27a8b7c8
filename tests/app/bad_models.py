"""Modules that are no numbers, before or after they begin."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BegunIll(nn.Module):
    """One of its parameters is no number."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layer = nn.Linear(shape.numel() if isinstance(shape, torch.Size) else shape[-1] * shape[-2], classes)
        nn.init.constant_(self.layer.bias, float("nan"))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))
