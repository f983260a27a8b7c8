"""What samples each virtual client has, and two ways to look at them: batch by batch in training, and a fixed sample.

`Stored` and `Drawn` are the two kinds: samples that a partition dealt out, and those of a stream, drawn afresh. Whoever
meets clients' samples asks here, and need not know which kind they are.
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
from fedsim.data.samples.work import LocalWork, Workload

Batch = dict[str, Tensor]
DRAWS = (rng.Purpose.NOISE, rng.Purpose.CONTAMINATION)  # of which a stream's samples are made


class Keys:
    """The keys of c rows in a round, by purpose and local step.

    Args:
        seeds, clients: [c] int64, the replicate's seed and the client's number of each row (host).
        device: of the keys.
        t: round; [c] where rows began in different ones.
        drawn_round: the round in whose first step the samples were drawn that serve all steps; None: each draws its
            own.
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
        self._of_round: dict[rng.Purpose, np.ndarray] = {}

    def of_round(self, purpose: rng.Purpose) -> np.ndarray:
        """[c] (host); a purpose that nobody asks for costs nothing."""
        if purpose not in self._of_round:
            t = self.t if self.drawn_round is None or purpose not in DRAWS else self.drawn_round
            key = rng.fold_host(rng.fold_host(self.seeds, int(purpose)), t)
            self._of_round[purpose] = rng.fold_host(key, self.clients)
        return self._of_round[purpose]

    def distinct(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Places [u] of rows that differ in seed or client, and for every row [c] which of them is its like; None where
        all rows differ, or may do so."""
        if (np.diff(self.clients) > 0).all() or isinstance(self.t, np.ndarray):
            return None
        _, seed = np.unique(self.seeds, return_inverse=True)
        number = seed * (self.clients.max() + 1) + self.clients
        _, first, like = np.unique(number, return_index=True, return_inverse=True)
        return None if len(first) == len(like) else (first, like)

    def at(self, positions: np.ndarray) -> Keys:
        """Those of the rows at these places."""
        t, drawn = (
            value[positions] if isinstance(value, np.ndarray) else value for value in (self.t, self.drawn_round)
        )
        return Keys(self.seeds[positions], self.clients[positions], self.device, t, drawn)  # type: ignore[arg-type]

    def of_step(self, purpose: rng.Purpose, step: int, pick: slice) -> Tensor:
        """[c'] of some rows at a local step."""
        return self.of_steps(purpose, range(step, step + 1), pick)[0]

    def of_steps(self, purpose: rng.Purpose, steps: range, pick: slice = slice(None)) -> Tensor:
        """[s, c'] of some rows at some local steps, in one call."""
        fixed_key = self.drawn_round is not None and purpose in DRAWS
        number = np.zeros(len(steps), dtype=np.int64) if fixed_key else np.arange(steps.start, steps.stop)
        keys = rng.fold_host(self.of_round(purpose)[pick], number[:, None])
        return torch.as_tensor(keys).to(self.device, non_blocking=True)


class Feed(Protocol):
    """Hands out the samples of c rows in a round, step by step."""

    def take(self, step: int, pick: slice, width: int, dtype: torch.dtype) -> Batch:
        """'x' [c', width, …] and more: the samples that some of the rows meet at a local step, as the model sees them.

        Entries past a row's own batch size are any samples.
        """


class ClientData(ABC):
    """The samples of every virtual client.

    Args:
        dataset: on the federation's device.
        federation: who exists.
    """

    def __init__(self, dataset: Dataset, federation: Federation) -> None:
        self.dataset, self.federation = dataset, federation

    @abstractmethod
    def workload(self, work: LocalWork, rows: np.ndarray) -> Workload:
        """That of the given virtual clients [n].

        Raises:
            ConfigError: where such samples cannot be worked on like this.
        """

    @abstractmethod
    def one_epoch(self, work: LocalWork) -> LocalWork:
        """The same for one pass over a client's data; as it is where there is no such thing."""

    @abstractmethod
    def feed(self, rows: Tensor, clients: Tensor, keys: Keys, load: Workload, sizes: np.ndarray, sampling: str) -> Feed:
        """The training samples of c rows in a round.

        Args:
            rows, clients: [c] their virtual clients, and these's numbers from 0 in every replicate.
            keys: of these rows in the round.
            load: of these rows.
            sizes: [c, S] samples in the batch of every row and step.
            sampling: 'pass' or 'replacement'.
        """

    @abstractmethod
    def width(self, limit: int | None, rows: np.ndarray | None = None) -> int:
        """How many samples `fixed_samples` gives each of these virtual clients (all, by default) where up to
        `limit` are asked for; None asks for all that are stored, or for 1,000 of a stream."""

    @abstractmethod
    def fixed_samples(
        self, rows: Tensor, width: int, dtype: torch.dtype, purpose: rng.Purpose, by_seed: bool = False
    ) -> Batch:
        """A client's fixed samples: the same whenever they are asked for.

        Stored samples are thinned evenly along the client's share; those of a stream stand for its law
        (`Stream.exact`), which does not depend on the seed.

        Args:
            rows: [n] virtual clients.
            width: as `width` says.
            dtype: of what models see.
            purpose, by_seed: of a stream's draws, and whether they differ from replicate to replicate.

        Returns:
            'x' [n, width, …] prepared, 'y' [n, width, …] where there are targets, 'client' and 'row' [n]; 'weight' [n,
            width] where samples are stored: 0 marks padding, also where a client has none at all.
        """

    @abstractmethod
    def shared_by(self, members: Federation, dataset: Dataset) -> ClientData:
        """The same samples as `members.clients` members of each client have them, all of them the same stored ones, or
        each its own stream of `dataset`."""

    @abstractmethod
    def same_samples(self, data: ClientData) -> bool:
        """Are these shares of the same stored samples, or the same streams?"""

    @abstractmethod
    def concatenate(self, data_list: Sequence[ClientData]) -> ClientData:
        """Of those with the same samples: the shares of them all, those of these clients first. It is for training;
        `federation` is that of these clients."""

    @abstractmethod
    def means(self) -> Tensor | None:
        """[R, m, d] float64 the mean of every client's (flattened) x; None where it is unknown."""

    def two_samples(self, dtype: torch.dtype) -> Batch:
        """Two samples to try things out with, see `first_samples`."""
        return self.first_samples(2, dtype)

    @abstractmethod
    def first_samples(self, count: int, dtype: torch.dtype) -> Batch:
        """'x' [count, …] as the model sees it, 'y' [count, …] where there are targets, and further inputs."""
