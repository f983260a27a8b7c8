"""FedAvgM: federated averaging with momentum on the server (Hsu et al. 2019)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core import Federation, Report
from fedsim.core.constraints import FractionPerSeed, PositivePerSeed
from fedsim.core.federation import Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.strategies.strategy import State, Strategy


@dataclass
class FedAvgMState(State):
    """Adds the velocity v, [R, d]."""

    velocity: Tensor


class FedAvgM(Strategy[FedAvgMState]):
    """v ← β v + mean_{i∈A} G_i, weighted by w_i; x ← x − η_g v. Memory: one row on the server.

    An empty round changes neither v nor x.

    Args:
        server_lr: η_g, or a list of one per seed.
        momentum: β, or a list likewise.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions, renormalised over A.
    """

    server_sees, supports_stale = "mean", True

    def __init__(
        self, server_lr: PositivePerSeed = 1.0, momentum: FractionPerSeed = 0.9, weighting: Weighting = "uniform"
    ) -> None:
        self.server_lr = as_per_seed(server_lr)
        self.momentum = as_per_seed(momentum)
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> FedAvgMState:
        return FedAvgMState(model, torch.zeros_like(model))

    def aggregate(self, state: FedAvgMState, report: Report, t: int) -> FedAvgMState:
        cohort = report.cohort
        velocity = self.momentum * state.velocity + self.mean(cohort, report.innovation)  # v^{t+1}
        model = state.model - self.server_lr * velocity  # x^{t+1}
        return FedAvgMState(cohort.where_nonempty(model, state.model), cohort.where_nonempty(velocity, state.velocity))
