"""The interface of a partition, and the checks of every split: no client is empty, and no sample is used twice."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from fedsim.core import rng
from fedsim.core.constraints import Fraction, Validated
from fedsim.core.errors import ConfigError

CLIENTS_PER_BLOCK = 2**16  # whose labels are counted at a time


class Skew(ABC):
    """A fixed transformation of clients' inputs: the same for a sample in every use."""

    @abstractmethod
    def check(self, name: str, shape: tuple[int, ...], tokens: bool) -> None:
        """Raise an error for a data set whose inputs [*shape] are not supported."""

    @abstractmethod
    def __call__(self, x: Tensor, client: Tensor, numbers: Tensor) -> Tensor:
        """Prepared inputs [n, B, …] of samples [n, B] of clients [n], transformed."""


@dataclass
class Table:
    """A ragged index table: client i holds samples order[offsets[i]:offsets[i + 1]]."""

    order: np.ndarray  # int32, at most one entry per sample
    offsets: np.ndarray  # int64 [m + 1]
    validation: Table | None = None  # validation samples of each client; may be empty for some
    names: tuple[str, ...] | None = None  # of the clients, if the data have names for them
    skew: Skew | None = None  # feature skew

    @classmethod
    def from_shares(cls, shares: list[np.ndarray]) -> Table:
        """From one index array per client."""
        offsets = np.concatenate([[0], np.cumsum([len(p) for p in shares])]).astype(np.int64)
        order = np.concatenate(shares) if shares else np.zeros(0)
        return cls(order.astype(np.int32), offsets)

    @property
    def sizes(self) -> np.ndarray:
        """[m] samples of every client."""
        return np.diff(self.offsets)

    def first(self, clients: int) -> Table:
        """The table of the first clients only."""
        validation_table = None if self.validation is None else self.validation.first(clients)
        names = None if self.names is None else self.names[:clients]
        return Table(
            self.order[: self.offsets[clients]], self.offsets[: clients + 1], validation_table, names, self.skew
        )

    def with_renumbered_samples(self, numbers: np.ndarray) -> Table:
        """The same table with sample k renumbered as numbers[k]."""
        validation_table = None if self.validation is None else self.validation.with_renumbered_samples(numbers)
        return Table(numbers[self.order].astype(np.int32), self.offsets, validation_table, self.names, self.skew)

    def split_off(self, share: float, draw: np.random.Generator) -> Table:
        """The same clients, ⌊share · n_i⌋ random samples of each (at least one remains) moved to `validation`."""
        sizes = self.sizes
        owner = np.repeat(np.arange(len(sizes)), sizes)
        shuffled = np.lexsort((draw.random(len(owner)), owner))  # positions, client by client, at random within each
        validation_sizes = np.minimum((sizes * share + 1e-9).astype(np.int64), sizes - 1)
        held_out_mask = np.zeros(len(owner), dtype=bool)
        held_out_mask[shuffled] = np.arange(len(owner)) - self.offsets[owner] < validation_sizes[owner]
        bounds = [
            np.concatenate([[0], np.cumsum(n)]).astype(np.int64) for n in (sizes - validation_sizes, validation_sizes)
        ]
        validation_table = Table(self.order[held_out_mask], bounds[1], skew=self.skew)
        return Table(self.order[~held_out_mask], bounds[0], validation_table, self.names, self.skew)

    def class_fractions(self, labels: np.ndarray, classes: int) -> np.ndarray:
        """[m, C] the actual label distribution of each client."""
        m = len(self.offsets) - 1
        fractions = np.empty((m, classes))
        for block_start in range(
            0, m, CLIENTS_PER_BLOCK
        ):  # temporary arrays of a million clients would exceed their data
            bounds = self.offsets[block_start : block_start + CLIENTS_PER_BLOCK + 1]
            clients = len(bounds) - 1
            client = np.repeat(np.arange(clients), np.diff(bounds))
            held_labels = labels[self.order[bounds[0] : bounds[-1]]]
            counts = np.bincount(client * classes + held_labels, minlength=clients * classes).reshape(clients, classes)
            np.divide(counts, counts.sum(1, keepdims=True), out=fractions[block_start : block_start + clients])
        return fractions


@dataclass
class Samples:
    """Attributes of training samples that are available to a partition.

    Attributes:
        count: N.
        labels: [N] class of every sample, or None.
        owners: [N] natural owner of every sample, or None.
        names: names of the natural owners, or None.
    """

    count: int
    labels: np.ndarray | None = None
    owners: np.ndarray | None = None
    names: tuple[str, ...] | None = None

    def need_labels(self, partition: str) -> np.ndarray:
        """The labels; raises an error if the data set has none."""
        if self.labels is None:
            raise ConfigError(
                f"partition={partition} needs class labels and this data set has none; use partition=natural or iid"
            )
        return self.labels


class Partition(Validated, ABC):
    """Divides N samples among m clients.

    Args:
        validation: share of every client's samples that is split off at random for validation, in [0, 1) (apfl §5:
            0.2). A client keeps at least one training sample; one with too few has no validation samples.

    Attributes:
        name: its name on the command line.
        remedy: what to change if a client is empty.
        by_owner: whether clients are natural clients of the data or groups of them.
    """

    name = "custom"
    remedy = "lower clients, or use more data"
    by_owner = False
    validation: float = 0.0

    def __init__(self, validation: Fraction = 0.0) -> None:
        self.validation = validation
        if self.validation == 1:
            raise ConfigError(key="validation", value=1, needs="leaves no training samples; lower it, such as to 0.2")

    @abstractmethod
    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray] | Table:
        """One array of sample numbers per client, or the table; `draw` is keyed by the replicate's seed."""

    def skew(self, clients: int) -> Skew | None:
        """The transformation of the inputs of m clients; most partitions have none."""
        return None

    def table(self, samples: Samples, clients: int, seed: int) -> Table:
        """Split and check: every sample is used at most once, no client is empty."""
        shares = self.split(samples, clients, rng.generator(seed, rng.Purpose.PARTITION))
        name = type(self).__name__ if self.name == Partition.name else self.name
        table = shares if isinstance(shares, Table) else Table.from_shares(_checked_shares(name, shares))
        check_partition_table(name, table, samples.count, clients)
        table.skew = self.skew(clients)
        check_sample_assignment(name, table, samples.count, clients, self.remedy)
        if not self.validation:
            return table
        table = table.split_off(self.validation, rng.generator(seed, rng.Purpose.PARTITION, 1))
        if table.validation is not None and not len(table.validation.order):
            raise ConfigError(
                f"partition.validation={self.validation} leaves no client a validation sample, since the largest "
                f"share is {table.sizes.max()}; raise it, or lower clients"
            )
        return table


def _checked_shares(name: str, shares: object) -> list[np.ndarray]:
    """One array of sample numbers per client; raises an error otherwise."""
    if isinstance(shares, (str, bytes, dict)) or not hasattr(shares, "__iter__"):
        raise ConfigError(
            f"partition={name}: split must return a list with one array of sample numbers per client, and returns "
            f"{'None' if shares is None else type(shares).__name__}"
        )
    sample_numbers = []
    for client, share in enumerate(shares):
        numbers = np.asarray(share)
        if numbers.ndim != 1 or (numbers.size and numbers.dtype.kind not in "iu"):
            description = f"{numbers.dtype} {list(numbers.shape)}"
            remedy = "; give np.flatnonzero of the mask" if numbers.dtype.kind == "b" else ""
            raise ConfigError(
                f"partition={name}: client {client} must hold a one-dimensional array of whole sample numbers, and "
                f"holds {description}{remedy}"
            )
        sample_numbers.append(numbers.astype(np.int64))
    return sample_numbers


def check_partition_table(name: str, table: Table, samples: int, clients: int) -> None:
    """Check that a table has all clients, and only samples that exist."""
    order, offsets = np.asarray(table.order), np.asarray(table.offsets)
    if len(offsets) != clients + 1:
        raise ConfigError(
            f"partition={name} makes {len(offsets) - 1} clients, but clients={clients}; these must be equal"
        )
    bounds = bool(offsets[0] == 0 and offsets[-1] == len(order) and (np.diff(offsets) >= 0).all())
    if order.dtype.kind not in "iu" or offsets.dtype.kind not in "iu" or not bounds:
        raise ConfigError(
            f"partition={name}: offsets of a Table must rise from 0 to the length of order, both of whole numbers; use "
            "Table.from_shares with one array per client"
        )
    invalid_positions = np.flatnonzero((order < 0) | (order >= samples))
    if len(invalid_positions):
        client = int(np.searchsorted(offsets, invalid_positions[0], side="right")) - 1
        raise ConfigError(
            f"partition={name} gives client {client} sample {order[invalid_positions[0]]}, but "
            "samples are numbered 0 to "
            f"{samples - 1}"
        )


def check_sample_assignment(name: str, table: Table, samples: int, clients: int, remedy: str) -> None:
    """Check that each client holds a sample, and that no sample is used twice."""
    empty_clients = np.flatnonzero(table.sizes == 0)
    if len(empty_clients):
        raise ConfigError(
            f"partition={name} leaves {len(empty_clients)} of clients={clients} without samples "
            f"(client {empty_clients[0]} first); {remedy}"
        )
    used_mask = np.zeros(samples, dtype=bool)
    used_mask[table.order] = True
    if used_mask.sum() != len(table.order):
        duplicate_sample = int(np.flatnonzero(np.bincount(table.order) > 1)[0])
        raise ConfigError(
            f"partition={name} assigns a sample to two clients, or twice to one: {duplicate_sample}; assign it once"
        )
