"""DSGD-GD: without a server; clients average models with their neighbours and deploy their own (Li, Yau and Wai,
2022).
"""

from __future__ import annotations

import itertools
from typing import Annotated

import numpy as np
import torch
from torch import Tensor

from fedsim.core.constraints import Fraction, OneOf
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation
from fedsim.core.report import Report
from fedsim.strategies.strategy import ClientModels, KeepsClientModels
from fedsim.strategies.topologies import TOPOLOGIES, CommunicationGraph

MIXING_TIMES = ("start", "end")
DEGREE_COUNTS = ("all", "there")


class DSGD(KeepsClientModels[ClientModels]):
    """Decentralised SGD with greedy deployment (Li, Yau and Wai, NeurIPS 2022): x_i ← Σ_j W_ij x_j − G_i.

    W is the doubly stochastic mixing matrix of a network (`fedsim.strategies.topologies`); the rows and columns of
    absent clients are those of the identity. G_i is the innovation of local steps from the client's own x_i; the paper
    uses one step. Under a shift with deploy=step each client deploys its own model before consensus is reached; the
    limit is still the θ^PS of the federation, which exists if the mean of the clients' sensitivities is small, even if
    some are large. The evaluated model is the mean of all clients' models, which mixing does not change. Memory: one
    model per client.

    Bytes are counted for one neighbour: a client sends one model and receives one.

    Args:
        topology: ring, torus, erdos_renyi, star or complete; the same for all replicates.
        probability, seed: of erdos_renyi's links.
        mix: 'start' averages the models before the local steps, as above; 'end' those after them, x_i ← Σ_j W_ij (x_j −
            G_j).
        degrees: degrees in the weights W_ij = 1 / (1 + max(deg_i, deg_j)): 'all': in the complete network, so that a
            link's weight does not depend on which other clients are absent; 'there': among available clients.
            topology=complete mix=end degrees=there is FedPBC with compute=active.
    """

    effective_if = (
        EffectiveIf(
            "probability", lambda component, run: component.topology == "erdos_renyi", "{at}.topology=erdos_renyi"
        ),
        EffectiveIf("seed", lambda component, run: component.topology == "erdos_renyi", "{at}.topology=erdos_renyi"),
        EffectiveIf("degrees", lambda component, run: run.may_clients_be_absent, "clients that miss rounds"),
    )

    sends_rows = False
    side_information = "models go to neighbours as they are"

    def __init__(
        self,
        topology: Annotated[str, OneOf(*TOPOLOGIES)] = "ring",
        probability: Fraction = 0.5,
        mix: Annotated[str, OneOf(*MIXING_TIMES)] = "start",
        degrees: Annotated[str, OneOf(*DEGREE_COUNTS)] = "all",
        seed: int = 0,
    ) -> None:
        self.topology = topology
        self.probability = probability
        self.mixes_end = mix == "end"
        self.degrees, self.seed = degrees, seed

    def network(self, federation: Federation) -> CommunicationGraph:
        """Of these clients."""
        return CommunicationGraph(self.topology, federation.clients, self.probability, self.seed)

    def initial(self, model: Tensor, federation: Federation) -> ClientModels:
        if not self.network(federation).is_connected():
            raise ConfigError(
                f"strategy.probability={self.probability:g} leaves the graph of the "
                f"{federation.clients} clients disconnected; raise it, or choose another strategy.seed"
            )
        return ClientModels.broadcast(model, federation)

    def aggregate(self, state: ClientModels, report: Report, t: int) -> ClientModels:
        host = report.cohort.host_index
        cohort = Cohort(report.cohort.federation, host.rows, np.ones(len(host.rows)), host.probability, t)
        if self.mixes_end:
            models = self.mixed_rows(cohort, report.end)
        else:
            models = self.mixed_rows(cohort, report.start) - (report.start - report.end)
        cohort.scatter(state.models, models)
        model = state.model + cohort.sum(models - report.start) / cohort.federation.clients
        return ClientModels(model, state.models)

    def mixed_rows(self, cohort: Cohort, rows: Tensor) -> Tensor:
        """[n, d] Σ_j W_ij of the rows [n, d] of each replicate's clients."""
        mixing_network, m = self.network(cohort.federation), cohort.federation.clients
        _, virtual_clients, bounds = cohort.all_gather_host(cohort.host_index.multiplicity)
        mixed_rows = torch.empty_like(rows)
        rows_and_bounds = zip(cohort.split_by_replicate(rows), itertools.pairwise(bounds), strict=True)
        for (replicate_rows, (first_row, end_row)), (a, b) in zip(
            rows_and_bounds, itertools.pairwise(cohort.replicate_bounds), strict=True
        ):
            participants = virtual_clients[first_row:end_row] % m
            local_positions = np.searchsorted(
                participants, cohort.host_index.virtual_clients[a:b] % m
            )  # of those, this rank's
            weights = mixing_network.mixing_matrix(participants, self.degrees == "all")[local_positions]
            mixed_rows[a:b] = torch.as_tensor(weights, dtype=rows.dtype, device=rows.device) @ replicate_rows
        return mixed_rows
