"""FedDC: the drift of every client is estimated, and the average is corrected for it (Gao et al., CVPR 2022)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.constraints import NonNegativePerSeed
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.core.report import Report
from fedsim.strategies.memory import update_memory_and_mean
from fedsim.strategies.strategy import State, Strategy


@dataclass
class FedDCState(State):
    """Attributes:

    drift: [R·m, d] b_i, what client i has moved in all its rounds.
    mean_drift: [R, d] its mean over clients.
    control: [R·m, d] c_i, its mean gradient in its last round.
    mean_control: [R, d] c, its mean over clients.
    """

    drift: Tensor
    mean_drift: Tensor
    control: Tensor
    mean_control: Tensor


class FedDC(Strategy[FedDCState]):
    """Local steps descend f_i(θ) + α/2 ‖θ − (x^t − b_i)‖² + ⟨θ, c − c_i⟩; then for i∈A b_i ← b_i + θ_i − x^t and
    c_i ← c_i − c + (x^t − θ_i) / (s η_l); x^{t+1} = mean_{i∈A} θ_i + (1/m) Σ_i b_i.

    This combines FedDyn and SCAFFOLD, with equal weights of clients. An empty round changes nothing. Requires
    local=sgd, whose carry takes the correction and the anchor. Memory: two rows per client. The server sends x and c;
    clients send the changes of x and c_i.

    Args:
        alpha: α, or a list of one per seed; the authors' examples use 0.01 (CIFAR) and 0.1 (MNIST).
        weighting: of all means: 'uniform', or 'data' fractions.
    """

    vectors_down = vectors_up = 2

    def __init__(self, alpha: NonNegativePerSeed = 0.01, weighting: Weighting = "uniform") -> None:
        self.alpha = as_per_seed(alpha)
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> FedDCState:
        def rows() -> Tensor:
            return federation.zeros(model.shape[1], dtype=model.dtype)

        return FedDCState(model, rows(), torch.zeros_like(model), rows(), torch.zeros_like(model))

    def start(self, state: FedDCState, cohort: Cohort) -> dict[str, Tensor]:
        model = cohort.broadcast(state.model)
        return {
            "params": model,
            "anchor": model - cohort.gather(state.drift),
            "proximal": cohort.expand_per_seed(self.alpha) * model.new_ones(len(cohort)),
            "correction": cohort.broadcast(state.mean_control) - cohort.gather(state.control),
        }

    def aggregate(self, state: FedDCState, report: Report, t: int) -> FedDCState:
        cohort = report.cohort
        control = report.innovation / report.lr_sum[:, None] - report.carry["correction"]
        mean_control = update_memory_and_mean(state.control, state.mean_control, cohort, control, self.weighting)
        drift = cohort.gather(state.drift) - report.innovation
        mean_drift = update_memory_and_mean(state.drift, state.mean_drift, cohort, drift, self.weighting)
        model = cohort.where_nonempty(self.mean(cohort, report.end) + mean_drift, state.model)
        return FedDCState(model, state.drift, mean_drift, state.control, mean_control)
