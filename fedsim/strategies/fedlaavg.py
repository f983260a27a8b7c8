"""FedLaAvg: the mean of all clients' latest gradients; selects clients that were absent longest (Yan et al.)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import torch
from torch import Tensor

from fedsim.core.constraints import CountOrZero, OneOf, PositiveFraction, PositivePerSeed
from fedsim.core.effects import EffectiveIf, StopsTraining
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients, update_memory_and_mean
from fedsim.strategies.selection import draw_rows

SELECTION_ORDERS = ("longest", "random", "all")


@dataclass
class FedLaAvgState(RememberedUpdates):
    """Adds last_seen [R·m] int64: the last round in which the client took part; −1 before its first."""

    last_seen: Tensor


class FedLaAvg(RemembersClients[FedLaAvgState]):
    """Selects the K = βm available clients that participated longest ago; their ĝ_i ← G_i / η_t; x ← x − η_g η_t (1/m)
    Σ_i ĝ_i over all clients, absent or not (Yan et al., INFORMS JoC 2023: latest averaging).

    It is MIFA with memory=gradient and client selection. The server also steps in an empty round, as in the authors'
    program, where η_g is 1. Memory: one row and one number per client.

    Args:
        fraction: β; K is at least 1.
        select: 'longest' (ties are broken at random), 'random': K at random, 'all': all available clients.
        collect: number of rounds before the first step; non_update_rounds in the authors' program.
        server_lr: η_g, or a list of one per seed.
        weighting: 'uniform', or 'data', which multiplies client i's local steps by m w_i, as that program does.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
    """

    stops_training = (
        StopsTraining(
            "collect",
            lambda component, run: component.collect >= run.rounds,
            "the first step is after the run's last round; give fewer, or more rounds",
        ),
    )

    effective_if = (
        EffectiveIf("fraction", lambda component, run: component.select != "all", "{at}.select=longest or random"),
    )

    def __init__(
        self,
        fraction: PositiveFraction = 0.1,
        select: Annotated[str, OneOf(*SELECTION_ORDERS)] = "longest",
        collect: CountOrZero = 0,
        server_lr: PositivePerSeed = 1.0,
        weighting: Weighting = "uniform",
        memory_dtype: MemoryDtype = "same",
    ) -> None:
        super().__init__(server_lr, memory_dtype, weighting)
        self.fraction = fraction
        self.select = select
        self.collect = collect

    def initial(self, model: Tensor, federation: Federation) -> FedLaAvgState:
        minus_ones = torch.full((federation.num_memory_rows,), -1, dtype=torch.int64, device=model.device)
        return FedLaAvgState(model, *self.empty(model, federation), minus_ones)

    def cohort(self, state: FedLaAvgState, active: Cohort) -> Cohort:
        k = max(1, round(self.fraction * active.federation.clients))
        if self.select == "random":
            return draw_rows(active, k, torch.ones_like(active.multiplicity))
        return active if self.select == "all" else active.select_largest(-state.last_seen[active.rows], k)

    def start(self, state: FedLaAvgState, cohort: Cohort) -> Tensor | dict[str, Tensor]:
        model = cohort.broadcast(state.model)
        if self.weighting == "uniform":
            return model
        return {"params": model, "scale": cohort.weights("data") * cohort.federation.clients}

    def aggregate(self, state: FedLaAvgState, report: Report, t: int) -> FedLaAvgState:
        cohort, rate = report.cohort, report.lr[:, None]
        mean = update_memory_and_mean(state.memory, state.mean, cohort, report.innovation / cohort.broadcast(rate))
        state.last_seen[cohort.rows] = t
        model = state.model if t < self.collect else state.model - self.server_lr * rate * mean
        return replace(state, model=model, mean=mean)
