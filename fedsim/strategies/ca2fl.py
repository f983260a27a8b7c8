"""CA²FL: buffered asynchronous updates, calibrated by the last update of each client (Wang et al., ICLR 2024)."""

from __future__ import annotations

from fedsim.core.constraints import Count, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import MemoryDtype, RememberedUpdates, RemembersClients


class CA2FL(RemembersClients[RememberedUpdates]):
    """v = mean_j h_j + mean_{i∈S}(G_i − h_i); x ← x − η_g v; then h_i = G_i for i∈S, the K updates in the buffer.

    It is FedVARP with a buffer instead of a round. Under `clock=events` the server steps after K arrivals;
    elsewhere S are the updates that arrive in a round, and an empty round does nothing. The formula is not
    checked against the authors' program. Memory: one row per client.

    Args:
        buffer: K, under `clock=events`.
        server_lr: η_g, or a list of one per seed.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
        weighting: of the means over all clients and over S: 'uniform', or 'data' fractions.
    """

    effective_if = (EffectiveIf("buffer", lambda component, run: run.is_asynchronous, "clock=events"),)

    supports_stale = True

    def __init__(
        self,
        buffer: Count = 10,
        server_lr: PositivePerSeed = 1.0,
        memory_dtype: MemoryDtype = "same",
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, memory_dtype, weighting)
        self.buffer = self.arrivals = buffer

    def aggregate(self, state: RememberedUpdates, report: Report, t: int) -> RememberedUpdates:
        cohort = report.cohort
        calibrated = self.mean(cohort, report.innovation - self.remembered_rows(state, cohort))
        model = cohort.where_nonempty(state.model - self.server_lr * (state.mean + calibrated), state.model)
        return RememberedUpdates(model, state.memory, self.store_client_values(state, cohort, report.innovation))
