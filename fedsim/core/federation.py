"""The rows of a run: R replicates × m clients are R·m virtual clients, numbered v = r·m + i.

`Cohort` is what a strategy meets: rows, sums over the rows of each replicate, and other functions of them
(`fedsim.core.statistics`). `Federation.weighted_sum` is the only place where clients are added. Of several ranks
(`fedsim.core.ranks`) each has the rows of its own clients only, and the sums are those over all of them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor

from fedsim.core import checks, ties
from fedsim.core.column_names import ColumnsByName
from fedsim.core.constraints import OneOf
from fedsim.core.errors import ConfigError
from fedsim.core.placement import STORAGE_PLACES, zeros_at
from fedsim.core.ranks import ProcessRanks
from fedsim.core.statistics import CohortIndex, ReplicateStatistics


@dataclass(frozen=True)
class FullDataGradients:
    """Attributes (n clients, in the cohort's order):

    loss: [n] the mean loss of all the client's data.
    gradient: [n, d] and its gradient.
    """

    loss: Tensor
    gradient: Tensor


FullDataOracle = Callable[[Any, Tensor], FullDataGradients]  # of a cohort's clients, at their replicate's model [R, d]

ValidationOracle = Callable[[Any, Tensor], Tensor]  # [n] of a cohort's clients, each at its row [n, d]

WEIGHTINGS = ("uniform", "data")
Weighting = Annotated[str, OneOf(*WEIGHTINGS)]


@dataclass
class Federation:
    """A federation: replicates, clients, and the properties of each virtual client.

    Attributes:
        seeds: one per replicate, R of them.
        clients: m, the same in every replicate.
        num_samples: [R·m] samples each virtual client holds (host; 0 where samples are drawn afresh).
        class_fractions: [R, m, C] label distribution of every client, or None without labels.
        client_shares: [m] w_i of the clients of every replicate, up to a factor; None takes `num_samples`, or 1/m
            without any.
        ranks: the processes that share the run; all that is said here of clients is known to each of them.
        storage: where client memory lies, see `fedsim.core.placement`.
        weighting: of the clients in the objective that is minimised: 'uniform' 1/m, or 'data'.
        num_objective_clients: how many, the first ones, that objective is about; the others weigh nothing. None: all.
        num_newcomers: how many more join when training is over, who are none of the m.
        client_names: what the clients are called in the data, m of them, where they have names that all replicates
            share.
        full_data_oracle: gives loss and gradient of all data of clients, if `needs_full_gradients`; else None.
        validation_oracle: gives the loss of a row for each client on its validation samples, NaN without any, if
            `needs_validation_losses`; else None.
        columns: where each of the model's tensors lies in the rows of strategies, by its name.
        local_clients: [m'] numbers of this rank's clients, the same in every replicate; all m in a lone process.
        data_fractions: [R·m] w_i, 1 in sum over a replicate (host, double precision); `data_weights` on the device.
        client_weights: [R, m] those of the objective (host, double precision).
    """

    seeds: tuple[int, ...]
    clients: int
    num_samples: np.ndarray
    class_fractions: np.ndarray | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    client_shares: np.ndarray | None = None
    ranks: ProcessRanks = field(default_factory=ProcessRanks)
    storage: str = "device"
    weighting: str = "uniform"
    num_objective_clients: int | None = None
    client_names: tuple[str, ...] | None = None
    full_data_oracle: FullDataOracle | None = None
    validation_oracle: ValidationOracle | None = None
    num_newcomers: int = 0
    columns: ColumnsByName = field(default_factory=ColumnsByName)

    def __post_init__(self) -> None:
        checks.check_choice("trainer.memory", self.storage, STORAGE_PLACES)
        if self.ranks.num_ranks > self.clients:
            raise ConfigError(
                f"clients={self.clients} cannot be divided among {self.ranks.num_ranks} ranks; start fewer"
            )
        self.local_clients = np.arange(self.clients)[self.ranks.client_slice]
        self.seed_of_replicate = torch.tensor(self.seeds, dtype=torch.int64, device=self.device)
        raw_shares = (
            self.num_samples if self.client_shares is None else np.tile(self.client_shares, self.num_replicates)
        )
        shares = np.asarray(raw_shares, dtype=np.float64).reshape(self.num_replicates, self.clients)
        member_mask = np.arange(self.clients) < (
            self.clients if self.num_objective_clients is None else self.num_objective_clients
        )
        shares = np.where(shares.sum(1, keepdims=True) > 0, shares, 1.0) * member_mask
        self.data_fractions = (shares / shares.sum(1, keepdims=True)).reshape(-1)
        self.data_weights = torch.tensor(self.data_fractions, dtype=self.dtype, device=self.device)
        equal_fractions = np.tile(member_mask / member_mask.sum(), (self.num_replicates, 1))
        self.client_weights = (
            self.data_fractions.reshape(equal_fractions.shape) if self.weighting == "data" else equal_fractions
        )

    @property
    def num_replicates(self) -> int:
        return len(self.seeds)

    @property
    def num_memory_rows(self) -> int:
        """The number of virtual clients whose memory is on this rank: R·m', which is R·m in a single process."""
        return self.num_replicates * len(self.local_clients)

    def zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        """Return client memory [R·m', *shape] before round 0, for `Cohort.gather` and `Cohort.scatter`, on the
        chosen storage; single numbers are always on the device."""
        placement = self.storage if shape else "device"
        return zeros_at((self.num_memory_rows, *shape), dtype or self.dtype, self.device, placement)

    def broadcast(self, values: Tensor) -> Tensor:
        """Return [R, …] → [R·m', …]: client memory, as `zeros`, in which all clients have the value of their
        replicate."""
        memory = self.zeros(*values.shape[1:], dtype=values.dtype)
        memory.unflatten(0, (self.num_replicates, -1)).copy_(values[:, None])
        return memory

    def make_cohort(self, counts: np.ndarray, probabilities: np.ndarray, t: int = 0) -> Cohort:
        """Make the cohort of all clients (of this rank) with a positive count, given how often each takes part in
        round t, [R, m] (0 or 1, or a multiset's multiplicity), and the true p_i^t [R, m]."""
        flat = counts[:, self.ranks.client_slice].reshape(-1)
        rows = np.flatnonzero(flat)
        return Cohort(self, rows, flat[rows], probabilities[:, self.ranks.client_slice].reshape(-1)[rows], t)

    def full_cohort(self, active: Cohort, count: int = 0) -> Cohort:
        """Return all R·m' rows; clients outside `active` compute as well, but do not take part (count 0) unless
        requested."""
        counts = np.full(self.num_memory_rows, float(count))
        probabilities = np.ones(self.num_memory_rows)
        counts[active.host_index.rows] = active.host_index.multiplicity
        probabilities[active.host_index.rows] = active.host_index.probability
        return Cohort(self, np.arange(self.num_memory_rows), counts, probabilities, active.round)

    def mean_over_clients(self, rows: Tensor, weighting: str = "uniform") -> Tensor:
        """Return the mean over each replicate's m clients, [R·m', …] → [R, …], wherever their memory is stored."""
        return self.sum_over_clients(rows, self.weights(weighting))

    def sum_over_clients(self, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the sum over each replicate's m clients with weights [R·m'], [R·m', …] → [R, …]; rows of another
        type are copied."""
        return self.weighted_sum(
            weights.to(rows.device), rows.to(weights.dtype), range(0, self.num_memory_rows + 1, len(self.local_clients))
        )

    def weights(self, weighting: str) -> Tensor:
        """Return w_i [R·m'], which sum to 1 over all clients of a replicate: 'uniform' 1/m, or 'data' fractions."""
        if weighting == "data":
            fractions: Tensor = self.data_weights.unflatten(0, (self.num_replicates, -1))[:, self.ranks.client_slice]
            return fractions.flatten()
        return torch.full((self.num_memory_rows,), 1.0 / self.clients, dtype=self.dtype, device=self.device)

    def local_rows(self, virtual_clients: np.ndarray) -> np.ndarray:
        """Return virtual clients [n], all of this rank → the rows of this rank's memory."""
        if self.ranks.num_ranks == 1:
            return virtual_clients
        rows: np.ndarray = (
            virtual_clients // self.clients * len(self.local_clients)
            + virtual_clients % self.clients // self.ranks.num_ranks
        )
        return rows

    def all_gather_clients(self, values: np.ndarray) -> np.ndarray:
        """Return host numbers [R·m'], one per row of this rank → [R·m] of all virtual clients."""
        if self.ranks.num_ranks == 1:
            return values
        gathered_values = np.zeros((self.num_replicates, self.clients))
        gathered_values[:, self.ranks.client_slice] = values.reshape(self.num_replicates, -1)
        return self.ranks.all_reduce_host(gathered_values)[0].reshape(-1)

    def weighted_sum(self, weights: Tensor, rows: Tensor, replicate_bounds: Sequence[int]) -> Tensor:
        """Return the weighted sum [R, …] of rows per replicate. This is the only place where clients are summed.

        Each replicate's rows are summed on their own, so one replicate's non-finite values never reach another. Several
        ranks sum their own rows, and end with one all-reduce.

        Args:
            weights: [n], one per row.
            rows: [n, …], sorted by replicate.
            replicate_bounds: R + 1 host integers; replicate r owns rows[bounds[r]:bounds[r + 1]].
        """
        counts, width = np.diff(replicate_bounds).tolist(), math.prod(rows.shape[1:])
        weighted_rows = zip(weights.split(counts), rows.reshape(len(rows), width).split(counts), strict=True)
        local_sums = torch.cat([torch.dot(w, x[:, 0])[None] if width == 1 else w[None] @ x for w, x in weighted_rows])
        return self.ranks.all_reduce_sum(local_sums.reshape(len(counts), *rows.shape[1:]).to(self.device))


class Cohort(ReplicateStatistics):
    """The virtual clients (of this rank) that compute in one round. Each entry of `host_index` has a copy of the same
    name on the device, made when it is first used.

    Attributes:
        host_index: n rows.
        replicate_bounds: R + 1 host integers that delimit each replicate's rows.
        round: t.
        column_masks: [n, d] 1 where the row's client holds the column, else 0; None: each client holds all of them.
    """

    column_masks: Tensor | None = None

    def __init__(
        self,
        federation: Federation,
        rows: np.ndarray,
        count: np.ndarray,
        probability: np.ndarray,
        t: int = 0,
        steps: np.ndarray | None = None,
    ) -> None:
        self.federation, self.ranks, self.round = federation, federation.ranks, t
        self.shape = (federation.num_replicates, federation.clients)
        m, virtual_clients = len(federation.local_clients), rows
        if m < federation.clients:
            virtual_clients = rows // m * federation.clients + federation.local_clients[rows % m]
        count, probability = np.asarray(count, dtype=np.float64), np.asarray(probability, dtype=np.float64)
        self.host_index = CohortIndex(rows, virtual_clients, count, probability, steps)
        edges = np.searchsorted(rows, np.arange(0, federation.num_memory_rows + 1, m))
        self.replicate_bounds: tuple[int, ...] = tuple(int(b) for b in edges)

    @functools.cached_property
    def rows(self) -> Tensor:
        """[n] int64."""
        return torch.as_tensor(self.host_index.rows, dtype=torch.int64).to(self.federation.device, non_blocking=True)

    @functools.cached_property
    def virtual_client_index(self) -> Tensor:
        """[n] int64."""
        if self.host_index.virtual_clients is self.host_index.rows:
            return self.rows
        return torch.as_tensor(self.host_index.virtual_clients).to(self.federation.device)

    @functools.cached_property
    def replicate_index(self) -> Tensor:
        """[n] int64, the replicate of each row."""
        return self.rows // len(self.federation.local_clients)

    @functools.cached_property
    def client_index(self) -> Tensor:
        """[n] int64, the client of each row, from 0 in each replicate."""
        return self.virtual_client_index - self.replicate_index * self.federation.clients

    @functools.cached_property
    def multiplicity(self) -> Tensor:
        """[n]"""
        return self._on_device(self.host_index.multiplicity)

    @functools.cached_property
    def probability(self) -> Tensor:
        """[n]"""
        return self._on_device(self.host_index.probability)

    def _on_device(self, numbers: np.ndarray) -> Tensor:
        federation = self.federation
        # A copy has the memory alignment of PyTorch's allocations, and therefore the same bits.
        host_tensor = torch.tensor(numbers, dtype=federation.dtype)
        return host_tensor.to(federation.device, non_blocking=True)

    def __len__(self) -> int:
        return len(self.host_index.rows)

    @property
    def is_nonempty(self) -> Tensor:
        """[R] bool, whether clients of the replicate take part."""
        return self.sum(torch.ones_like(self.multiplicity)) > 0

    def weights(self, weighting: str) -> Tensor:
        """Return w_i [n], which sum to 1 over all clients of a replicate: 'uniform' 1/m, or 'data' fractions."""
        if weighting == "data":
            return self.federation.data_weights[self.virtual_client_index]
        return torch.full_like(self.multiplicity, 1.0 / self.federation.clients)

    def subset(self, row_positions: np.ndarray) -> Cohort:
        """Return the rows at these sorted positions."""
        host_index = self.host_index
        steps = None if host_index.steps is None else host_index.steps[row_positions]
        rows = Cohort(
            self.federation,
            host_index.rows[row_positions],
            host_index.multiplicity[row_positions],
            host_index.probability[row_positions],
            self.round,
            steps,
        )
        if self.column_masks is not None:
            rows.column_masks = self.column_masks[torch.as_tensor(row_positions, device=self.column_masks.device)]
        return rows

    def select_largest(self, scores: Tensor, k: int, exact_count: bool = False) -> Cohort:
        """Return the k rows of each replicate with the largest values [n]; synchronises the device.

        Among values that are equal up to rounding, or with `exact_count` among equal ones, random numbers decide, which
        are a function of seed, round and client (`fedsim.core.ties`).
        """
        relative_tolerance = 0.0 if exact_count else ties.relative_tolerance(scores.dtype)
        host, virtual_clients, bounds = self.all_gather_host(scores.cpu().numpy())
        chosen_positions = []
        for r, (a, b) in enumerate(itertools.pairwise(bounds)):
            clients = virtual_clients[a:b] % self.federation.clients
            breakers = ties.tie_breakers(self.federation.seeds[r], clients, self.round)
            chosen_positions.append(
                virtual_clients[a:b][ties.largest_positions(host[a:b], k, breakers, relative_tolerance)]
            )
        return self.subset(np.flatnonzero(np.isin(self.host_index.virtual_clients, np.concatenate(chosen_positions))))

    @property
    def seed(self) -> Tensor:
        """[n] int64, the seed of each row's replicate."""
        return self.federation.seed_of_replicate[self.replicate_index]

    def gather(self, memory: Tensor) -> Tensor:
        """Return the cohort's rows [n, …] of client memory [R·m', …], on the device."""
        if memory.device == self.rows.device:
            return memory[self.rows]
        return memory[torch.as_tensor(self.host_index.rows)].to(self.rows.device)

    def scatter(self, memory: Tensor, rows: Tensor) -> None:
        """Write the cohort's rows [n, …] into client memory [R·m', …], in place."""
        if memory.device == self.rows.device:
            memory[self.rows] = rows
        else:
            memory[torch.as_tensor(self.host_index.rows)] = rows.to(memory.device)

    def broadcast(self, models: Tensor) -> Tensor:
        """Return [R, …] → [n, …]: each row has the value of its replicate."""
        if len(models) != self.federation.num_replicates:
            raise ValueError(
                f"broadcast takes one value per replicate, [{self.federation.num_replicates}, …], and not "
                f"{list(models.shape)}; rows of clients become one of each replicate by Cohort.mean or Cohort.sum"
            )
        if len(models) == 1:  # a view: n identical rows need no memory of their own
            return models.expand(len(self.rows), *models.shape[1:])
        return models[self.replicate_index]

    def sum(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return Σ count·weight·value over the rows of each replicate, [n, …] → [R, …]; zero if no client takes
        part. Integers are summed as floating-point numbers."""
        weights = self.multiplicity if weights is None else self.multiplicity * weights
        values = values if values.is_floating_point() else values.to(weights.dtype)
        return self.federation.weighted_sum(weights.to(values.dtype), values, self.replicate_bounds)

    def mean(self, values: Tensor, weights: Tensor | None = None) -> Tensor:
        """Return the weighted mean over each replicate's participating rows, [n, …] → [R, …]; zero if no client
        takes part. If clients hold only some of the columns, a column of [n, d] is averaged over the clients that
        hold it."""
        weights = torch.ones_like(self.multiplicity) if weights is None else weights
        total_weight = self.broadcast(self.sum(weights))
        normalised, masks = weights / torch.where(total_weight > 0, total_weight, 1.0), self.column_masks
        if masks is None or values.shape != masks.shape:
            return self.sum(values, normalised)
        total, weight_sums = self.sum(values * masks, normalised), self.sum(masks, normalised)
        # a column that each row holds is divided by 1: a sum of weights may differ from 1 by rounding
        incomplete = (self.sum(1 - masks, normalised) > 0) & (weight_sums > 0)
        return total / torch.where(incomplete, weight_sums, 1.0)

    def where_nonempty(self, new: Tensor, old: Tensor) -> Tensor:
        """Return `new` [R, …] for replicates in which a client took part, `old` for the others: an empty round
        changes nothing."""
        return torch.where(self.is_nonempty.reshape(-1, *[1] * (new.dim() - 1)), new, old)
