"""The model that is its own prediction: mean estimation and quadratic clients."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from fedsim.core.constraints import Real, validated


@validated
class Mean(nn.Module):
    """Predicts θ whatever the input, [B, *shape] → [B, *shape]; it starts at `start`."""

    def __init__(self, shape: tuple[int, ...], start: Real = 0.0) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((math.prod(shape),), start))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.reshape(x.shape[1:]).expand_as(x)
