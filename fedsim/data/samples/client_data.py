"""The samples of each virtual client, with two kinds of access: training batches, and a fixed sample.
`StoredClientData` and `StreamClientData` are the two implementations: samples assigned by a partition, and fresh
samples of a stream. Other modules use this interface only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedsim.core import rng
from fedsim.core.federation import Federation
from fedsim.data.datasets import Dataset
from fedsim.data.drift import Drift, NoDrift
from fedsim.data.samples.work import LocalWork, Workload

Batch = dict[str, Tensor]
STREAM_DRAW_PURPOSES = (rng.Purpose.NOISE, rng.Purpose.CONTAMINATION)  # base randomness of a stream's samples


class BatchKeys:
    """The keys of c rows in a round, by purpose and local step.

    Args:
        seeds, clients: [c] int64, the replicate's seed and the client's number of each row (host).
        device: of the keys.
        t: round; [c] where rows began in different ones.
        drawn_round: the round in whose first step the samples of all steps were drawn; None: each step draws its own.
    """

    def __init__(
        self,
        seeds: np.ndarray,
        clients: np.ndarray,
        device: torch.device,
        t: int | np.ndarray,
        drawn_round: int | np.ndarray | None = None,
    ) -> None:
        self.seeds, self.clients, self.device, self.t, self.drawn_round = seeds, clients, device, t, drawn_round
        self._round_keys: dict[rng.Purpose, np.ndarray] = {}

    def round_keys(self, purpose: rng.Purpose) -> np.ndarray:
        """[c] (host), computed on first use."""
        if purpose not in self._round_keys:
            t = self.t if self.drawn_round is None or purpose not in STREAM_DRAW_PURPOSES else self.drawn_round
            self._round_keys[purpose] = rng.row_keys_host(self.seeds, purpose, self.clients, t)
        return self._round_keys[purpose]

    def distinct_rows(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Positions [u] of rows with distinct (seed, client), and for every row [c] the index of its representative;
        None if all rows differ, or may do so.
        """
        if (np.diff(self.clients) > 0).all() or isinstance(self.t, np.ndarray):
            return None
        _, seed = np.unique(self.seeds, return_inverse=True)
        number = seed * (self.clients.max() + 1) + self.clients
        _, first_rows, inverse_index = np.unique(number, return_index=True, return_inverse=True)
        return None if len(first_rows) == len(inverse_index) else (first_rows, inverse_index)

    def at(self, positions: np.ndarray) -> BatchKeys:
        """The keys of the rows at these positions."""
        t, drawn_rounds = (
            value[positions] if isinstance(value, np.ndarray) else value for value in (self.t, self.drawn_round)
        )
        return BatchKeys(self.seeds[positions], self.clients[positions], self.device, t, drawn_rounds)  # type: ignore[arg-type]

    def step_keys(self, purpose: rng.Purpose, step: int, row_selection: slice) -> Tensor:
        """[c'] keys of some rows at a local step."""
        return self.keys_of_steps(purpose, range(step, step + 1), row_selection)[0]

    def keys_of_steps(self, purpose: rng.Purpose, steps: range, row_selection: slice = slice(None)) -> Tensor:
        """[s, c'] keys of some rows at some local steps, in one call."""
        fixed_key = self.drawn_round is not None and purpose in STREAM_DRAW_PURPOSES
        number = np.zeros(len(steps), dtype=np.int64) if fixed_key else np.arange(steps.start, steps.stop)
        keys = rng.fold_in_host(self.round_keys(purpose)[row_selection], number[:, None])
        return torch.as_tensor(keys).to(self.device, non_blocking=True)


class Feed(Protocol):
    """Provides the samples of c rows in a round, step by step."""

    def batch_of_rows(self, step: int, row_selection: slice, width: int, dtype: torch.dtype) -> Batch:
        """'x' [c', width, …] and more: the samples of some rows at a local step, as model inputs. Entries beyond a
        row's batch size are arbitrary samples.
        """


class ClientData(ABC):
    """The samples of every virtual client.

    Args:
        dataset: on the federation's device.
        federation: clients and replicates.
        drift: how the law of the samples changes from round to round; None: it does not.
    """

    def __init__(self, dataset: Dataset, federation: Federation, drift: Drift | None = None) -> None:
        self.dataset, self.federation, self.drift = dataset, federation, drift or NoDrift()

    def drifted(self, batch: Batch, rows: np.ndarray, t: int | np.ndarray) -> Batch:
        """A batch of some virtual clients [c], 'x' [c, B, …], with the law of round t, or of its rows' rounds [c]."""
        if not self.drift.active:
            return batch
        replicate, client = np.divmod(rows, self.federation.clients)
        rounds = np.broadcast_to(np.asarray(t, dtype=np.int64), replicate.shape)
        return self.drift.displaced(batch, self.drift.displacement(rounds, replicate, client), replicate, client)

    @abstractmethod
    def workload(self, local_work: LocalWork, rows: np.ndarray) -> Workload:
        """The workload of the given virtual clients [n].

        Raises:
            ConfigError: such samples do not allow this work.
        """

    @abstractmethod
    def one_epoch_work(self, local_work: LocalWork) -> LocalWork:
        """The workload of one pass over a client's data; for a stream, `local_work` itself."""

    @abstractmethod
    def make_feed(
        self, rows: Tensor, clients: Tensor, keys: BatchKeys, load: Workload, sizes: np.ndarray, sampling: str
    ) -> Feed:
        """The training samples of c rows in a round.

        Args:
            rows, clients: [c] their virtual clients, and the numbers of these in their replicate, from 0.
            keys: keys of these rows in the round.
            load: workload of these rows.
            sizes: [c, S] samples in the batch of every row and step.
            sampling: 'pass' or 'replacement'.
        """

    @abstractmethod
    def width(self, limit: int | None, rows: np.ndarray | None = None) -> int:
        """The number of samples that `fixed_samples` returns for each of these virtual clients (all, by default) if up
        to `limit` are requested; None requests all stored samples, or 1,000 of a stream.
        """

    @abstractmethod
    def fixed_samples(
        self, rows: Tensor, width: int, dtype: torch.dtype, purpose: rng.Purpose, by_seed: bool = False
    ) -> Batch:
        """A client's fixed samples, the same in every call. Stored samples are an evenly spaced subsample of the
        client's; those of a stream represent its law (`StreamDataset.exact`), which does not depend on the seed.

        Args:
            rows: [n] virtual clients.
            width: see `width`.
            dtype: of model inputs.
            purpose, by_seed: of a stream's draws, and whether they differ between replicates.

        Returns:
            'x' [n, width, …] prepared, 'y' [n, width, …] if there are targets, 'client' and 'row' [n]; 'weight' [n,
            width] for stored samples: 0 marks padding, also for a client without samples.
        """

    @abstractmethod
    def data_for_members(self, members: Federation, dataset: Dataset) -> ClientData:
        """The samples for `members.clients` members of each client: the same stored samples for all members, or a
        stream of `dataset` per member.
        """

    @abstractmethod
    def same_samples(self, data: ClientData) -> bool:
        """Whether both are shares of the same stored samples, or the same streams."""

    @abstractmethod
    def concatenate(self, data_list: Sequence[ClientData]) -> ClientData:
        """Concatenate the shares of several runs with the same samples, these clients' first, for training;
        `federation` is that of these clients.
        """

    @abstractmethod
    def means(self) -> Tensor | None:
        """[R, m, d] float64 the mean of every client's (flattened) x; None if unknown."""

    def two_samples(self, dtype: torch.dtype) -> Batch:
        """Two samples for trial evaluations, see `example_samples`."""
        return self.example_samples(2, dtype)

    @abstractmethod
    def example_samples(self, count: int, dtype: torch.dtype) -> Batch:
        """'x' [count, …] as model input, 'y' [count, …] if there are targets, and further inputs."""
