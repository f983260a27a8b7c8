"""FedStale: stale innovations of absent clients with an adjustable weight (Rodio and Neglia, 2024)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from fedsim.availability import Availability
from fedsim.core.constraints import Count, FractionPerSeed, OneOf, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Federation, Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.core.report import Report
from fedsim.strategies.fedau import initial_counters, updated_interval_counters
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients

PROBABILITY_SOURCES = ("estimated", "known")


@dataclass
class FedStaleState(RememberedUpdates):
    """Adds FedAU's counters, [R·m] each."""

    mean_interval: Tensor
    intervals: Tensor
    current: Tensor


class FedStale(RemembersClients[FedStaleState]):
    """v = Σ_{i∈A} (w_i / p_i) (G_i − β h_i) + β Σ_i w_i h_i; x ← x − η_g v; then h_i ← G_i for i∈A.

    β = 0 is FedAvg with inverse probabilities (`fedavg_known`, or FedAU), β = 1 is FedVARP with inverse probabilities,
    which equals FedVARP for equal probabilities. With the true p_i it is unbiased for each β, except for empty rounds,
    which change only the estimates. Memory: one row and three numbers per client.

    Args:
        beta: β in [0, 1], or a list of one per seed.
        server_lr: η_g, or a list of one per seed.
        probabilities: 'estimated': 1/p_i is the mean interval between the client's participations before this round, as
            in the published runs; 'known': the true p_i^t.
        cutoff: maximal length of an interval, as in FedAU; null: no limit, as in the authors' program.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions (the authors' choice).
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
    """

    effective_if = (
        EffectiveIf("beta", lambda component, run: run.may_clients_be_absent, "clients that miss rounds"),
        EffectiveIf("probabilities", lambda component, run: run.may_clients_be_absent, "clients that miss rounds"),
        EffectiveIf(
            "cutoff",
            lambda component, run: run.may_clients_be_absent and component.cutoff < run.rounds,
            "clients that miss more rounds in a row, in a run that is longer",
        ),
    )

    def __init__(
        self,
        beta: FractionPerSeed = 0.5,
        server_lr: PositivePerSeed = 1.0,
        probabilities: Annotated[str, OneOf(*PROBABILITY_SOURCES)] = "estimated",
        cutoff: Count | None = None,
        weighting: Weighting = "uniform",
        memory_dtype: MemoryDtype = "same",
    ) -> None:
        super().__init__(server_lr, memory_dtype, weighting)
        self.beta = as_per_seed(beta)
        self.probabilities = probabilities
        self.uses_known = self.probabilities == "known"
        self.cutoff = cutoff

    def check(self, availability: Availability) -> None:
        if self.uses_known:
            availability.require_known_probabilities("strategy=fedstale with strategy.probabilities=known")

    def initial(self, model: Tensor, federation: Federation) -> FedStaleState:
        return FedStaleState(model, *self.empty(model, federation), *initial_counters(model, federation))

    def aggregate(self, state: FedStaleState, report: Report, t: int) -> FedStaleState:
        cohort = report.cohort
        inverse_probability = 1 / cohort.probability if self.uses_known else state.mean_interval[cohort.rows]  # 1 / p_i
        innovation_error = report.innovation - cohort.expand_per_seed(self.beta) * self.remembered_rows(state, cohort)
        step = (
            cohort.sum(innovation_error, cohort.weights(self.weighting) * inverse_probability) + self.beta * state.mean
        )
        model = cohort.where_nonempty(state.model - self.server_lr * step, state.model)
        mean = self.store_client_values(state, cohort, report.innovation)
        return FedStaleState(model, state.memory, mean, *updated_interval_counters(state, cohort, self.cutoff))
