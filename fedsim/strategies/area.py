"""AREA: mean over all clients of the last model received from each (Iakovidou and Kim, 2024)."""

from __future__ import annotations

from torch import Tensor

from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import update_memory_and_mean
from fedsim.strategies.strategy import ClientModels, KeepsClientModels


class AREA(KeepsClientModels[ClientModels]):
    """x = Σ_i w_i y_i over all clients, y_i the last model received from client i, x⁰ before its first participation.

    Clients start from x^t and send the change of y_i, which the server adds: asynchronous exact averaging, here with
    updates that arrive within their round. MIFA stores innovations; AREA stores models, so that steps are smaller if
    clients participate rarely, and larger local learning rates are possible. Its limit is that of FedAvg with full
    participation, independent of participation frequencies. An empty round changes nothing. Memory: one model per
    client.

    Args:
        weighting: w_i: 'uniform' 1/m, or 'data' fractions.
    """

    def __init__(self, weighting: Weighting = "uniform") -> None:
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> ClientModels:
        return ClientModels.broadcast(model, federation)

    def start(self, state: ClientModels, cohort: Cohort) -> Tensor:
        return cohort.broadcast(state.model)

    def aggregate(self, state: ClientModels, report: Report, t: int) -> ClientModels:
        model = update_memory_and_mean(state.models, state.model, report.cohort, report.end, self.weighting)
        return ClientModels(model, state.models)
