"""Clients whose labels are distributed as asked."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedsim.core.constraints import Count, Fraction
from fedsim.core.errors import ConfigError
from fedsim.data.partition.partition import Partition, Samples
from fedsim.data.partition.quantity import apportioned


class Matched(Partition):
    """Every client holds n samples, of which class c has n p_{i,c}, to the nearest whole numbers that make n.

    n is the largest size for which there are enough samples of every class; what is left over nobody gets. Without
    `distribution` p is that of the data, the same for everybody: a stratified split, in which clients are as alike as
    they can be.

    Args:
        distribution: p, up to a factor: a row of C numbers for everybody, or a row for each client; None: the data's.
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
        counts = self._counts(rows, class_counts)
        pools = [draw.permutation(np.flatnonzero(labels == c)) for c in range(len(class_counts))]
        ends = np.cumsum(counts, axis=0)
        return [
            np.concatenate([pool[e - k : e] for pool, e, k in zip(pools, ends[i], counts[i], strict=True)])
            for i in range(clients)
        ]

    def _counts(self, rows: np.ndarray, available: np.ndarray) -> np.ndarray:
        """[m, C] samples of every client and class: of the size asked for, or of the largest that there is."""

        def of(size: int) -> np.ndarray:
            return np.stack([apportioned(row, size) for row in rows])

        if self.size is not None:
            counts = of(self.size)
            short = np.flatnonzero(counts.sum(0) > available)
            if len(short):
                raise ConfigError(
                    f"partition.size={self.size} wants {counts.sum(0)[short[0]]} samples of class {short[0]}, which "
                    f"has {available[short[0]]}; lower it, or set it to null"
                )
            return counts
        total = rows.sum(0)
        size = int(np.floor(np.min(available[total > 0] / total[total > 0])))
        while size and (of(size).sum(0) > available).any():  # rounding up may want a few more than there are
            size -= 1
        if not size:
            raise ConfigError(
                f"partition=matched leaves nothing for clients={len(rows)}: a class that partition.distribution "
                "asks for has too few samples; ask for less of it"
            )
        return of(size)


def class_shares(distribution: Sequence[float | Sequence[float]]) -> np.ndarray:
    """[1, C] or [m, C], 1 in sum in every row; an error where these are no distributions."""
    try:
        rows = np.atleast_2d(np.array(distribution, dtype=np.float64))
    except (TypeError, ValueError):
        rows = np.full((1, 1), np.nan)
    if rows.ndim != 2 or not np.isfinite(rows).all() or (rows < 0).any() or (rows.sum(1) <= 0).any():
        raise ConfigError(
            f"partition.distribution={distribution} must be a row of numbers, not negative and not all 0, or a list of "
            "such rows as long as each other"
        )
    return rows / rows.sum(1, keepdims=True)
