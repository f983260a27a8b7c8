"""Local training only: the baseline without federation."""

from __future__ import annotations

from torch import Tensor

from fedsim.core.federation import Federation
from fedsim.core.report import Report
from fedsim.strategies.strategy import ClientModels, KeepsClientModels


class LocalOnly(KeepsClientModels[ClientModels]):
    """Clients train their own model whenever they are available; nothing is sent and nothing received.

    The state's model is the plain mean of all clients' models, so that there is something to evaluate: nobody has it.
    Memory: one model per client.
    """

    vectors_down = vectors_up = 0

    def initial(self, model: Tensor, federation: Federation) -> ClientModels:
        return ClientModels.broadcast(model, federation)

    def aggregate(self, state: ClientModels, report: Report, t: int) -> ClientModels:
        report.cohort.scatter(state.models, report.end)
        return ClientModels(report.cohort.federation.mean_over_clients(state.models), state.models)
