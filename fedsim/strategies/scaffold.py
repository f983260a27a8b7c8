"""SCAFFOLD: control variates against client drift (Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedsim.core.federation import Cohort
from fedsim.core.report import Report
from fedsim.strategies.memory import RememberedUpdates, RemembersClients


class Scaffold(RemembersClients[RememberedUpdates]):
    """Local steps follow g − c_i + c; x ← x − η_g mean_A G_i; c_i⁺ = c_i − c + G_i / (s η_l) (option II).

    c is the mean of all c_i, which is the paper's c ← c + (|A|/m) mean_A(c_i⁺ − c_i). Where the rate moves within a
    round, s η_l is the sum of the steps' rates. Memory: one row per client. Runs under local=sgd, whose carry takes
    the correction. x and c go down, the changes of x and c_i come up. With weighting=data all means are weighted by
    data, and the limit is the minimum of Σ w_i F_i.
    """

    vectors_down = vectors_up = 2

    def start(self, state: RememberedUpdates, cohort: Cohort) -> dict[str, Tensor]:
        correction = cohort.broadcast(state.mean) - self.remembered_rows(state, cohort)
        return {"params": cohort.broadcast(state.model), "correction": correction}

    def aggregate(self, state: RememberedUpdates, report: Report, t: int) -> RememberedUpdates:
        cohort = report.cohort
        control = report.innovation / report.lr_sum[:, None] - report.carry["correction"]  # c_i − c + G_i / (s η_l)
        model = state.model - self.server_lr * self.mean(cohort, report.innovation)
        return replace(state, model=model, mean=self.store_client_values(state, cohort, control))
