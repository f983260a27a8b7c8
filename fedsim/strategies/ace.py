"""ACE and ACED, all-client engagement: an arrival moves the model along the mean of all clients' last updates (Chang et
al. 2025, arXiv:2511.19066).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedsim.core.constraints import CountOrZero, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients


class ACE(RemembersClients[RememberedUpdates]):
    """u_i ← G_i for every update that arrives; x ← x − η_g Σ_j w_j u_j, with u_j = 0 before the first update of client
    j.

    Fast clients arrive more often, but every client has the same weight in each step, so that the model is not biased
    towards fast ones. Under `clock=events` the server steps at each arrival. An empty round does nothing. The formula
    is not checked against the authors' program. Memory: one row per client.

    Args:
        server_lr: η_g, or a list of one per seed.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    supports_stale = True
    arrivals = 1

    def aggregate(self, state: RememberedUpdates, report: Report, t: int) -> RememberedUpdates:
        mean = self.store_client_values(state, report.cohort, report.innovation)
        model = report.cohort.where_nonempty(state.model - self.server_lr * mean, state.model)
        return replace(state, model=model, mean=mean)


@dataclass
class ACEDState(RememberedUpdates):
    """Adds began [R·m] int64: the round in which the stored update of each client began, −1 before its first."""

    began: Tensor


class ACED(RemembersClients[ACEDState]):
    """ACE with a delay bound: the mean is taken over the clients whose last update began at most `max_staleness` server
    updates ago. If there is no such client, the model does not change.

    A step reads the rows of all clients. The formula is not checked against the authors' program. Memory: one row
    and one integer per client.

    Args:
        server_lr: η_g, or a list of one per seed.
        max_staleness: τ_max, in server updates.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    supports_stale = True
    arrivals = 1
    effective_if = (
        EffectiveIf(
            "max_staleness",
            lambda component, run: component.max_staleness < run.rounds - 1,
            "more rounds than {at}.max_staleness",
        ),
    )

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        max_staleness: CountOrZero = 50,
        memory_dtype: MemoryDtype = "same",
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, memory_dtype, weighting)
        self.max_staleness = max_staleness

    def initial(self, model: Tensor, federation: Federation) -> ACEDState:
        minus_ones = torch.full((federation.num_memory_rows,), -1, dtype=torch.int64, device=model.device)
        return ACEDState(model, *self.empty(model, federation), minus_ones)

    def aggregate(self, state: ACEDState, report: Report, t: int) -> ACEDState:
        cohort, federation = report.cohort, report.cohort.federation
        mean_innovation = self.store_client_values(state, cohort, report.innovation)
        state.began[cohort.rows] = torch.as_tensor(t - report.rounds_late, device=state.began.device)
        recent_mask = ((state.began >= 0) & (t - state.began <= self.max_staleness)).to(mean_innovation.dtype)
        weights = recent_mask * federation.weights(self.weighting)
        total_weight = federation.sum_over_clients(recent_mask[:, None], federation.weights(self.weighting))
        step = federation.sum_over_clients(state.memory, weights) / torch.where(total_weight > 0, total_weight, 1.0)
        model = cohort.where_nonempty(state.model - self.server_lr * step, state.model)
        return replace(state, model=model, mean=mean_innovation)
