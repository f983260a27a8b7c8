"""FedOpt: an adaptive optimiser on the server (Reddi et al., ICLR 2021, Alg. 2)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core.constraints import FractionPerSeed, OneOf, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.per_seed import as_per_seed, largest_value
from fedsim.core.report import Report
from fedsim.strategies.strategy import S, ServerRateStrategy, State

OPTIMIZERS = ("adam", "yogi", "adagrad")
MAX_TAU = 1e18  # τ² must be representable in single precision


@dataclass
class FedOptState(State):
    """Adds the moments, [R, d] each."""

    first: Tensor
    second: Tensor


class AdaptiveServerStep(ServerRateStrategy[S]):
    """A strategy whose server divides a mean of updates by the root of a mean of their squares.

    Args:
        server_lr: η_g, or a list of one per seed.
        beta1, beta2: decay rates of the moments, or lists likewise.
        tau: τ, the degree of adaptivity, or a list likewise.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions, renormalised over A.
    """

    def __init__(
        self,
        server_lr: PositivePerSeed = 0.1,
        beta1: FractionPerSeed = 0.9,
        beta2: FractionPerSeed = 0.99,
        tau: PositivePerSeed = 1e-3,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.weighting = weighting
        self.beta1, self.beta2, self.tau = as_per_seed(beta1), as_per_seed(beta2), as_per_seed(tau)
        if largest_value(self.beta1) == 1:
            raise ConfigError(
                key="beta1", value=beta1, needs="trains nothing: the first moment stays 0; it must be below 1"
            )
        if not largest_value(self.tau) < MAX_TAU:
            raise ConfigError(
                key="tau", value=tau, needs=f"must be below {MAX_TAU:g}: its square starts the second moment"
            )

    def unless_empty(self, cohort: Cohort, new_state: S, old_state: S) -> S:
        """The new state, and the old one where nobody took part."""
        fields = {name: cohort.where_nonempty(value, vars(old_state)[name]) for name, value in vars(new_state).items()}
        return replace(new_state, **fields)


class FedOpt(AdaptiveServerStep[FedOptState]):
    """Δ = −mean_A G_i, weighted by w_i; u ← β₁ u + (1 − β₁) Δ; v by the optimiser; x ← x + η_g u / (√v + τ).

    v ← β₂ v + (1 − β₂) Δ² (adam), v − (1 − β₂) Δ² sign(v − Δ²) (yogi), v + Δ² (adagrad); v starts at τ². As in the
    paper there is no bias correction.

    Args:
        optimizer: adam, yogi or adagrad.
        server_lr: η_g, or a list of one per seed.
        beta1, beta2: decay rates of the moments, or lists likewise.
        tau: τ, the degree of adaptivity, or a list likewise.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions, renormalised over A.
    """

    effective_if = (
        EffectiveIf("beta2", lambda component, run: component.optimizer != "adagrad", "{at}.optimizer=adam or yogi"),
    )

    server_sees, supports_stale = "mean", True

    def __init__(
        self,
        optimizer: Annotated[str, OneOf(*OPTIMIZERS)] = "adam",
        server_lr: PositivePerSeed = 0.1,
        beta1: FractionPerSeed = 0.9,
        beta2: FractionPerSeed = 0.99,
        tau: PositivePerSeed = 1e-3,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, beta1, beta2, tau, weighting)
        self.optimizer = optimizer

    def initial(self, model: Tensor, federation: Federation) -> FedOptState:
        return FedOptState(model, torch.zeros_like(model), self.tau**2 * torch.ones_like(model))

    def aggregate(self, state: FedOptState, report: Report, t: int) -> FedOptState:
        cohort = report.cohort
        delta = -self.mean(cohort, report.innovation)
        first_moment = self.beta1 * state.first + (1 - self.beta1) * delta
        second_moment = self._second_moment(state.second, delta.square())
        model = state.model + self.server_lr * first_moment / (second_moment.sqrt() + self.tau)
        return self.unless_empty(cohort, FedOptState(model, first_moment, second_moment), state)

    def _second_moment(self, v: Tensor, square: Tensor) -> Tensor:
        if self.optimizer == "adagrad":
            return v + square
        if self.optimizer == "yogi":
            return v - (1 - self.beta2) * square * torch.sign(v - square)
        return self.beta2 * v + (1 - self.beta2) * square
