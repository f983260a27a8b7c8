"""AREA: the mean of the models that all clients delivered last (Iakovidou and Kim, 2024)."""

from __future__ import annotations

from torch import Tensor

from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.memory import store_values
from fedsim.strategies.strategy import ClientModels, KeepsClientModels


class AREA(KeepsClientModels[ClientModels]):
    """x = Σ_i w_i y_i over all clients, y_i the model that client i delivered last, x⁰ before its first time.

    Clients start from x^t and send what y_i has changed by, which the server adds: asynchronous exact averaging, here
    with every delivery within its round. Where MIFA remembers innovations, this remembers models, so that the step is
    damped as clients come seldom, and bears larger local rates. Its limit is that of FedAvg with everybody there,
    whoever comes how often. An empty round changes nothing. Memory: one model per client.

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
        model = store_values(state.models, state.model, report.cohort, report.end, self.weighting)
        return ClientModels(model, state.models)
