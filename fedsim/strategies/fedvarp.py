"""FedVARP: variance of partial participation reduced by remembered innovations (Jhunjhunwala et al., UAI 2022)."""

from __future__ import annotations

from torch import Tensor

from fedsim import checks
from fedsim.federation import Federation
from fedsim.strategies import memory as client_memory
from fedsim.strategies.base import Strategy
from fedsim.strategies.memory import ClientMemory
from fedsim.trainer import Report


class FedVARP(Strategy[ClientMemory]):
    """v = mean_j y_j + mean_{i∈A}(G_i − y_i); x ← x − η_g v; then y_i = G_i for i∈A. An empty round does nothing.

    Memory: one row per client.

    Args:
        server_lr: η_g.
        memory_dtype: of the stored rows: same, float32, float16 or bfloat16.
    """

    def __init__(self, server_lr: float = 1.0, memory_dtype: str = "same") -> None:
        self.server_lr = checks.positive("strategy.server_lr", server_lr)
        self.dtype = client_memory.memory_dtype(memory_dtype)

    def initial(self, model: Tensor, federation: Federation) -> ClientMemory:
        return ClientMemory(model, *client_memory.empty_memory(model, federation, self.dtype))

    def aggregate(self, state: ClientMemory, report: Report, t: int) -> ClientMemory:
        cohort = report.cohort
        surprise = report.innovation - state.memory[cohort.rows].to(state.model.dtype)
        direction = state.mean + cohort.mean(surprise)
        model = cohort.keep_unheard(state.model - self.server_lr * direction, state.model)
        return ClientMemory(model, state.memory, client_memory.remember(state, cohort, report.innovation))
