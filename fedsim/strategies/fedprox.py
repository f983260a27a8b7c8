"""FedProx: a proximal term keeps clients near the broadcast model (Li et al., MLSys 2020)."""

from __future__ import annotations

from torch import Tensor

from fedsim.core.constraints import NonNegativePerSeed, PositivePerSeed
from fedsim.core.federation import Cohort, Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.strategies.fedavg import FedAvg
from fedsim.strategies.strategy import State


class FedProx(FedAvg):
    """FedAvg with the term μ (x − x^t) added to the local gradient. Requires local=sgd, whose carry takes the anchor.

    Args:
        mu: μ, or a list of one per seed.
        server_lr, weighting: as `FedAvg`.
    """

    server_sees, supports_stale = "mean", True

    def __init__(
        self, mu: NonNegativePerSeed = 0.01, server_lr: PositivePerSeed = 1.0, weighting: Weighting = "uniform"
    ) -> None:
        super().__init__(server_lr, weighting)
        self.mu = as_per_seed(mu)

    def start(self, state: State, cohort: Cohort) -> dict[str, Tensor]:
        model = cohort.broadcast(state.model)
        return {
            "params": model,
            "anchor": model,
            "proximal": cohort.expand_per_seed(self.mu) * model.new_ones(len(cohort)),
        }
