"""Linear prediction: logistic regression with cross-entropy, linear regression with squared loss."""

from __future__ import annotations

import math

from torch import Tensor, nn


class Linear(nn.Module):
    """One linear layer on the flattened input, [B, *shape] → [B, classes]; it starts at zero, as convex problems do."""

    samplewise = True

    def __init__(self, shape: tuple[int, ...], classes: int = 1, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(shape), classes, bias=bias)
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(1))
