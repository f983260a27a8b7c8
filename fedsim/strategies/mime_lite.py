"""MimeLite: clients step with the server's momentum, fixed during local training (Karimireddy et al., NeurIPS 2021)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.constraints import FractionPerSeed, PositivePerSeed
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.core.report import Report
from fedsim.strategies.strategy import ServerRateStrategy, State, full_data_gradients


@dataclass
class MimeLiteState(State):
    """Adds momentum [R, d]: z, the server's."""

    momentum: Tensor


class MimeLite(ServerRateStrategy[MimeLiteState]):
    """Local steps x_i ← x_i − η (∇f_i(x_i) + β z), with z fixed; x ← x − η_g mean_{i∈A} G_i, and then z ← mean_{i∈A}
    ∇F_i(x^t) + β z, with full-batch gradients at the old model.

    z is PyTorch's momentum; the paper's is (1 − β) z, whose steps (1 − β) ∇f + β m are the same with learning rate η (1
    − β). An empty round changes nothing. Memory: one row on the server. Requires local=sgd, whose carry takes β z. The
    server sends x and z; clients send the changes of x and the gradients at x^t, for which they evaluate all their data
    once more.

    Args:
        server_lr: η_g, or a list of one per seed.
        momentum: β, or a list likewise; 0.9 or 0.99.
        weighting: of the means: 'uniform', or 'data' fractions.
    """

    needs_full_gradients = True
    vectors_down = vectors_up = 2

    def __init__(
        self, server_lr: PositivePerSeed = 1.0, momentum: FractionPerSeed = 0.9, weighting: Weighting = "uniform"
    ) -> None:
        super().__init__(server_lr)
        self.momentum = as_per_seed(momentum)
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> MimeLiteState:
        return MimeLiteState(model, torch.zeros_like(model))

    def start(self, state: MimeLiteState, cohort: Cohort) -> dict[str, Tensor]:
        return {"params": cohort.broadcast(state.model), "correction": cohort.broadcast(self.momentum * state.momentum)}

    def aggregate(self, state: MimeLiteState, report: Report, t: int) -> MimeLiteState:
        cohort, weights = report.cohort, report.cohort.weights(self.weighting)
        gradient = cohort.mean(full_data_gradients(cohort, state.model).gradient, weights)
        model = state.model - self.server_lr * cohort.mean(report.innovation, weights)
        momentum = gradient + self.momentum * state.momentum
        return MimeLiteState(model, cohort.where_nonempty(momentum, state.momentum))
