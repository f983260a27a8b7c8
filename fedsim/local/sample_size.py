"""The number of samples that a client needs for a bounded error of its performative gradient (profl §5.3)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedsim.core.constraints import Count, NonNegative, Positive, PositiveFraction, validate_arguments


@validate_arguments
class AdaptiveSampleSize:
    """n ≥ 2 (2 ℓ² H ‖Δθ‖⁻² + F²) σ² log(2/φ) / (2Φ − M² η² G⁴ H⁶ ‖Δθ‖² ℓ²); if the denominator is ≤ 0, n is the cap.

    The paper estimates the constants from previous updates without saying how. Here, all from the client's last step:
    ℓ its mean loss, G = ‖L̂₁‖, F = ‖df/dθ‖ and ‖Δθ‖ (Frobenius), σ² = n times the total variance of f̂, and
    M = ‖change of df/dθ‖ / ‖change of θ‖ since H steps before, so that the two windows share no model.

    Args:
        cap: largest n, the size of the batches drawn.
        tolerance: Φ, bound on the error.
        failure: φ, probability with which it may be missed.
        curvature: M where it is known (0 for a linear f); None estimates it.
    """

    def __init__(
        self, cap: Count, tolerance: Positive, failure: PositiveFraction, curvature: NonNegative | None
    ) -> None:
        self.cap = cap
        self.tolerance = tolerance
        self.failure = failure
        self.curvature = curvature

    def __call__(
        self,
        history_count: int,
        lr: Tensor,
        loss: Tensor,
        gradient: Tensor,
        estimated_derivative: Tensor,
        model_displacement: Tensor,
        variance: Tensor,
        curvature: Tensor,
        min_samples: int,
    ) -> Tensor:
        """n [c] int64, between `min_samples` and the cap.

        Args:
            history_count: H.
            lr, loss, variance, curvature: [c] η, ℓ, σ², M.
            gradient: [c, d] L̂₁.
            estimated_derivative: [c, p, d] df/dθ.
            model_displacement: [c, H, d] the rows of Δθ.
            min_samples: fewest samples from which f can be estimated.
        """
        squared_displacement = model_displacement.square().sum((1, 2))
        steepness = estimated_derivative.square().sum((1, 2))
        numerator = (
            2
            * (2 * loss.square() * history_count / squared_displacement + steepness)
            * variance
            * math.log(2 / self.failure)
        )
        curvature_term = curvature * lr * gradient.square().sum(1) * history_count**3 * loss
        denominator = 2 * self.tolerance - curvature_term.square() * squared_displacement
        n = torch.where(
            (denominator > 0) & (squared_displacement > 0),
            numerator / torch.where(denominator > 0, denominator, 1.0),
            self.cap,
        )
        bounded = torch.nan_to_num(n, nan=self.cap).clamp(min=min(min_samples, self.cap), max=self.cap)
        return bounded.ceil().to(torch.int64)
