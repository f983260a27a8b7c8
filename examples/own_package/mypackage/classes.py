"""Members of one class reduce the score of a linear classifier."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.shift import ResponseDirection, Shift


class OneClass(Shift):
    """x ← x − ε w for samples of class 1, with w the weights for class 1 (minus those for class 0, of two outputs).

    Args:
        epsilon: ε, the sensitivity.
        **options: of every shift.
    """

    estimator = "group_mean"  # the mean of the inputs within each class moves

    def __init__(self, epsilon: float = 0.5, **options: Any) -> None:
        super().__init__(**options)
        self.epsilon = epsilon

    def setup(self, federation, data, model) -> None:
        self.direction = ResponseDirection("OneClass", data.dataset, model, target=1)

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        moved = batch["x"] - self.epsilon * self.direction(theta)
        reacts = (batch["y"] == 1).reshape(-1, *[1] * (moved.dim() - 1))
        return batch | {"x": torch.where(reacts, moved, batch["x"])}
