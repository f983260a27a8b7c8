"""IFCA: several server models; each client trains the one with the smallest loss on its data (Ghosh et al., NeurIPS
2020).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from fedsim.core import rng
from fedsim.core.constraints import Count, NonNegative, OneOf, PositivePerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Cohort, Federation, Weighting
from fedsim.core.report import Report
from fedsim.strategies.clusters import client_mean_cluster_model, first_lowest, largest_cluster_model
from fedsim.strategies.strategy import ServerRateStrategy, State, full_data_gradients

AVERAGED_QUANTITIES = ("models", "gradients")


@dataclass
class IFCAState(State):
    """Adds clusters [R, k, d], the server's models x_j; choice [R·m] int64, the cluster that the client trained last,
    −1 before its first round; and members [R, k] int64, how many clients have each."""

    clusters: Tensor
    choice: Tensor
    members: Tensor


class IFCA(ServerRateStrategy[IFCAState]):
    """The iterative federated clustering algorithm: client i receives x_1, …, x_k, trains the one with the smallest
    loss on all its data, j(i) = argmin_j F_i(x_j) (the first in case of ties), and x_j ← x_j − η_g mean_{i∈A, j(i)=j}
    G_i.

    A model that no client chose does not change. Equal models would stay equal, so the initial models differ by
    Gaussian noise. The global model is the x_j that most clients trained last (the first one in case of ties, and
    before the first participation), which would be given to an unknown client. `evaluate=client_mean` is the mean of
    the x_{j(i)}, with the global model for clients that have not participated. Clients' own models
    (`personal.over=all`), and the initial models of newcomers, are those that they would choose now by their training
    data; the authors' program (mnist/train_cluster_mnist.py) lets test clients choose by the samples on which they are
    evaluated. Memory: k rows on the server and one number per client. A client receives k models, and evaluates each on
    all its data.

    Args:
        k: number of models; 1 is FedAvg.
        spread: standard deviation of the noise on the initial models. It must be large enough: if all clients choose
            the same model at first, the others are not trained.
        average: 'models': the mean is over the clients that chose x_j, as in that program; 'gradients': x_j ← x_j − η_g
            (1/|A|) Σ_{i∈A, j(i)=j} G_i, which with one step on all data is gradient averaging as in its
            synthetic/train_cluster.py.
        server_lr: η_g, or a list of one per seed.
        weighting: w_i of the means: 'uniform' 1/m, or 'data' fractions.
    """

    effective_if = (
        EffectiveIf("spread", lambda component, run: component.k > 1, "{at}.k above 1"),
        EffectiveIf("average", lambda component, run: component.k > 1, "{at}.k above 1"),
    )

    asks, clustered = True, True
    side_information = "the number of the model that a client has chosen goes up as it is"

    def __init__(
        self,
        k: Count = 2,
        spread: NonNegative = 0.1,
        average: Annotated[str, OneOf(*AVERAGED_QUANTITIES)] = "models",
        server_lr: PositivePerSeed = 1.0,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr)
        self.k, self.spread = k, spread
        if self.k > 1 and not self.spread:
            raise ConfigError(
                key="spread",
                value=0,
                needs="makes all models start equal and stay equal; raise it, or {k}=1",
                mentions=("k",),
            )
        self.average = average
        self.weighting = weighting
        self.vectors_down, self.needs_full_gradients = self.k, self.k > 1

    def initial(self, model: Tensor, federation: Federation) -> IFCAState:
        (replicates, d), device = model.shape, model.device
        clusters = model[:, None].clone()
        if self.k > 1:
            seeds, cluster_index = federation.seed_of_replicate[:, None], torch.arange(self.k, device=device)
            keys = rng.row_keys(seeds, rng.Purpose.CLUSTER, cluster_index)
            clusters = clusters + self.spread * rng.normal(keys[..., None], torch.arange(d, device=device), model.dtype)
        minus_ones = torch.full((federation.num_memory_rows,), -1, dtype=torch.int64, device=device)
        members = torch.zeros(replicates, self.k, dtype=torch.int64, device=device)
        return IFCAState(clusters[:, 0].clone(), clusters, minus_ones, members)

    def start(self, state: IFCAState, cohort: Cohort) -> Tensor:
        if self.k == 1:
            return cohort.broadcast(state.model)
        losses = torch.stack([full_data_gradients(cohort, state.clusters[:, j]).loss for j in range(self.k)], dim=1)
        return state.clusters[cohort.replicate_index, first_lowest(losses)]

    def aggregate(self, state: IFCAState, report: Report, t: int) -> IFCAState:
        cohort, previous_choice = report.cohort, state.choice[report.cohort.rows]
        matches_cluster = [(report.start == cohort.broadcast(state.clusters[:, j])).all(1) for j in range(self.k)]
        # of equal models the first, as in `start`
        chosen_cluster = torch.stack(matches_cluster, dim=1).to(torch.uint8).argmax(1)
        cluster_one_hot, w = one_hot(chosen_cluster, self.k), cohort.weights(self.weighting)
        clusters = torch.stack(
            [self.updated_model(state, report, j, cluster_one_hot[:, j] * w) for j in range(self.k)], dim=1
        )
        member_changes = (
            cluster_one_hot - one_hot(previous_choice.clamp(min=0), self.k) * (previous_choice >= 0)[:, None]
        )
        members = state.members + cohort.sum(member_changes, 1.0 / cohort.multiplicity.clamp(min=1)).round().to(
            torch.int64
        )
        state.choice[cohort.rows] = chosen_cluster
        return IFCAState(largest_cluster_model(clusters, members), clusters, state.choice, members)

    def updated_model(self, state: IFCAState, report: Report, j: int, weights: Tensor) -> Tensor:
        """[R, d] the next x_j, for weights [n] that are 0 where another was chosen."""
        cohort = report.cohort
        if self.average == "models":
            step = cohort.mean(report.innovation, weights)
        else:
            total_weight = cohort.sum(cohort.weights(self.weighting))
            step = cohort.sum(report.innovation, weights) / torch.where(total_weight > 0, total_weight, 1.0)[:, None]
        return state.clusters[:, j] - self.server_lr * step

    def client_mean(self, state: IFCAState, federation: Federation) -> Tensor:
        return client_mean_cluster_model(state.model, state.clusters, state.choice, federation)
