"""FedNova: normalised averaging of clients with different numbers of local steps (Wang et al., NeurIPS 2020)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, PositivePerSeed
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Weighting
from fedsim.core.report import Report
from fedsim.local import SGD, LocalRule
from fedsim.local.schedules import Constant
from fedsim.strategies.fedavg import FedAvg
from fedsim.strategies.strategy import State


class FedNova(FedAvg):
    """x ← x − η_g mean_{i∈A}(a_i) mean_{i∈A}(G_i / a_i), a_i the sum of the weights that client i's steps give to
    gradients; means are weighted by w_i.

    With plain steps a_i is the number of local steps (times their learning rates, which may vary); with local=momentum,
    ρ its momentum, [s − ρ (1 − ρ^s) / (1 − ρ)] / (1 − ρ), as in the authors' program. With Nesterov momentum a_i is the
    weight of the steps that are taken, s + ρ times that; the program uses that of plain momentum in this case too. With
    a proximal term μ (x − x^t) in the local gradient, a_i = [1 − (1 − η_l μ)^s] / (η_l μ), times η_l as above.

    FedAvg converges to the minimum of an objective in which clients are weighted by their numbers of steps; here the
    weights are w_i. No memory; clients send a_i with the model. It is FedAvg if all clients take the same number of
    steps.

    Args:
        server_lr, weighting: as `FedAvg`.
        mu: μ of the proximal term; 0: none. Above 0 it requires local=sgd at a constant learning rate.
    """

    supports_stale = True

    def __init__(
        self, server_lr: PositivePerSeed = 1.0, weighting: Weighting = "uniform", mu: NonNegative = 0.0
    ) -> None:
        super().__init__(server_lr, weighting)
        self.mu = mu

    def check_local(self, local_rule: LocalRule) -> None:
        if local_rule.gradient_weight(0) is None:
            raise ConfigError(
                f"strategy={type(self).__name__} divides by the total weight of the gradients of local steps, which "
                f"local={type(local_rule).__name__} as configured does not define; use local=sgd, or local=momentum "
                "with local.state=round"
            )
        if self.mu and not (type(local_rule) is SGD and isinstance(local_rule.schedule, Constant)):
            raise ConfigError(
                f"strategy.mu={self.mu:g} is for plain steps at a constant rate; use local=sgd and "
                "local/schedule=constant, or strategy.mu=0"
            )

    def start(self, state: State, cohort: Cohort) -> Tensor | dict[str, Tensor]:
        model = cohort.broadcast(state.model)
        if not self.mu:
            return model
        return {"params": model, "anchor": model, "proximal": torch.full_like(cohort.multiplicity, self.mu)}

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort, gradient_weight = report.cohort, report.gradient_weight
        assert gradient_weight is not None  # see `check_local`
        if self.mu:
            gradient_weight = self.proximal_gradient_weight(gradient_weight, cohort.broadcast(report.lr))
        weights = cohort.weights(self.weighting)
        step = cohort.mean(gradient_weight, weights)[:, None] * cohort.mean(
            report.innovation / gradient_weight[:, None], weights
        )
        return replace(state, model=state.model - self.server_lr * step)

    def proximal_gradient_weight(self, gradient_weight: Tensor, lr: Tensor) -> Tensor:
        """[n] η_l a_i of rows whose steps at the rates `lr` [n] sum up to `gradient_weight` [n]: the k-th last gradient
        arrives (1 − η_l μ)^k times."""
        steps, proximal_rate = (gradient_weight / lr).round(), self.mu * lr
        step_decay = -torch.expm1(steps * torch.log1p(-proximal_rate.clamp(max=0.5)))  # accurate for small η_l μ
        return torch.where(proximal_rate < 0.5, step_decay, 1 - (1 - proximal_rate) ** steps) / self.mu
