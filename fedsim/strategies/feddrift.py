"""FedDrift: clusters that clients leave when their loss rises and that are merged when they fit each other's data
(Jothimurugesan, Hsieh, Wang, Joshi and Gibbons, AISTATS 2023).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsim.core.constraints import Count, Positive, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.clusters import client_mean_cluster_model, cluster_sizes, first_lowest, largest_cluster_model
from fedsim.strategies.strategy import ServerRateStrategy, State, full_data_gradients

EMPTY = -1  # isolation of a place that holds no cluster


@dataclass
class FedDriftState(State):
    """Adds clusters [R, k, d], the models x_j; choice [R·m] int64, the cluster of each client, −1 before its first
    round; loss [R·m], its loss in its last round; isolation [R, k] int64, in how many rounds each cluster is still
    trained by its founder alone, −1 where there is no cluster."""

    clusters: Tensor
    choice: Tensor
    loss: Tensor
    isolation: Tensor


class FedDrift(ServerRateStrategy[FedDriftState]):
    """Client i trains the x_j with the smallest loss on all its data, F_i(x_j), of the clusters that are not isolated.
    If that loss exceeds its loss in its last round by more than δ, the client has drifted and founds a new cluster,
    which starts from this x_j and is trained by its founder alone for `isolation` rounds. Then x_j ← x_j − η_g
    mean_{i∈A∩j} G_i for each cluster j, and clusters are merged by complete linkage while their distance is below δ,
    d(j, l) = max(L_{j,l} − L_{j,j}, L_{l,j} − L_{l,l}, 0), L_{j,l} the mean loss of x_j on the clients of cluster l;
    merged models are averaged by their numbers of clients.

    In the paper, clusters change between time steps of many rounds, and all past data of a cluster count. Here they
    change in every round, by the present data of participating clients: a rise of less than δ per participation is not
    noticed, and clusters can be merged only in rounds in which clients of both participate. There are k places for
    clusters: a new one takes a place that no client has, if possible one that is empty; if there is none, the client
    stays. Models without clients are kept until their place is needed, for concepts that recur. The authors' program
    replaces the model that was used least recently, and compares accuracies and not losses.

    The global model is that of the largest cluster (the first of several), and newcomers choose by their data. Memory:
    k rows on the server and two numbers per client. Clients receive the models that are in use; the simulation
    evaluates each twice a round on all their data. The host waits in each round.

    Args:
        delta: δ, in units of the loss.
        max_clusters: k; 1 is FedAvg.
        isolation: rounds. It must be long enough for a client alone to learn the new concept.
        server_lr: η_g, or a list of one per seed.
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.
    """

    effective_if = tuple(
        EffectiveIf(name, lambda component, run: component.max_clusters > 1, "{at}.max_clusters above 1")
        for name in ("delta", "isolation")
    )

    clustered = True
    side_information = "the losses of the models and the number of the model that a client has chosen go up as they are"

    def __init__(
        self,
        delta: Positive = 0.5,
        max_clusters: Count = 8,
        isolation: Count = 10,
        server_lr: PositivePerSeed = 1.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.delta, self.max_clusters, self.isolation, self.weighting = delta, max_clusters, isolation, weighting
        self.vectors_down, self.needs_full_gradients = max_clusters, max_clusters > 1

    def initial(self, model: Tensor, federation: Federation) -> FedDriftState:
        clusters = model[:, None].repeat(1, self.max_clusters, 1)
        choice = torch.full((federation.num_memory_rows,), -1, dtype=torch.int64, device=model.device)
        isolation = torch.full(clusters.shape[:2], EMPTY, dtype=torch.int64, device=model.device)
        isolation[:, 0] = 0
        return FedDriftState(model.clone(), clusters, choice, federation.zeros(), isolation)

    def start(self, state: FedDriftState, cohort: Cohort) -> Tensor:
        return state.clusters[cohort.replicate_index, self.chosen(state, cohort)[0]]

    def chosen(self, state: FedDriftState, cohort: Cohort) -> tuple[Tensor, Tensor, Tensor]:
        """Of the cohort's clients: the cluster whose model each trains [n]; whether it is isolated [n]; and the loss of
        each model [n, k], 0 where there is none."""
        isolation, choice = state.isolation[cohort.replicate_index], state.choice[cohort.rows]
        losses = state.clusters.new_zeros(len(cohort), self.max_clusters)
        if self.max_clusters > 1:
            for j in (state.isolation != EMPTY).any(0).nonzero()[:, 0].tolist():
                losses[:, j] = full_data_gradients(cohort, state.clusters[:, j]).loss
        is_isolated = (isolation.gather(1, choice.clamp(min=0)[:, None])[:, 0] > 0) & (choice >= 0)
        best = first_lowest(torch.where(isolation == 0, losses, torch.inf))
        return torch.where(is_isolated, choice, best), is_isolated, losses

    def aggregate(self, state: FedDriftState, report: Report, t: int) -> FedDriftState:
        cohort, federation, k = report.cohort, report.cohort.federation, self.max_clusters
        weights = cohort.weights(self.weighting)
        chosen, is_isolated, losses = self.chosen(state, cohort)
        loss = losses.gather(1, chosen[:, None])[:, 0]
        has_drifted = (state.choice[cohort.rows] >= 0) & ~is_isolated & (loss > state.loss[cohort.rows] + self.delta)
        state.choice[cohort.rows], state.loss[cohort.rows] = chosen, loss
        founded_cluster = self.founded_clusters(state, has_drifted, cohort)
        founds_cluster = founded_cluster >= 0
        state.choice[cohort.rows] = torch.where(founds_cluster, founded_cluster, chosen)

        founder = one_hot(founded_cluster.clamp(min=0), k) * founds_cluster[:, None]
        is_new = cohort.sum(founder) > 0
        origin = cohort.sum(founder * chosen[:, None], 1 / cohort.multiplicity.clamp(min=1)).round().to(torch.int64)
        origin = torch.where(is_new, origin, torch.arange(k, device=origin.device))
        isolation = torch.where(is_new, self.isolation, state.isolation)
        belongs = one_hot(state.choice[cohort.rows], k)
        isolation = isolation - ((cohort.sum(belongs) > 0) & (isolation > 0)).to(torch.int64)
        steps = [self.server_lr * cohort.mean(report.innovation, member * weights) for member in belongs.T]
        clusters = state.clusters.gather(1, origin[:, :, None].expand_as(state.clusters)) - torch.stack(steps, 1)

        compared = one_hot(chosen, k) * ~(is_isolated | founds_cluster)[:, None]
        target = self.merge_targets(losses, compared, weights, cohort)
        share = (
            one_hot(target, k) * cluster_sizes(state.choice, k, federation)[:, :, None]
        )  # [R, k, k] of j in its target
        shares = share.to(clusters.dtype) / share.sum(1, keepdim=True).clamp(min=1)
        is_merged = (one_hot(target, k).sum(1) > 1)[:, :, None]
        clusters = torch.where(is_merged, shares.mT @ clusters, clusters)
        isolation = torch.where(target == torch.arange(k, device=target.device), isolation, EMPTY)
        by_replicate = state.choice.unflatten(0, (federation.num_replicates, -1))
        choice = torch.where(by_replicate >= 0, target.gather(1, by_replicate.clamp(min=0)), by_replicate).flatten()
        model = largest_cluster_model(clusters, cluster_sizes(choice, k, federation))
        return FedDriftState(model, clusters, choice, state.loss, isolation)

    def founded_clusters(self, state: FedDriftState, has_drifted: Tensor, cohort: Cohort) -> Tensor:
        """[n] the place of the cluster that each client founds, in the order of clients; −1 where it founds none."""
        federation, k = cohort.federation, self.max_clusters
        drifted_memory = torch.zeros_like(state.choice)
        drifted_memory[cohort.rows] = has_drifted.to(torch.int64)
        by_client = federation.all_gather_clients(drifted_memory.cpu().numpy()).reshape(federation.num_replicates, -1)
        drifted_up_to = by_client.cumsum(1)[:, federation.local_clients].astype(np.int64).reshape(-1)
        number = torch.as_tensor(drifted_up_to, device=cohort.rows.device)[cohort.rows] - 1
        is_free = cluster_sizes(state.choice, k, federation) == 0
        clusters_by_order = torch.where(is_free, state.isolation, 1).argsort(dim=1, stable=True)[cohort.replicate_index]
        can_found = has_drifted & (number < is_free.sum(1)[cohort.replicate_index])
        new_cluster = clusters_by_order.gather(1, number.clamp(0, k - 1)[:, None])[:, 0]
        return torch.where(can_found, new_cluster, -1)

    def merge_targets(self, losses: Tensor, compared: Tensor, weights: Tensor, cohort: Cohort) -> Tensor:
        """[R, k] int64 the cluster into which each is merged, the first of its group; itself where it is not."""
        total = cohort.sum(losses[:, :, None] * compared[:, None], weights)  # [R, k, k] of x_j on cluster l
        clients_weight = cohort.sum(compared.to(losses.dtype), weights)
        mean_loss = total / torch.where(clients_weight > 0, clients_weight, 1.0)[:, None]
        excess = mean_loss - mean_loss.diagonal(dim1=1, dim2=2)[:, :, None]
        is_compared = clients_weight > 0
        distance = torch.maximum(excess, excess.mT).clamp(min=0)
        distance = torch.where(is_compared[:, :, None] & is_compared[:, None], distance, torch.inf)
        target = np.stack([complete_linkage(of_replicate, self.delta) for of_replicate in distance.cpu().numpy()])
        return torch.as_tensor(target, device=losses.device)

    def client_mean(self, state: FedDriftState, federation: Federation) -> Tensor:
        return client_mean_cluster_model(state.model, state.clusters, state.choice, federation)


def complete_linkage(distance: np.ndarray, threshold: float) -> np.ndarray:
    """[k] int64 the first member of each one's group, where groups are merged while the largest distance [k, k] between
    members of two is below a threshold, the closest two first."""
    distance, first = distance.copy(), np.arange(len(distance))
    np.fill_diagonal(distance, np.inf)
    while distance.min() < threshold:
        a, b = sorted(np.unravel_index(distance.argmin(), distance.shape))
        distance[a] = distance[:, a] = np.maximum(distance[a], distance[b])
        distance[b] = distance[:, b] = np.inf
        first[first == b] = a
    return first
