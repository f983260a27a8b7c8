"""SCAFFOLD: control variates against client drift (Karimireddy et al., ICML 2020)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fedsim import checks
from fedsim.federation import Cohort, Federation
from fedsim.strategies import memory as client_memory
from fedsim.strategies.base import Strategy
from fedsim.strategies.memory import ClientMemory
from fedsim.trainer import Report


class Scaffold(Strategy[ClientMemory]):
    """Local steps follow g − c_i + c; x ← x − η_g mean_A G_i; c_i⁺ = c_i − c + G_i / (s η_l) (option II).

    c is the mean of all c_i, which is the paper's c ← c + (|A|/m) mean_A(c_i⁺ − c_i). Where the rate moves within a
    round, s η_l is the sum of the steps' rates. Memory: one row per client. Runs under local=sgd, whose carry takes
    the correction.

    Args:
        server_lr: η_g.
        memory_dtype: of the control variates: same, float32, float16 or bfloat16.
    """

    def __init__(self, server_lr: float = 1.0, memory_dtype: str = "same") -> None:
        self.server_lr = checks.positive("strategy.server_lr", server_lr)
        self.dtype = client_memory.memory_dtype(memory_dtype)

    def initial(self, model: Tensor, federation: Federation) -> ClientMemory:
        return ClientMemory(model, *client_memory.empty_memory(model, federation, self.dtype))

    def start(self, state: ClientMemory, cohort: Cohort) -> dict[str, Tensor]:
        own = state.memory[cohort.rows].to(state.model.dtype)
        return {"params": cohort.broadcast(state.model), "correction": cohort.broadcast(state.mean) - own}

    def aggregate(self, state: ClientMemory, report: Report, t: int) -> ClientMemory:
        cohort = report.cohort
        control = report.innovation / report.lr_sum[:, None] - report.carry["correction"]  # c_i − c + G_i / (s η_l)
        model = state.model - self.server_lr * cohort.mean(report.innovation)
        return replace(state, model=model, mean=client_memory.remember(state, cohort, control))
