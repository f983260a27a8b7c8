"""Sharpness-aware local steps: FedSAM under strategy=fedavg (Qu et al., ICML 2022; Caldarola et al., ECCV 2022)."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from fedsim.core.constraints import NonNegative
from fedsim.data.samples import Batch
from fedsim.local.rule import Carry, GradientStep, Objective
from fedsim.local.sgd import SGD


class SAM(SGD):
    """x ← x − η ∇f(x + ρ g / ‖g‖), g = ∇f(x) on the same batch, one norm over the complete row; two gradients per step.

    With `adaptive` (ASAM) every coordinate is scaled by t = |x| + 0.01: x + ρ t² g / ‖t g‖.

    Args:
        rho: ρ; 0 is SGD.
        adaptive: scale the perturbation by the parameters.
        **options: of SGD; clip, weight decay and a strategy's correction act only on the second gradient.
    """

    def __init__(self, rho: NonNegative = 0.05, adaptive: bool = False, **options: Any) -> None:
        super().__init__(**options)
        self.rho, self.adaptive = rho, adaptive

    def descents(self) -> tuple[GradientStep, ...]:
        return ()

    def step(self, carry: Carry, batch: Batch, lr: Tensor, objective: Objective) -> tuple[Carry, Tensor]:
        params = carry["params"]
        gradient, loss = objective.gradient(params, batch)
        scale = params.abs() + 0.01 if self.adaptive else gradient.new_ones(())
        ascent = self.rho * scale.square() * gradient / ((scale * gradient).norm() + 1e-12)
        gradient, _ = objective.gradient(params + ascent, batch)
        return self.updated(carry, gradient, lr), loss
