"""CFL: clusters of clients that are split where a cluster's clients disagree at a stationary point (Sattler, Müller and
Samek, IEEE TNNLS 2021).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import normalize, one_hot

from fedsim.core.constraints import Count, CountOrZero, Fraction, NonNegative, OneOf, Positive, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.clusters import client_mean_cluster_model, cluster_sizes, largest_cluster_model
from fedsim.strategies.strategy import ServerRateStrategy, State

LINKAGE_RULES = ("single", "complete")


@dataclass
class CFLState(State):
    """Adds clusters [R, k, d], the models x_c; choice [R·m] int64, the cluster of each client, −1 (the first one)
    before its first round; updates [R·m, d], the last G_i of each client, 0 before."""

    clusters: Tensor
    choice: Tensor
    updates: Tensor


class CFL(ServerRateStrategy[CFLState]):
    """Clustered federated learning: x_c ← x_c − η_g mean_{i∈A∩c} G_i for each cluster c, at first one of all clients.
    Before that, c is split in two if ‖mean_{i∈c} G_i‖ < ε₁ and max_{i∈c} ‖G_i‖ > ε₂ (x_c is near a stationary point of
    the cluster's loss, and not near those of all its clients), so that max cos(G_i, G_j) over pairs from both halves is
    least, and if √((1 − that maximum)/2) > γ. Both halves go on from x_c.

    In the paper all clients participate. Here G_i is the last update of a client, and clusters are not split before all
    clients have participated. Single linkage finds the best halves; the authors' program (fl_devices.py) takes complete
    linkage, splits no pair, begins in round 20 and has no γ. The global model is that of the largest cluster (the first
    of several), which newcomers receive. Memory: one row per client, k rows on the server. From `start_round` on the
    host waits in each round, and of several ranks each receives the updates of all clients.

    Args:
        eps_1: ε₁.
        eps_2: ε₂.
        max_clusters: k, number of clusters from which on none is split; 1 is FedAvg.
        start_round: first round in which clusters can be split.
        gamma: γ.
        linkage: 'single', or 'complete', which merges sets of clients by their least similar pair.
        server_lr: η_g, or a list of one per seed.
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.
    """

    effective_if = (
        *(
            EffectiveIf(name, lambda component, run: component.max_clusters > 1, "{at}.max_clusters above 1")
            for name in ("eps_1", "eps_2", "start_round", "gamma", "linkage")
        ),
        *(
            EffectiveIf(
                name, lambda component, run: component.start_round < run.rounds, "rounds after {at}.start_round"
            )
            for name in ("eps_1", "eps_2", "start_round", "max_clusters", "gamma", "linkage")
        ),
    )

    clustered = True

    def __init__(
        self,
        eps_1: Positive = 0.4,
        eps_2: NonNegative = 1.6,
        max_clusters: Count = 8,
        start_round: CountOrZero = 0,
        gamma: Fraction = 0.0,
        linkage: Annotated[str, OneOf(*LINKAGE_RULES)] = "single",
        server_lr: PositivePerSeed = 1.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.eps_1, self.eps_2, self.gamma = eps_1, eps_2, gamma
        self.max_clusters, self.start_round = max_clusters, start_round
        self.linkage, self.weighting = linkage, weighting

    def initial(self, model: Tensor, federation: Federation) -> CFLState:
        clusters = model[:, None].repeat(1, self.max_clusters, 1)
        choice = torch.full((federation.num_memory_rows,), -1, dtype=torch.int64, device=model.device)
        return CFLState(model.clone(), clusters, choice, federation.zeros(model.shape[1]))

    def start(self, state: CFLState, cohort: Cohort) -> Tensor:
        choice = state.choice[cohort.rows]
        models = state.clusters[cohort.replicate_index, choice.clamp(min=0)]
        return torch.where((choice >= 0)[:, None], models, cohort.broadcast(state.model))

    def aggregate(self, state: CFLState, report: Report, t: int) -> CFLState:
        cohort, federation = report.cohort, report.cohort.federation
        cohort.scatter(state.updates, report.innovation)
        state.choice[cohort.rows] = state.choice[cohort.rows].clamp(min=0)
        cluster_models, cluster_of_client = state.clusters, state.choice
        if t >= self.start_round and self.max_clusters > 1:
            cluster_models, cluster_of_client = self.split_clusters(state, cohort)
        cluster_or_first = cluster_of_client.clamp(min=0)  # clients that never took part belong to the first cluster
        membership = one_hot(cluster_or_first, self.max_clusters).to(cluster_models.dtype)  # [R·m, k]
        weights = cohort.weights(self.weighting)
        steps = [cohort.mean(report.innovation, member * weights) for member in membership[cohort.rows].T]
        cluster_models = cluster_models - torch.stack([self.server_lr * step for step in steps], 1)
        members = cluster_sizes(cluster_or_first, self.max_clusters, federation)
        return CFLState(
            largest_cluster_model(cluster_models, members), cluster_models, cluster_of_client, state.updates
        )

    def split_clusters(self, state: CFLState, cohort: Cohort) -> tuple[Tensor, Tensor]:
        """Models [R, k, d] and clients' clusters [R·m] after the splits of a round."""
        federation, ones = cohort.federation, np.ones(cohort.shape)
        all_clients = federation.make_cohort(ones, ones)
        by_client = (all_clients.gather(state.updates), state.choice, all_clients.weights(self.weighting))
        replicates = zip(*(all_clients.split_by_replicate(rows) for rows in by_client), strict=True)
        cluster_models, new_assignments = state.clusters.clone(), []
        for r, (nonempty, (client_updates, cluster_of_client, weights)) in enumerate(
            zip(cohort.is_nonempty.tolist(), replicates, strict=True)
        ):
            cluster_of_client = cluster_of_client.clone()
            num_clusters = int(cluster_of_client.max()) + 1
            for c in range(num_clusters if nonempty and bool((cluster_of_client >= 0).all()) else 0):
                members = (cluster_of_client == c).nonzero()[:, 0]
                leaving = self.split_off_mask(client_updates[members], weights[members])
                if num_clusters < self.max_clusters and leaving.any():
                    cluster_of_client[members[leaving]] = num_clusters
                    cluster_models[r, num_clusters] = cluster_models[r, c]
                    num_clusters += 1
            new_assignments.append(cluster_of_client)
        return cluster_models, torch.stack(new_assignments)[:, federation.ranks.client_slice].flatten()

    def split_off_mask(self, client_updates: Tensor, weights: Tensor) -> Tensor:
        """[k] bool: which of a cluster's clients, with updates [k, d], form a new one; none where it is not split."""
        from sklearn.cluster import AgglomerativeClustering

        stays_mask = torch.zeros(len(client_updates), dtype=torch.bool, device=client_updates.device)
        mean = weights @ client_updates / weights.sum()
        if len(client_updates) < 2 or not bool(
            (mean.norm() < self.eps_1) & (client_updates.norm(dim=1).max() > self.eps_2)
        ):
            return stays_mask
        unit = normalize(client_updates, dim=1, eps=torch.finfo(client_updates.dtype).tiny)
        similarity = unit @ unit.T
        halves = AgglomerativeClustering(2, metric="precomputed", linkage=self.linkage)
        labels = torch.as_tensor(halves.fit_predict(1 - similarity.cpu().numpy()), device=client_updates.device)
        leaving = labels != labels[0]
        nearest = similarity[leaving][:, ~leaving].max()
        return leaving if bool(((1 - nearest) / 2).clamp(min=0).sqrt() > self.gamma) else stays_mask

    def client_mean(self, state: CFLState, federation: Federation) -> Tensor:
        return client_mean_cluster_model(state.model, state.clusters, state.choice, federation)
