"""A shift that saturates: data react to θ linearly if it is small, and by at most ε c if it is large."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, Positive
from fedsim.shift import Shift


class Saturating(Shift):
    """x ← x + ε c tanh(θ / c); `shift=location` is its limit for large c. For mean estimation (model=mean).

    Args:
        epsilon: ε, the sensitivity at small θ; at 1 or above, repeated training need not converge.
        scale: c, where it begins to saturate.
        **options: of every shift: deploy, inertia, mixture, references, references_seconds, box.
    """

    estimator = "mean_x"  # what local=pofl and profl may estimate of the law: where x has its mean

    def __init__(self, epsilon: NonNegative = 0.9, scale: Positive = 5.0, **options: Any) -> None:
        super().__init__(**options)
        self.epsilon = epsilon
        self.scale = scale

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        """Written for one client: x [B, …], θ [d]. Gradients flow through it where a rule wants them."""
        answer = self.epsilon * self.scale * torch.tanh(theta / self.scale)
        return batch | {"x": batch["x"] + answer.reshape(batch["x"].shape[1:])}
