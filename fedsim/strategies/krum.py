"""Krum, multi-Krum and Bulyan: robust aggregation by distances to the nearest neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core.constraints import Count, NonNegative, PositivePerSeed
from fedsim.core.federation import Weighting
from fedsim.core.statistics import columnwise_median
from fedsim.strategies.per_replicate import NamedTensors
from fedsim.strategies.robust import Robust, weighted_mean


def krum_scores(squares: Tensor, num_byzantine: int) -> Tensor:
    """[k] the sum of the k − f − 2 smallest squared distances of each row to others, from all of them [k, k]."""
    distances = squares.clone().fill_diagonal_(torch.inf)
    return distances.sort(1).values[:, : max(0, len(squares) - num_byzantine - 2)].sum(1)


def squared_distances(rows: Tensor) -> Tensor:
    """[k, d] → [k, k], differences before squares, so that near rows are told apart."""
    return torch.stack([(rows - row).square().sum(1) for row in rows])


class Krum(Robust):
    """The row with the smallest score, the sum of the n − f − 2 smallest ‖G_i − G_j‖² (Blanchard et al. 2017). n ≥ 2f +
    3.

    Args:
        server_lr, bad, bucket: as `Robust`.
    """

    def __init__(self, server_lr: PositivePerSeed = 1.0, bad: NonNegative = 0.1, bucket: Count = 1) -> None:
        super().__init__(server_lr, bad, bucket)

    def min_aggregated_rows(self, num_byzantine: int) -> int:
        return 2 * num_byzantine + 3

    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        best = krum_scores(squared_distances(rows), num_byzantine).argmin(
            0, keepdim=True
        )  # a Python number would require waiting for the device
        return rows[best][0]


class MultiKrum(Krum):
    """The mean of the n − f rows with the smallest Krum scores (Blanchard et al. 2017). n ≥ 2f + 3.

    Args:
        weighting: weights of that mean: 'uniform', or 'data' fractions; scores are not weighted.
        server_lr, bad, bucket: as `Robust`.
    """

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        bad: NonNegative = 0.1,
        bucket: Count = 1,
        weighting: Weighting = "uniform",
    ) -> None:
        Robust.__init__(self, server_lr, bad, bucket, weighting)

    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        order = krum_scores(squared_distances(rows), num_byzantine).sort(stable=True).indices
        return rows[order[: len(rows) - num_byzantine]].mean(0)

    def combine_weighted(self, rows: Tensor, weights: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        selected_rows = (
            krum_scores(squared_distances(rows), num_byzantine).sort(stable=True).indices[: len(rows) - num_byzantine]
        )
        return weighted_mean(rows[selected_rows], weights[selected_rows])


class Bulyan(Krum):
    """Krum selects θ = n − 2f rows one after another; the result is, in every column, the mean of the θ − 2f values
    nearest to their median (El Mhamdi, Guerraoui and Rouault 2018). n ≥ 4f + 3. Ties between two rows that are each
    other's nearest neighbour are broken by client index.

    Args:
        server_lr, bad, bucket: as `Robust`.
    """

    def min_aggregated_rows(self, num_byzantine: int) -> int:
        return 4 * num_byzantine + 3

    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        squares = squared_distances(rows)
        remaining_rows = torch.arange(len(rows), device=rows.device)
        chosen_positions = []
        for _ in range(len(rows) - 2 * num_byzantine):
            best = krum_scores(squares[remaining_rows][:, remaining_rows], num_byzantine).argmin(0, keepdim=True)
            chosen_positions.append(remaining_rows[best])
            positions = torch.arange(len(remaining_rows) - 1, device=remaining_rows.device)
            remaining_rows = remaining_rows[positions + (positions >= best)]  # without it
        selected_rows = rows[torch.cat(chosen_positions)]
        nearest_values = (
            (selected_rows - columnwise_median(selected_rows))
            .abs()
            .sort(dim=0, stable=True)
            .indices[: len(selected_rows) - 2 * num_byzantine]
        )
        return selected_rows.gather(0, nearest_values).mean(0)
