"""Federated averaging, in three variants that differ in the treatment of absent clients."""

from __future__ import annotations

from dataclasses import replace

from fedsim.availability import Availability
from fedsim.core.constraints import PositivePerSeed
from fedsim.core.federation import Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import ServerRateStrategy, State


class FedAvg(ServerRateStrategy[State]):
    """FedAvg over active clients (McMahan et al. 2017; fedpbc Alg. 1): x ← x − η_g mean_{i∈A} G_i.

    With unequal p_i this is biased towards clients that are often available (fedpbc Prop. 1).

    Args:
        server_lr: η_g, or a list of one per seed.
        weighting: 'uniform': 1/m for every client; 'data': its fraction of all samples, renormalised over A.
    """

    server_sees, supports_stale = "mean", True

    def __init__(self, server_lr: PositivePerSeed = 1.0, weighting: Weighting = "uniform") -> None:
        super().__init__(server_lr)
        self.weighting = weighting

    def aggregate(self, state: State, report: Report, t: int) -> State:
        step = report.cohort.mean(report.innovation, report.cohort.weights(self.weighting))
        return replace(state, model=state.model - self.server_lr * step)


class FedAvgAll(FedAvg):
    """FedAvg over all clients, with zero updates for absent ones (fedawe §7): x ← x − η_g Σ_{i∈A} w_i G_i."""

    server_sees, supports_stale = "sum", True

    def aggregate(self, state: State, report: Report, t: int) -> State:
        step = report.cohort.sum(report.innovation, report.cohort.weights(self.weighting))
        return replace(state, model=state.model - self.server_lr * step)


class FedAvgKnown(FedAvg):
    """FedAvg with known probabilities (Perazzone et al. 2022; fedawe §7): x ← x − η_g Σ_{i∈A} w_i G_i / p_i^t."""

    def check(self, availability: Availability) -> None:
        availability.require_known_probabilities("strategy=fedavg_known")

    def aggregate(self, state: State, report: Report, t: int) -> State:
        cohort = report.cohort
        step = cohort.sum(report.innovation, cohort.weights(self.weighting) / cohort.probability)
        return replace(state, model=state.model - self.server_lr * step)
