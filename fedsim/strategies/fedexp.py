"""FedExP: the server learning rate grows with the dissimilarity of the clients' updates (Jhunjhunwala et al., ICLR
2023).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedsim.core.constraints import NonNegativePerSeed
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.core.report import Report
from fedsim.strategies.strategy import State, Strategy


@dataclass
class IterateState(State):
    """Of strategies that report an average of their iterates as the model; training goes on from the last one.

    Attributes:
        iterate: [R, d] x^t, what is sent to clients.
    """

    iterate: Tensor


class FedExP(Strategy[IterateState]):
    """x ← x − η_g Ḡ with Ḡ = mean_{i∈A} G_i and η_g = max(1, mean_{i∈A} ‖G_i‖² / (2 (‖Ḡ‖² + ε))), weighted by w_i.

    The global model is the mean of the last two iterates, while training continues from the last one; with `average`
    false the last one is used. Memory: one row on the server. The authors' program uses n ε instead of ε, with n
    clients in the round.

    Args:
        eps: ε, or a list of one per seed; the authors use 0.001 (CIFAR) and 0.1 (EMNIST).
        average: whether the global model is the mean of the last two iterates.
        weighting: w_i, 'uniform' or 'data'.
    """

    def __init__(self, eps: NonNegativePerSeed = 1e-3, average: bool = True, weighting: Weighting = "uniform") -> None:
        self.eps = as_per_seed(eps)
        self.average = average
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> IterateState:
        return IterateState(model, model.clone())

    def start(self, state: IterateState, cohort: Cohort) -> Tensor:
        return cohort.broadcast(state.iterate)

    def aggregate(self, state: IterateState, report: Report, t: int) -> IterateState:
        cohort, weights = report.cohort, report.cohort.weights(self.weighting)
        mean = cohort.mean(report.innovation, weights)
        spread = cohort.mean(report.innovation.square().sum(1), weights)  # mean of ‖G_i‖²
        rate = (spread / (2 * (mean.square().sum(1) + self.eps))).nan_to_num(nan=1.0, posinf=1.0).clamp(min=1.0)
        iterate = state.iterate - rate[:, None] * mean
        model = (iterate + state.iterate) / 2 if self.average else iterate.clone()
        return IterateState(cohort.where_nonempty(model, state.model), iterate)
