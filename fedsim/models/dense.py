"""Linear models, multi-layer perceptrons, and the model of mean estimation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from fedsim.core.constraints import Count, Fraction, Real, validate_arguments


@validate_arguments
class MLP(nn.Module):
    """Fully connected layers with ReLU between them, [B, *shape] → [B, classes]; 2×200 is the field's usual one.

    Args:
        hidden: width of each hidden layer.
        dropout: share of every hidden layer's outputs that is dropped in training.
    """

    samplewise = True

    def __init__(
        self, shape: tuple[int, ...], classes: int = 1, hidden: Sequence[Count] = (200, 200), dropout: Fraction = 0.0
    ) -> None:
        super().__init__()
        widths = [math.prod(shape), *hidden]
        layers: list[nn.Module] = [nn.Flatten()]
        for a, b in itertools.pairwise(widths):
            layers += [nn.Linear(a, b), nn.ReLU()] + ([nn.Dropout(dropout)] if dropout else [])
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], classes))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


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


@validate_arguments
class Mean(nn.Module):
    """Predicts θ whatever the input, [B, *shape] → [B, *shape]; it starts at `start`."""

    def __init__(self, shape: tuple[int, ...], start: Real = 0.0) -> None:
        super().__init__()
        self.theta = nn.Parameter(torch.full((math.prod(shape),), start))

    def forward(self, x: Tensor) -> Tensor:
        return self.theta.reshape(x.shape[1:]).expand_as(x)
