"""AFA-CD and AFA-CS: arbitrary participation and numbers of local steps (Yang et al., ICML 2022)."""

from __future__ import annotations

from dataclasses import replace

from fedsim.core.constraints import PositivePerSeed
from fedsim.core.federation import Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import RememberedUpdates, RemembersClients
from fedsim.strategies.strategy import ServerRateStrategy, State


class AFACD(ServerRateStrategy[State]):
    """x ← x − η mean_{i∈A} G_i / Σ_k η_k, where the sum over the local steps of client i gives its mean gradient,
    independent of its number of steps and of its staleness. The formula is derived from the paper's abstract.

    With K steps at rate η_l for all clients it is FedAvg with η_g = η / (K η_l). No memory.

    Args:
        server_lr: η, the learning rate of mean gradients, or a list of one per seed; 1 is FedAvg with η_g = 1 for ten
            steps at 0.1.
        weighting: of the mean: uniform, or by data.
    """

    supports_stale = True

    def __init__(self, server_lr: PositivePerSeed = 1.0, weighting: Weighting = "uniform") -> None:
        super().__init__(server_lr)
        self.weighting = weighting

    def aggregate(self, state: State, report: Report, t: int) -> State:
        step = self.mean(report.cohort, report.innovation / report.lr_sum[:, None])
        return replace(state, model=state.model - self.server_lr * step)


class AFACS(RemembersClients[RememberedUpdates]):
    """x ← x − η Σ_i w_i ĝ_i, ĝ_i the last mean gradient of client i, as in `AFACD`, zero before its first
    participation. The server also steps in an empty round. The formula is derived as that of `AFACD`.

    With K steps for all clients it is `mifa` with `memory: gradient` and η_g = η / (K η_l). Memory: one row per client.

    Args:
        server_lr: η, or a list of one per seed.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    supports_stale = True

    def aggregate(self, state: RememberedUpdates, report: Report, t: int) -> RememberedUpdates:
        mean = self.store_client_values(state, report.cohort, report.innovation / report.lr_sum[:, None])
        return replace(state, model=state.model - self.server_lr * mean, mean=mean)
