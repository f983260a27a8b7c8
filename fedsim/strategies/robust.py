"""Robust aggregation: FedAvg with a robust rule instead of the mean, against Byzantine clients."""

from __future__ import annotations

import logging
import math
from abc import abstractmethod

import torch
from torch import Tensor

from fedsim.availability import Availability
from fedsim.core import rng
from fedsim.core.constraints import Count, NonNegative, Positive, PositivePerSeed
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Weighting
from fedsim.core.per_seed import as_per_seed
from fedsim.core.statistics import columnwise_median, columnwise_trimmed_mean
from fedsim.strategies.per_replicate import NamedTensors, PerReplicateStrategy, ReplicateRows

log = logging.getLogger(__name__)


class Robust(PerReplicateStrategy):
    """x ← x − η_g · combine(G_i, i∈A). Unweighted by default: Byzantine clients could report a false number of samples
    to gain weight.

    With `bucket` s above 1 the rows are randomly divided into buckets of s, and the rule is applied to the buckets'
    means (Karimireddy, He and Jaggi 2022). If fewer clients participate than the rule needs, the model does not change.

    Args:
        server_lr: η_g, or a list of one per seed.
        bad: f, assumed number of Byzantine rows in a round: an integer, or below 1 a fraction of the rows, rounded up.
        bucket: s.
        weighting: for rules that support it (`combine_weighted`): 'uniform', or 'data' fractions. A bucket's mean is
            then weighted too, with the total weight of its rows.
    """

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        bad: NonNegative = 0.0,
        bucket: Count = 1,
        weighting: Weighting = "uniform",
    ) -> None:
        self.server_lr = as_per_seed(server_lr)
        self.bad = bad
        if self.bad >= 1 and self.bad != int(self.bad):
            raise ConfigError(key="bad", value=bad, needs="must be a whole number of clients, or a share below 1")
        self.bucket = bucket
        self.weighting = weighting
        self._has_warned = False

    def check(self, availability: Availability) -> None:
        m = availability.population.clients
        needed_rows = self.min_aggregated_rows(self.byzantine_count(m))
        if needed_rows > -(-m // self.bucket):
            raise ConfigError(
                f"{{bad}}={self.bad:g}: {type(self).__name__} needs {needed_rows} rows in a round, and "
                f"{m} clients give {-(-m // self.bucket)}; lower {{bad}} or {{bucket}}",
                mentions=("bad", "bucket"),
            )

    def byzantine_count(self, n: int) -> int:
        """f of n rows."""
        return math.ceil(self.bad * n) if self.bad < 1 else int(self.bad)

    def min_aggregated_rows(self, num_byzantine: int) -> int:
        """How many rows it needs, given f."""
        return 2 * num_byzantine + 1

    @abstractmethod
    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        """[k, d] → [d], f of them bad; memory as in `PerReplicateStrategy`."""

    def combine_weighted(self, rows: Tensor, weights: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        """The same of rows with weights [k], which sum to 1."""
        raise ConfigError(f"strategy.weighting=data has no meaning for {type(self).__name__}; use uniform")

    def next_model(self, model: Tensor, rows: ReplicateRows, memory: NamedTensors, t: int) -> Tensor:
        aggregated = self.robust_aggregate(rows, memory, t)
        return model if aggregated is None else model - rows.number(self.server_lr) * aggregated

    def robust_aggregate(self, rows: ReplicateRows, memory: NamedTensors, t: int) -> Tensor | None:
        """[d] what it makes of a replicate's rows in round t; None where they are too few."""
        sent_rows = rows.innovation
        bad = self.byzantine_count(len(sent_rows))
        weights = None if self.weighting == "uniform" else rows.data_fraction / rows.data_fraction.sum()
        if self.bucket > 1:
            order = rng.generator(rows.seed, rng.Purpose.STRATEGY, t).permutation(len(sent_rows))
            permutation = torch.as_tensor(order, device=sent_rows.device)
            mixed = sent_rows[permutation]
            if weights is None:
                sent_rows = torch.stack([bucket.mean(0) for bucket in mixed.split(self.bucket)])
            else:
                shares = weights[permutation].split(self.bucket)
                sent_rows = torch.stack(
                    [weighted_mean(bucket, w) for bucket, w in zip(mixed.split(self.bucket), shares, strict=True)]
                )
                weights = torch.stack([bucket_shares.sum() for bucket_shares in shares])
        if len(sent_rows) < self.min_aggregated_rows(bad):
            if not self._has_warned:
                log.warning(
                    "%s: %d rows in round %d, but it needs %d; in such rounds the model does not change",
                    *(type(self).__name__, len(sent_rows), t, self.min_aggregated_rows(bad)),
                )
            self._has_warned = True
            return None
        return (
            self.combine(sent_rows, bad, memory)
            if weights is None
            else self.combine_weighted(sent_rows, weights, bad, memory)
        )


def weighted_mean(rows: Tensor, weights: Tensor) -> Tensor:
    """[k, d], [k] → [d], the weighted mean; the plain one where all weights are 0."""
    total = weights.sum()
    return torch.where(total > 0, weights @ rows / torch.where(total > 0, total, 1.0), rows.mean(0))


def clip_norms(rows: Tensor, length: float) -> Tensor:
    """Rows no longer than that."""
    return rows * (length / rows.norm(dim=1, keepdim=True)).clamp(max=1.0)


class Median(Robust):
    """The coordinate-wise median; for an even number of rows the mean of the middle two (Yin et al. 2018).

    Args:
        server_lr, bucket: as `Robust`.
    """

    def __init__(self, server_lr: PositivePerSeed = 1.0, bucket: Count = 1) -> None:
        super().__init__(server_lr, 0, bucket)

    def combine(self, rows: Tensor, bad: int, memory: NamedTensors) -> Tensor:
        return columnwise_median(rows)


class TrimmedMean(Robust):
    """The coordinate-wise mean without the f largest and f smallest values (Yin et al. 2018).

    Args:
        server_lr, bad, bucket: as `Robust`.
    """

    def __init__(self, server_lr: PositivePerSeed = 1.0, bad: NonNegative = 0.1, bucket: Count = 1) -> None:
        super().__init__(server_lr, bad, bucket)

    def combine(self, rows: Tensor, bad: int, memory: NamedTensors) -> Tensor:
        return columnwise_trimmed_mean(rows, bad)


class RFA(Robust):
    """The geometric median, by the smoothed Weiszfeld algorithm started at the mean (Pillutla, Kakade and Harchaoui
    2022).

    z ← Σ β_i G_i / Σ β_i, β_i = w_i / max(ν, ‖z − G_i‖).

    Args:
        iterations: 3 or 4 in the paper.
        nu: ν.
        weighting: w_i: 'uniform', or 'data' fractions as in the paper.
        server_lr, bucket: as `Robust`.
    """

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        iterations: Count = 4,
        nu: Positive = 1e-6,
        bucket: Count = 1,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, 0, bucket, weighting)
        self.iterations, self.nu = iterations, nu

    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        centre = rows.mean(0)
        for _ in range(self.iterations):
            weights = 1 / (rows - centre).norm(dim=1, keepdim=True).clamp(min=self.nu)
            centre = (weights * rows).sum(0) / weights.sum()
        return centre

    def combine_weighted(self, rows: Tensor, weights: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        centre = weighted_mean(rows, weights)
        for _ in range(self.iterations):
            beta = weights / (rows - centre).norm(dim=1).clamp(min=self.nu)
            centre = beta @ rows / beta.sum()
        return centre


class CentredClipping(Robust):
    """v ← v + mean (G_i − v) · min(1, ρ / ‖G_i − v‖), starting from the last round's v (Karimireddy, He and Jaggi
    2021).

    Memory: one row on the server.

    Args:
        radius: ρ.
        iterations: number of these steps per round.
        weighting: of the mean: 'uniform', or 'data' fractions.
        server_lr, bucket: as `Robust`.
    """

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        radius: Positive = 1.0,
        iterations: Count = 1,
        bucket: Count = 1,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, 0, bucket, weighting)
        self.radius = radius
        self.iterations = iterations

    def memory(self, model: Tensor) -> NamedTensors:
        return {"centre": torch.zeros_like(model)}

    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        for _ in range(self.iterations):
            memory["centre"] = memory["centre"] + clip_norms(rows - memory["centre"], self.radius).mean(0)
        return memory["centre"]

    def combine_weighted(self, rows: Tensor, weights: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        for _ in range(self.iterations):
            memory["centre"] = memory["centre"] + weighted_mean(
                clip_norms(rows - memory["centre"], self.radius), weights
            )
        return memory["centre"]


class NormBound(Robust):
    """The mean of G_i · min(1, C / ‖G_i‖) (Sun et al. 2019).

    Args:
        norm: C.
        weighting: of the mean: 'uniform', or 'data' fractions.
        server_lr, bucket: as `Robust`.
    """

    def __init__(
        self,
        server_lr: PositivePerSeed = 1.0,
        norm: Positive = 1.0,
        bucket: Count = 1,
        weighting: Weighting = "uniform",
    ) -> None:
        super().__init__(server_lr, 0, bucket, weighting)
        self.norm = norm

    def combine(self, rows: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        return clip_norms(rows, self.norm).mean(0)

    def combine_weighted(self, rows: Tensor, weights: Tensor, num_byzantine: int, memory: NamedTensors) -> Tensor:
        return weighted_mean(clip_norms(rows, self.norm), weights)
