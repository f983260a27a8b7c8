"""Two problems of the performative board that no paper has: an answer that saturates, and one with a kink.

A board's folder is on the path while it is computed; by hand: PYTHONPATH=experiments/leaderboard/boards.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedsim.core import checks
from fedsim.shift import Shift


class Saturating(Shift):
    """z ← z − γ c tanh(θ / c): demand that falls with prices less and less; not linear in θ.

    Args:
        gamma: γ, the answer to small prices.
        scale: c, where it begins to saturate.
        **options: of every shift: deploy, inertia, references, box, …
    """

    estimator = "mean_x"

    def __init__(self, gamma: float = 3.0, scale: float = 3.0, **options: Any) -> None:
        super().__init__(**options)
        self.gamma = checks.check_not_negative("shift.gamma", gamma)
        self.scale = checks.check_positive("shift.scale", scale)

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        """For one client: x [B, …], θ [d]."""
        answer = self.gamma * self.scale * torch.tanh(theta / self.scale)
        return batch | {"x": batch["x"] - answer.reshape(batch["x"].shape[1:])}


class Kinked(Shift):
    """z ← z − γ max(θ − c, 0): nobody minds prices up to c, where what an answer teaches of its law changes at once.

    Args:
        gamma: γ, the slope above the kink.
        kink: c.
        **options: of every shift.
    """

    estimator = "mean_x"

    def __init__(self, gamma: float = 4.0, kink: float = 1.0, **options: Any) -> None:
        super().__init__(**options)
        self.gamma = checks.check_not_negative("shift.gamma", gamma)
        self.kink = float(kink)

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        """For one client: x [B, …], θ [d]."""
        answer = self.gamma * torch.relu(theta - self.kink)
        return batch | {"x": batch["x"] - answer.reshape(batch["x"].shape[1:])}
