"""Krum, multi-Krum and Bulyan: robust aggregation by distances to the nearest neighbours."""

from __future__ import annotations

import torch
from torch import Tensor

from fedsim.core.constraints import Count, NonNegative, PositivePerSeed
from fedsim.core.federation import Weighting
from fedsim.core.statistics import median_of
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

    def min_rows(self, num_byzantine: int) -> int:
        return 2 * num_byzantine + 3

    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        best = krum_scores(squared_distances(rows), num_byzantine).argmin(
            0, keepdim=True
        )  # a plain number would be waited for
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
        selected = (
            krum_scores(squared_distances(rows), num_byzantine).sort(stable=True).indices[: len(rows) - num_byzantine]
        )
        return weighted_mean(rows[selected], weights[selected])


class Bulyan(Krum):
    """Krum selects θ = n − 2f rows one after another; the result is, in every column, the mean of the θ − 2f values
    nearest to their median (El Mhamdi, Guerraoui and Rouault 2018). n ≥ 4f + 3. Ties between two rows that are each
    other's nearest neighbour are broken by client index.

    Args:
        server_lr, bad, bucket: as `Robust`.
    """

    def min_rows(self, num_byzantine: int) -> int:
        return 4 * num_byzantine + 3

    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        squares = squared_distances(rows)
        remaining = torch.arange(len(rows), device=rows.device)
        chosen_positions = []
        for _ in range(len(rows) - 2 * num_byzantine):
            best = krum_scores(squares[remaining][:, remaining], num_byzantine).argmin(0, keepdim=True)
            chosen_positions.append(remaining[best])
            positions = torch.arange(len(remaining) - 1, device=remaining.device)
            remaining = remaining[positions + (positions >= best)]  # without it
        selected = rows[torch.cat(chosen_positions)]
        nearest = (
            (selected - median_of(selected)).abs().sort(dim=0, stable=True).indices[: len(selected) - 2 * num_byzantine]
        )
        return selected.gather(0, nearest).mean(0)
