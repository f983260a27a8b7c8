"""FedVARP: reduces the variance of partial participation with stored innovations (Jhunjhunwala et al., UAI 2022)."""

from __future__ import annotations

from fedsim.core.report import Report
from fedsim.strategies.memory import RememberedUpdates, RemembersClients


class FedVARP(RemembersClients[RememberedUpdates]):
    """v = mean_j y_j + mean_{i∈A}(G_i − y_i); x ← x − η_g v; then y_i = G_i for i∈A. An empty round does nothing.

    Memory: one row per client.
    """

    def aggregate(self, state: RememberedUpdates, report: Report, t: int) -> RememberedUpdates:
        cohort = report.cohort
        direction = state.mean + self.mean(cohort, report.innovation - self.remembered_rows(state, cohort))
        model = cohort.where_nonempty(state.model - self.server_lr * direction, state.model)
        return RememberedUpdates(model, state.memory, self.store_client_values(state, cohort, report.innovation))
