"""Strategic features with a non-smooth cost: small weights cause no change, and a budget bounds the change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedsim.core.constraints import CountOrZero, IndexOrName, NonNegative, Positive
from fedsim.core.heterogeneity import PerClientNumbers, entry_of_client
from fedsim.shift.strategic import DEFAULT_SPREAD, Strategic


class Elastic(Strategic):
    """x ← x + δ, where δ minimises θᵀδ + ‖δ‖²/2ε_i + τ‖δ‖₁ over ‖δ‖₁ ≤ B, on the strategic features of the base sample.

    In closed form: δ = −Π(ε_i soft(θ, τ)), soft(θ, τ) = sign(θ) max(|θ| − τ, 0), and Π the projection on the ℓ₁ ball of
    radius B, by sorting, without iteration. With τ = 0 and no B it is shift=strategic. δ is differentiable in θ except
    where a feature starts to change or the budget becomes active; there autograd returns a one-sided derivative. A θ^PO
    on such a kink is not found, and the run reports this.

    Args:
        reluctance: τ: features with a smaller weight do not change.
        reach: B; None: no budget.
        **options: of `Strategic`.
    """

    nonsmooth = True

    def __init__(
        self,
        epsilon: PerClientNumbers = 1.0,
        spread: NonNegative = DEFAULT_SPREAD,
        features: Sequence[IndexOrName] | None = None,
        target: CountOrZero = 1,
        seed: int = 0,
        reluctance: NonNegative = 0.1,
        reach: Positive | None = None,
        **options: Any,
    ) -> None:
        super().__init__(epsilon, spread, features, target, seed, **options)
        self.reluctance = reluctance
        self.reach = reach

    def __call__(self, batch: dict[str, Tensor], theta: Tensor) -> dict[str, Tensor]:
        epsilon, direction = entry_of_client(self.epsilons, batch["client"]).to(theta.dtype), self.direction(theta)
        displacement = epsilon * direction.sign() * (direction.abs() - self.reluctance).clamp(min=0)
        return batch | {
            "x": batch["x"] - (displacement if self.reach is None else project_to_l1_ball(displacement, self.reach))
        }


def project_to_l1_ball(point: Tensor, radius: float) -> Tensor:
    """The nearest point [...] of the ℓ₁ ball: all entries shrink towards zero by one number ν, found by sorting.

    ν = max_k (Σ of the k largest − radius)/k, or 0 inside the ball (Duchi et al. 2008).
    """
    size = point.abs().flatten()
    sorted_sizes = size.sort(descending=True).values
    count = torch.arange(1, len(size) + 1, device=size.device, dtype=size.dtype)
    threshold = ((sorted_sizes.cumsum(0) - radius) / count).max().clamp(min=0)
    return point.sign() * (point.abs() - threshold).clamp(min=0)
