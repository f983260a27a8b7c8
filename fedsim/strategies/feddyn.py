"""FedDyn: dynamic regularisation of the clients' losses, whose minima approach the global one (Acar et al., ICLR
2021).
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedsim.core.constraints import PositivePerSeed
from fedsim.core.federation import Cohort, Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.core.report import Report
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients, update_memory_and_mean


class FedDyn(RemembersClients[RememberedUpdates]):
    """Local steps descend f_i(θ) + α_i ⟨b_i, θ⟩ + α_i/2 ‖θ − x^t‖²; then b_i ← b_i + θ_i − x^t for i∈A, and
    x^{t+1} = mean_{i∈A} θ_i + (1/m) Σ_i b_i.

    b_i is the sum of the client's updates over all its rounds; the paper stores −α b_i, and its server h = −(α/m) Σ_i
    b_i. An empty round changes nothing (the authors' program draws clients again). That program also evaluates the mean
    of the active clients' models and the mean of all clients' last models; here only x^t is evaluated. Requires
    local=sgd, whose carry takes the correction and the anchor. Memory: one row per client.

    Args:
        alpha: α, or a list of one per seed; 0.001 to 0.1 in the paper.
        weighting: 'uniform': α_i = α; 'data': α / (m w_i), as in the authors' program, so that the limit is the minimum
            of Σ w_i F_i.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
    """

    def __init__(
        self, alpha: PositivePerSeed = 0.01, weighting: Weighting = "uniform", memory_dtype: MemoryDtype = "same"
    ) -> None:
        super().__init__(1.0, memory_dtype, weighting)
        self.alpha = as_per_seed(alpha)

    def start(self, state: RememberedUpdates, cohort: Cohort) -> dict[str, Tensor]:
        model, displacement = cohort.broadcast(state.model), self.remembered_rows(state, cohort)
        alpha = cohort.expand_per_seed(self.alpha) / (
            cohort.weights(self.weighting) * cohort.federation.clients
        )  # α_i, [n]
        return {"params": model, "anchor": model, "proximal": alpha, "correction": alpha[:, None] * displacement}

    def aggregate(self, state: RememberedUpdates, report: Report, t: int) -> RememberedUpdates:
        cohort = report.cohort
        displacement = self.remembered_rows(state, cohort) - report.innovation
        mean = update_memory_and_mean(state.memory, state.mean, cohort, displacement)  # the plain mean: α_i weighs
        model = cohort.mean(report.end) + mean
        return replace(state, model=cohort.where_nonempty(model, state.model), mean=mean)
