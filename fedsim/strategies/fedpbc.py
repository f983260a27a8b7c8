"""FedPBC: the broadcast is postponed to the end of the round (fedpbc Alg. 2)."""

from __future__ import annotations

from typing import Annotated

from torch import Tensor

from fedsim.core.constraints import OneOf
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.strategy import ClientModels, KeepsClientModels

COMPUTING_CLIENTS = ("all", "active")


class FedPBC(KeepsClientModels[ClientModels]):
    """Federated postponed broadcast: connected clients average their models, the others continue with their own.

    Every client starts from its own x_i^t; x^{t+1} = mean_{i∈A} x_i^{(t,s)} is sent only to i∈A. The round is an
    implicit gossip with a doubly stochastic mixing matrix, which keeps the mean of all clients' models: that mean
    (`evaluate=client_mean`) has no bias (fedpbc Thm. 1). x^t averages only connected clients, and has a bias of O(ηs)
    if some are connected more often than others. Memory: one model per client.

    Args:
        compute: 'all': every client computes in every round, also without a connection (the paper's algorithm);
            'active': only the connected ones do (Fig. 2b of the paper, where the bias persists).
        weighting: weights of all means: 'uniform', as in the paper, or 'data', where gossip preserves Σ_i w_i x_i.
    """

    effective_if = (
        EffectiveIf("compute", lambda component, run: run.may_clients_be_absent, "clients that miss rounds"),
    )

    def __init__(
        self, compute: Annotated[str, OneOf(*COMPUTING_CLIENTS)] = "all", weighting: Weighting = "uniform"
    ) -> None:
        self.compute = compute
        self.weighting = weighting

    def initial(self, model: Tensor, federation: Federation) -> ClientModels:
        return ClientModels.broadcast(model, federation)

    def cohort(self, state: ClientModels, active: Cohort) -> Cohort:
        return active.federation.full_cohort(active) if self.compute == "all" else active

    def aggregate(self, state: ClientModels, report: Report, t: int) -> ClientModels:
        cohort = report.cohort
        model = cohort.where_nonempty(self.mean(cohort, report.end), state.model)
        linked_mask = (cohort.multiplicity > 0)[:, None]
        cohort.scatter(state.models, cohort.broadcast(model).where(linked_mask, report.end))
        return ClientModels(model, state.models)
