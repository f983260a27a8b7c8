"""MimiC: corrects each client's innovation to mimic that of full participation (Sun, Mao and Zhang, IEEE TMC 2024)."""

from __future__ import annotations

from typing import Annotated

from fedsim.core.constraints import OneOf, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients

FIRST_ROUND_CLIENTS = ("all", "available")
REMEMBERED_QUANTITIES = ("innovation", "gradient")


class MimiC(RemembersClients[RememberedUpdates]):
    """v = mean_{i∈A}(G_i + c_i); x ← x − η_g v; then c_i ← v − G_i for i∈A. An empty round does nothing.

    c_i is the difference between the step and the client's innovation when it last participated, zero before.
    Information about absent clients enters only through c_i, hence through the first round: if all clients participate
    in it, all losses have the same curvature and batches are full, each step equals that of full participation. Memory:
    one row per client, on the server.

    Args:
        server_lr: η_g, or a list of one per seed.
        first_round: 'all': all clients participate in round 0, available or not, as in the authors' program;
            'available': only the available ones, and a client's first round uses c_i = 0.
        memory: 'innovation' stores c_i; 'gradient' stores c_i / η_t and rescales by the current η_t. With a constant
            learning rate they are identical.
        weighting: of the mean: 'uniform', or 'data' fractions.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
    """

    effective_if = (
        EffectiveIf(
            "first_round",
            lambda component, run: run.availability.law != "full",
            "an availability process other than full",
        ),
        EffectiveIf(
            "memory", lambda component, run: run.has_learning_rate_schedule, "a local/schedule that moves the rate"
        ),
    )

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        first_round: Annotated[str, OneOf(*FIRST_ROUND_CLIENTS)] = "all",
        memory: Annotated[str, OneOf(*REMEMBERED_QUANTITIES)] = "innovation",
        weighting: Weighting = "uniform",
        memory_dtype: MemoryDtype = "same",
    ) -> None:
        super().__init__(server_lr, memory_dtype, weighting)
        self.first_round = first_round
        self.memory = memory

    def cohort(self, state: RememberedUpdates, active: Cohort) -> Cohort:
        if active.round > 0 or self.first_round == "available":
            return active
        return active.federation.full_cohort(active, count=1)

    def aggregate(self, state: RememberedUpdates, report: Report, t: int) -> RememberedUpdates:
        cohort = report.cohort
        rate = cohort.broadcast(report.lr)[:, None] if self.memory == "gradient" else 1.0
        v = self.mean(cohort, report.innovation + rate * self.remembered_rows(state, cohort))
        correction = (cohort.broadcast(v) - report.innovation) / rate
        model = cohort.where_nonempty(state.model - self.server_lr * v, state.model)
        return RememberedUpdates(model, state.memory, self.store_client_values(state, cohort, correction))
