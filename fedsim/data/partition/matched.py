"""Clients with prescribed label distributions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsim.core.constraints import Count, Fraction
from fedsim.core.errors import ConfigError
from fedsim.data.partition.partition import Partition, Samples
from fedsim.data.partition.quantity import largest_remainder_counts


class Matched(Partition):
    """Every client has n samples, n p_{i,c} of class c, rounded so that they sum to n. By default n is the largest size
    for which there are enough samples of every class; remaining samples are not used. Without `distribution`, p is that
    of the data for all clients: a stratified partition, in which clients are as similar as possible.

    Args:
        distribution: p, up to a factor: a row of C numbers for all clients, or one row per client; None: that of the
            data.
        size: n; None: the largest.
        validation: of every partition.
    """

    name = "matched"
    remedy = "lower clients, or use more data"

    def __init__(
        self,
        distribution: Sequence[float | Sequence[float]] | None = None,
        size: Count | None = None,
        validation: Fraction = 0.0,
    ) -> None:
        super().__init__(validation)
        self.distribution = None if distribution is None else class_shares(distribution)
        self.size = size

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        labels = samples.need_labels(self.name)
        classes = int(labels.max()) + 1
        class_counts = np.bincount(labels, minlength=classes)
        distribution = class_counts[None] / class_counts.sum() if self.distribution is None else self.distribution
        if distribution.shape[1] < classes or len(distribution) not in (1, clients):
            raise ConfigError(
                f"partition.distribution has the shape {list(distribution.shape)}, but there are {classes} classes and "
                f"clients={clients}; give a row of {classes} numbers, or one for each client"
            )
        class_counts = np.bincount(labels, minlength=distribution.shape[1])
        rows = np.broadcast_to(distribution, (clients, distribution.shape[1]))
        counts = self._class_counts(rows, class_counts)
        pools = [draw.permutation(np.flatnonzero(labels == c)) for c in range(len(class_counts))]
        class_ends = np.cumsum(counts, axis=0)
        return [
            np.concatenate(
                [class_samples[e - k : e] for class_samples, e, k in zip(pools, class_ends[i], counts[i], strict=True)]
            )
            for i in range(clients)
        ]

    def _class_counts(self, rows: np.ndarray, available: np.ndarray) -> np.ndarray:
        """[m, C] samples of every client and class, for the requested or the largest possible size."""

        def class_counts_for_size(size: int) -> np.ndarray:
            return np.stack([largest_remainder_counts(row, size) for row in rows])

        if self.size is not None:
            counts = class_counts_for_size(self.size)
            short_classes = np.flatnonzero(counts.sum(0) > available)
            if len(short_classes):
                raise ConfigError(
                    f"partition.size={self.size} needs {counts.sum(0)[short_classes[0]]} samples of "
                    f"class {short_classes[0]}, which "
                    f"has {available[short_classes[0]]}; lower it, or set it to null"
                )
            return counts
        total = rows.sum(0)
        size = int(np.floor(np.min(available[total > 0] / total[total > 0])))
        while (
            size and (class_counts_for_size(size).sum(0) > available).any()
        ):  # rounding up may need a few samples more than exist
            size -= 1
        if not size:
            raise ConfigError(
                f"partition=matched leaves no samples for clients={len(rows)}: a class in partition.distribution has "
                "too few samples; lower its share"
            )
        return class_counts_for_size(size)


def class_shares(distribution: Sequence[float | Sequence[float]]) -> np.ndarray:
    """[1, C] or [m, C], rows normalised to sum 1; raises an error if they are not distributions."""
    try:
        rows = np.atleast_2d(np.array(distribution, dtype=np.float64))
    except (TypeError, ValueError):
        rows = np.full((1, 1), np.nan)
    if rows.ndim != 2 or not np.isfinite(rows).all() or (rows < 0).any() or (rows.sum(1) <= 0).any():
        raise ConfigError(
            f"partition.distribution={distribution} must be a row of numbers, nonnegative and not all 0, or a list of "
            "such rows of equal length"
        )
    return rows / rows.sum(1, keepdims=True)
