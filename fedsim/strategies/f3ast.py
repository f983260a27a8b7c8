"""F3AST: weights from running participation frequencies (Ribero, Vikalo and de Veciana 2023)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedsim.core.constraints import Count, PositiveFraction, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import ServerRateStrategy, State


@dataclass
class F3ASTState(State):
    """Adds frequency [R·m]: r_i, an exponential average of participation, zero at the start."""

    frequency: Tensor


class F3AST(ServerRateStrategy[F3ASTState]):
    """x ← x − η_g Σ_{i∈A} (w_i / r̂_i) G_i, with r ← (1 − β) r + β·1{i∈A} and r̂ = r / (1 − (1 − β)^{t+1}).

    r starts at zero and r̂ is the unbiased running frequency, including this round; the comparison in the FedAWE paper
    does not state its initial value. The frequency is also updated in empty rounds. Memory: one number per client.

    Args:
        server_lr: η_g, or a list of one per seed.
        beta: β (0.001 in the FedAWE paper).
        k: None: all available clients participate (the paper's update); otherwise the k available clients with the
            largest w_i² / r̂_i², as in the released program (which also divides by k; use `server_lr` for that).
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    effective_if = (
        EffectiveIf(
            "beta",
            lambda component, run: run.may_clients_be_absent or component.k is not None,
            "clients that miss rounds",
        ),
        EffectiveIf("k", lambda component, run: component.k < run.federation.clients, "more clients than {at}.k"),
    )

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        beta: PositiveFraction = 0.001,
        k: Count | None = None,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.beta = beta
        self.k = k
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> F3ASTState:
        return F3ASTState(model, torch.zeros(federation.num_memory_rows, dtype=model.dtype, device=model.device))

    def cohort(self, state: F3ASTState, active: Cohort) -> Cohort:
        if self.k is None:
            return active
        selection_score = active.weights(self.weighting) / state.frequency[active.rows]  # ∞ for newcomers
        return active.select_largest(selection_score, self.k, exact_count=True)

    def aggregate(self, state: F3ASTState, report: Report, t: int) -> F3ASTState:
        cohort = report.cohort
        frequency = (1 - self.beta) * state.frequency
        frequency[cohort.rows] += self.beta
        unbiased_frequency = frequency[cohort.rows] / (1 - (1 - self.beta) ** (t + 1))
        step = cohort.sum(report.innovation, cohort.weights(self.weighting) / unbiased_frequency)
        return F3ASTState(state.model - self.server_lr * step, frequency)
