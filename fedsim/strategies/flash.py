"""Flash: an adaptive optimiser on the server that adapts to concept drift (Panchal et al., ICML 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.federation import Federation
from fedsim.core.report import Report
from fedsim.strategies.fedopt import AdaptiveServerStep
from fedsim.strategies.strategy import State


@dataclass
class FlashState(State):
    """Adds the moments and the drift term, [R, d] each."""

    first: Tensor
    second: Tensor
    drift: Tensor


class Flash(AdaptiveServerStep[FlashState]):
    """FedAdam with a drift term d: Δ = −mean_A G_i, weighted by w_i; u ← β₁ u + (1 − β₁) Δ; v' = β₂ v + (1 − β₂) Δ²;
    β₃ = v / (|Δ² − v'| + v); d ← β₃ d + (1 − β₃) (Δ² − v'); x ← x + η_g u / (max(√v' − d, 0) + τ); then v ← v'.

    Updates that become larger than before, as after a change of the data, make d positive and the steps larger; updates
    that become smaller make them smaller. d is compared with √v in the units of the parameters: where updates are not
    small against 1, d exceeds √v, and τ alone limits the step. The maximum with 0, without which such a step would
    change its sign, is not in the published implementation (FL4Health's, from which the formula is taken); v starts at
    τ² as in FedOpt. The paper's clients also stop early by their validation loss; here they take the steps of the run.

    Args:
        server_lr: η_g, or a list of one per seed.
        beta1, beta2: decay rates of the moments, or lists likewise.
        tau: τ, the degree of adaptivity, or a list likewise.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions, renormalised over A.
    """

    server_sees = "mean"

    def initial(self, model: Tensor, federation: Federation) -> FlashState:
        zeros = torch.zeros_like(model)
        return FlashState(model, zeros, self.tau**2 * torch.ones_like(model), zeros.clone())

    def aggregate(self, state: FlashState, report: Report, t: int) -> FlashState:
        cohort = report.cohort
        delta = -self.mean(cohort, report.innovation)
        first_moment = self.beta1 * state.first + (1 - self.beta1) * delta
        second_moment = self.beta2 * state.second + (1 - self.beta2) * delta.square()
        excess = delta.square() - second_moment
        denominator = excess.abs() + state.second
        beta3 = torch.where(denominator > 0, state.second / denominator, 1.0)  # at 0 / 0 the term keeps its value
        drift = beta3 * state.drift + (1 - beta3) * excess
        scale = (second_moment.sqrt() - drift).clamp(min=0) + self.tau
        model = state.model + self.server_lr * first_moment / scale
        return self.unless_empty(cohort, FlashState(model, first_moment, second_moment, drift), state)
