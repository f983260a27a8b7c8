"""The rows of a run: R replicates × m clients are R·m virtual clients, numbered v = r·m + i.

`Cohort` is what a strategy meets: rows, and sums over the rows of each replicate. `Federation.reduce` is the only place
where clients meet.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

WEIGHTINGS = ("uniform", "data")


@dataclass
class Federation:
    """Who exists: replicates, clients, and what is known of each virtual client.

    Attributes:
        seeds: one per replicate, R of them.
        clients: m, the same in every replicate.
        sizes: [R·m] samples each virtual client holds (host; 0 where samples are drawn afresh).
        class_fractions: [R, m, C] label distribution of every client, or None without labels.
        shares: [m] w_i of the clients of every replicate, up to a factor; None takes the sizes, or 1/m without any.
        data_fractions: [R·m] w_i, 1 in sum over a replicate (host, double precision); `data_weights` on the device.
    """

    seeds: tuple[int, ...]
    clients: int
    sizes: np.ndarray
    class_fractions: np.ndarray | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    shares: np.ndarray | None = None

    def __post_init__(self) -> None:
        self.seed_of_replicate = torch.tensor(self.seeds, dtype=torch.int64, device=self.device)
        given = self.sizes if self.shares is None else np.tile(self.shares, self.replicates)
        shares = np.asarray(given, dtype=np.float64).reshape(self.replicates, self.clients)
        shares = np.where(shares.sum(1, keepdims=True) > 0, shares, 1.0)
        self.data_fractions = (shares / shares.sum(1, keepdims=True)).reshape(-1)
        self.data_weights = torch.as_tensor(self.data_fractions, dtype=self.dtype, device=self.device)

    @property
    def replicates(self) -> int:
        return len(self.seeds)

    @property
    def rows(self) -> int:
        """Number of virtual clients, R·m."""
        return self.replicates * self.clients

    def zeros(self, *shape: int) -> Tensor:
        """[R·m, *shape] client memory before round 0."""
        return torch.zeros(self.rows, *shape, dtype=self.dtype, device=self.device)

    def cohort(self, counts: np.ndarray, probabilities: np.ndarray) -> Cohort:
        """The cohort of all clients with a positive count.

        Args:
            counts: [R, m] how often each client takes part (0 or 1, or a multiset's multiplicity).
            probabilities: [R, m] the true p_i^t of the round.
        """
        flat = counts.reshape(-1)
        rows = np.flatnonzero(flat)
        return Cohort(self, rows, flat[rows], probabilities.reshape(-1)[rows])

    def everyone(self, active: Cohort) -> Cohort:
        """All R·m rows; those not in `active` compute too but are not heard (count 0)."""
        counts = np.zeros(self.rows)
        probabilities = np.ones(self.rows)
        counts[active.host_rows] = active.host_count
        probabilities[active.host_rows] = active.host_probability
        return Cohort(self, np.arange(self.rows), counts, probabilities)

    def mean_over_clients(self, rows: Tensor) -> Tensor:
        """[R·m, …] → [R, …], the plain mean over each replicate's m clients."""
        weights = torch.full((self.rows,), 1.0 / self.clients, dtype=rows.dtype, device=rows.device)
        return self.reduce(weights, rows, range(0, self.rows + 1, self.clients))

    @staticmethod
    def reduce(weights: Tensor, rows: Tensor, bounds: Sequence[int]) -> Tensor:
        """Weighted sum of rows per replicate: the only place where clients meet.

        Each replicate's rows are summed on their own, so one replicate's non-finite values never reach another.

        Args:
            weights: [n], one per row.
            rows: [n, …], sorted by replicate.
            bounds: R + 1 host integers; replicate r owns rows[bounds[r]:bounds[r + 1]].

        Returns:
            [R, …]
        """
        return torch.stack([torch.tensordot(weights[a:b], rows[a:b], dims=1) for a, b in itertools.pairwise(bounds)])


class Cohort:
    """The virtual clients that compute in one round, sorted by replicate, then by client.

    Attributes (n rows; tensors on the federation's device):
        rows: [n] int64, virtual client numbers: the index into any per-client memory.
        replicate, client: [n] int64.
        count: [n] how often the server hears each one (0: computes unheard; more than 1: a multiset).
        probability: [n] true p_i^t.
        bounds: R + 1 host integers that delimit each replicate's rows.
    """

    def __init__(self, federation: Federation, rows: np.ndarray, count: np.ndarray, probability: np.ndarray) -> None:
        self.federation = federation
        self.host_rows = rows
        self.host_count = np.asarray(count, dtype=np.float64)
        self.host_probability = np.asarray(probability, dtype=np.float64)
        device, dtype, m = federation.device, federation.dtype, federation.clients
        self.bounds: tuple[int, ...] = tuple(
            int(b) for b in np.searchsorted(rows, np.arange(0, federation.rows + 1, m))
        )
        self.rows = torch.as_tensor(rows, dtype=torch.int64).to(device, non_blocking=True)
        self.replicate = self.rows // m
        self.client = self.rows - self.replicate * m
        self.count = torch.as_tensor(self.host_count, dtype=dtype).to(device, non_blocking=True)
        self.probability = torch.as_tensor(self.host_probability, dtype=dtype).to(device, non_blocking=True)

    def __len__(self) -> int:
        return len(self.host_rows)

    @property
    def heard(self) -> Tensor:
        """[R] bool: does the server hear anybody of this replicate?"""
        return self.total(torch.ones_like(self.count)) > 0

    def weights(self, weighting: str) -> Tensor:
        """[n] w_i, which sum to 1 over all clients of a replicate: 'uniform' 1/m, or 'data' fractions."""
        if weighting == "data":
            return self.federation.data_weights[self.rows]
        return torch.full_like(self.count, 1.0 / self.federation.clients)

    def subset(self, keep: np.ndarray) -> Cohort:
        """The rows at the given positions (sorted)."""
        return Cohort(self.federation, self.host_rows[keep], self.host_count[keep], self.host_probability[keep])

    @property
    def seed(self) -> Tensor:
        """[n] int64 seed of each row's replicate."""
        return self.federation.seed_of_replicate[self.replicate]

    def broadcast(self, models: Tensor) -> Tensor:
        """[R, …] → [n, …]: every row receives its replicate's value."""
        return models[self.replicate]

    def total(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Σ count·weight·value over the rows of each replicate: [n, …] → [R, …]; zero where nobody is heard."""
        weights = self.count if weights is None else self.count * weights
        return self.federation.reduce(weights.to(values.dtype), values, self.bounds)

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """The weighted mean over the heard rows of each replicate: [n, …] → [R, …]; zero where nobody is heard."""
        weights = torch.ones_like(self.count) if weights is None else weights
        mass = self.broadcast(self.total(weights))
        return self.total(values, weights / torch.where(mass > 0, mass, 1.0))

    def keep_unheard(self, new: Tensor, old: Tensor) -> Tensor:
        """`new` [R, …] where somebody was heard, `old` elsewhere: an empty round changes nothing."""
        return torch.where(self.heard.reshape(-1, *[1] * (new.dim() - 1)), new, old)
