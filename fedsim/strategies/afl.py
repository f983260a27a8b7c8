"""AFL: minimises the loss on the worst mixture of clients (Mohri, Sivek and Suresh, ICML 2019)."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core.constraints import NonNegative, PositivePerSeed
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.strategies.fedexp import IterateState
from fedsim.strategies.strategy import ServerRateStrategy, full_data_gradients


@dataclass
class AFLState(IterateState):
    """Adds mixture [R·m], λ_i, 1 in sum over a replicate; and steps [R] int64, how many rounds were not empty."""

    mixture: Tensor
    steps: Tensor


class AFL(ServerRateStrategy[AFLState]):
    """min_x max_λ Σ_i λ_i F_i(x) over the simplex: x ← x − η_g Σ_{i∈A} λ_i G_i / Σ_{i∈A} λ_i, and λ is projected onto
    the simplex after λ_i ← λ_i + η_λ F_i(x^t), F_i the loss of all the client's data.

    The paper uses one gradient of all clients in every round, and its model is the mean of all iterates. With partial
    participation only the λ_i of participating clients change, and their sum is kept; the paper's guarantee is for full
    participation. Memory: one row on the server and one number per client. A client evaluates all its data once more
    and sends its loss, for which the host waits.

    Args:
        server_lr: η_g, or a list of one per seed.
        mixture_lr: η_λ; 0.1 in q-FFL's authors' program.
        average: whether the global model is the mean of all iterates instead of the last one.
    """

    needs_full_gradients = True

    def __init__(self, server_lr: PositivePerSeed = 1.0, mixture_lr: NonNegative = 0.1, average: bool = True) -> None:
        super().__init__(server_lr)
        self.mixture_lr = mixture_lr
        self.average = average

    def initial(self, model: Tensor, federation: Federation) -> AFLState:
        equal_mixture = torch.full(
            (federation.num_memory_rows,), 1 / federation.clients, dtype=model.dtype, device=model.device
        )
        steps = torch.zeros(len(model), dtype=torch.int64, device=model.device)
        return AFLState(model, model.clone(), equal_mixture, steps)

    def start(self, state: AFLState, cohort: Cohort) -> Tensor:
        return cohort.broadcast(state.iterate)

    def aggregate(self, state: AFLState, report: Report, t: int) -> AFLState:
        cohort = report.cohort
        mixture = cohort.gather(state.mixture)
        next_iterate = state.iterate - self.server_lr * cohort.mean(report.innovation, mixture)
        unprojected = mixture + self.mixture_lr * full_data_gradients(cohort, state.iterate).loss
        cohort.scatter(state.mixture, project_onto_simplex(cohort, unprojected, mixture))
        steps = state.steps + cohort.is_nonempty
        mean = state.model + (next_iterate - state.model) / steps.clamp(min=1)[:, None]
        model = cohort.where_nonempty(mean if self.average else next_iterate.clone(), state.model)
        return AFLState(model, next_iterate, state.mixture, steps)


def project_onto_simplex(cohort: Cohort, simplex_values: Tensor, lambda_before: Tensor) -> Tensor:
    """[n] the nearest point to the values [n] whose entries are not negative and, replicate by replicate, have the sum
    of those `lambda_before`: max(v − τ, 0), with τ by sorting."""
    stacked = torch.stack([simplex_values, lambda_before]).double().cpu().numpy()
    (host_values, previous_values), virtual_clients, bounds = cohort.all_gather_host(stacked)
    projected_values = np.zeros_like(host_values)
    for a, b in itertools.pairwise(bounds):
        if b > a:
            ordered = -np.sort(-host_values[a:b])
            levels = (np.cumsum(ordered) - previous_values[a:b].sum()) / np.arange(1, b - a + 1)
            active_levels = levels[ordered > levels]  # no level if the sum is 0 or a loss is NaN, which is passed on
            projected_values[a:b] = (
                np.maximum(host_values[a:b] - active_levels[-1], 0) if len(active_levels) else 0 * host_values[a:b]
            )
    local_values = projected_values[np.searchsorted(virtual_clients, cohort.host_index.virtual_clients)]
    return torch.as_tensor(local_values, dtype=simplex_values.dtype).to(simplex_values.device)
