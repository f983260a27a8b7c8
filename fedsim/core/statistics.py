"""Statistics over clients that are not sums: medians, quantiles, distances, arbitrary functions of a replicate's rows.

A strategy that is not linear in its clients' rows asks here, so that replicates stay apart however many clients each
has in a round. Of several ranks every one gets all rows, by one all-gather: n·d numbers where a sum takes R·d.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from fedsim.core.per_seed import NumberOrPerSeed, PerSeed
from fedsim.core.ranks import ProcessRanks


@dataclass(frozen=True)
class CohortIndex:
    """The clients that compute in a round, as host arrays: n rows, sorted by replicate, then by client.

    Attributes:
        rows: [n] the index into any per-client memory here.
        virtual_clients: [n] numbers r·m + i of the virtual clients; equal to `rows` in a lone process.
        multiplicity: [n] how often each takes part: 0 computes, but does not take part; more than 1 is a multiset.
        probability: [n] true p_i^t.
        steps: [n] local steps each does, at least one; None: all that a round asks.
    """

    rows: np.ndarray
    virtual_clients: np.ndarray
    multiplicity: np.ndarray
    probability: np.ndarray
    steps: np.ndarray | None = None


class ReplicateStatistics:
    """Functions of each replicate's rows. Rows that do not take part (count 0) are left out; rows of a multiset are
    repeated by their counts.

    Attributes:
        host_index: n rows.
        replicate_bounds: R + 1 host integers that delimit each replicate's rows.
        shape: (R, m).
        ranks: the processes that share the run.
    """

    host_index: CohortIndex
    replicate_bounds: tuple[int, ...]
    shape: tuple[int, int]
    ranks: ProcessRanks

    def expand_per_seed(self, setting: NumberOrPerSeed) -> NumberOrPerSeed:
        """Return a setting in a form that rows [n, …] can be multiplied by: for settings per seed, that of each
        row's replicate. For tensors [R, …] the setting can be used as it is."""
        return setting.expand_to_rows(self.replicate_bounds) if isinstance(setting, PerSeed) else setting

    def map_replicates(self, function: Callable[..., Tensor], *rows: Tensor) -> Tensor:
        """Call a function once for each replicate with its rows [k, …] of each argument, and stack the results […].

        Args:
            function: sees the k ≥ 1 rows of one replicate's clients that take part, in the order of their numbers.
            rows: [n, …] each, one for every row of the cohort.

        Returns:
            [R, …]; zero where nobody takes part.

        Example:
            >>> federation = Federation((0, 1), 3, np.ones(6))
            >>> cohort = federation.make_cohort(np.array([[1, 1, 1], [0, 1, 0]]), np.ones((2, 3)))
            >>> cohort.map_replicates(lambda rows: rows.max(0).values, torch.tensor([1.0, 5.0, 3.0, 2.0])).tolist()
            [5.0, 2.0]
        """
        replicate_rows = list(
            zip(*(self.split_by_replicate(rows_of_replicate) for rows_of_replicate in rows), strict=True)
        )
        replicate_results = [
            function(*rows_of_replicate) if len(rows_of_replicate[0]) else None for rows_of_replicate in replicate_rows
        ]
        first_result = next((value for value in replicate_results if value is not None), None)
        if first_result is None:  # the shape of the result is determined on a row of zeros
            first_result = function(
                *(rows_of_replicate.new_zeros(1, *rows_of_replicate.shape[1:]) for rows_of_replicate in rows)
            )
        for value in replicate_results:
            if value is not None and not (isinstance(value, Tensor) and value.shape == first_result.shape):
                actual_shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise ValueError(f"each replicate's value must be a tensor of one shape, and not {actual_shape}")
        return torch.stack([torch.zeros_like(first_result) if value is None else value for value in replicate_results])

    def median(self, rows: Tensor) -> Tensor:
        """Return the median of each number, [n, …] → [R, …]; for an even number of rows the mean of the middle two."""
        return self.map_replicates(columnwise_median, _as_floating(rows))

    def quantile(self, rows: Tensor, q: float) -> Tensor:
        """Return the q-quantile of each number, [n, …] → [R, …], linear between rows (NumPy's default)."""
        if not 0 <= q <= 1:
            raise ValueError(f"q={q!r} must lie between 0 and 1")

        def quantile_within_replicate(
            replicate_rows: Tensor,
        ) -> Tensor:  # `torch.quantile` of torch 2.6 refuses more than 2²⁴ numbers
            position = q * (len(replicate_rows) - 1)
            ordered = replicate_rows.sort(0).values
            return torch.lerp(
                ordered[int(position)], ordered[min(int(position) + 1, len(replicate_rows) - 1)], position % 1
            )

        return self.map_replicates(quantile_within_replicate, _as_floating(rows))

    def trimmed_mean(self, rows: Tensor, fraction: float = 0.1) -> Tensor:
        """Return the mean of each number without the ⌊fraction·k⌋ smallest and as many largest, [n, …] → [R, …]."""
        if not 0 <= fraction < 0.5:
            raise ValueError(f"fraction={fraction!r} must be at least 0 and below 0.5")
        return self.map_replicates(
            lambda replicate_rows: columnwise_trimmed_mean(replicate_rows, int(fraction * len(replicate_rows))),
            _as_floating(rows),
        )

    def pairwise_distances(self, rows: Tensor) -> list[Tensor]:
        """Return the Euclidean distances between the rows of each replicate, [n, d] → [k, k]."""
        centred = (
            replicate_rows - replicate_rows.mean(0) for replicate_rows in self.split_by_replicate(_as_floating(rows))
        )
        return [torch.cdist(replicate_rows, replicate_rows) for replicate_rows in centred]

    def split_by_replicate(self, rows: Tensor) -> list[Tensor]:
        """Return the participating rows of all ranks by replicate, [k, …] each, sorted by client, given the
        cohort's rows [n, …]."""
        count, order, lengths, bounds = self._all_ranks_row_layout
        if self.ranks.num_ranks > 1:
            rows = self.ranks.all_gather_rows(rows, lengths)[torch.as_tensor(order, device=rows.device)]
        if not (count == 1).all():
            times = torch.as_tensor(count.astype(np.int64), device=rows.device)
            rows = rows.repeat_interleave(times, 0)
            row_offsets = np.concatenate([[0], np.cumsum(count)])
            bounds = [int(row_offsets[b]) for b in bounds]
        return [rows[a:b] for a, b in itertools.pairwise(bounds)]

    @functools.cached_property
    def _all_ranks_row_layout(self) -> tuple[np.ndarray, np.ndarray, list[int], Sequence[int]]:
        """Return, for the rows of all ranks: counts [n'], positions in the concatenated rows of the ranks [n'], the
        numbers of rows of the ranks, and the bounds of replicates."""
        count, virtual_clients, bounds = self.all_gather_host(self.host_index.multiplicity)
        ranks = self.ranks.num_ranks
        owner = virtual_clients % self.shape[1] % ranks
        lengths = np.bincount(owner, minlength=ranks).tolist()
        return count, np.argsort(np.argsort(owner, kind="stable")), lengths, bounds

    def all_gather_host(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray, Sequence[int]]:
        """Return host numbers [..., n] of the cohort's rows → those of all ranks' rows [..., n'], in the same
        order; their virtual clients [n']; and the bounds of replicates."""
        if self.ranks.num_ranks == 1:
            return values, self.host_index.virtual_clients, self.replicate_bounds
        replicates, clients = self.shape
        num_virtual_clients = replicates * clients
        gathered_values, is_present = np.zeros((*values.shape[:-1], num_virtual_clients)), np.zeros(num_virtual_clients)
        gathered_values[..., self.host_index.virtual_clients], is_present[self.host_index.virtual_clients] = values, 1
        gathered_values, is_present = self.ranks.all_reduce_host(gathered_values, is_present)
        virtual_clients = np.flatnonzero(is_present)
        bounds = np.searchsorted(virtual_clients, np.arange(0, num_virtual_clients + 1, clients))
        return gathered_values[..., virtual_clients].astype(values.dtype), virtual_clients, [int(b) for b in bounds]


def columnwise_median(rows: Tensor) -> Tensor:
    """Return the median of each number, [k, …] → […]; for an even number of rows the mean of the middle two, where
    `torch.median` takes the lower one."""
    ordered, k = rows.sort(0).values, len(rows)
    return (ordered[(k - 1) // 2] + ordered[k // 2]) / 2


def columnwise_trimmed_mean(rows: Tensor, num_trimmed: int) -> Tensor:
    """Return the mean of each number without the `num_trimmed` smallest and as many largest, [k, …] → […]."""
    return rows.sort(0).values[num_trimmed : len(rows) - num_trimmed].mean(0)


def _as_floating(rows: Tensor) -> Tensor:
    """Return integers as floating-point numbers."""
    return rows if rows.is_floating_point() else rows.to(torch.get_default_dtype())
