"""Partitions that ignore labels: shuffled and split evenly."""

from __future__ import annotations

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.data.partition.partition import Partition, Samples, Table


def _check_enough_samples(total: int, clients: int, name: str) -> None:
    if total < clients:
        raise ConfigError(f"clients={clients} exceeds the {total} samples that partition={name} can divide")


class IID(Partition):
    """A random permutation cut into m parts whose sizes differ by at most one; every sample is used."""

    name = "iid"

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> Table:
        _check_enough_samples(samples.count, clients, self.name)
        size, remainder = divmod(samples.count, clients)
        offsets = np.arange(clients + 1) * size + np.minimum(np.arange(clients + 1), remainder)
        return Table(draw.permutation(samples.count).astype(np.int32), offsets)


class Equal(Partition):
    """A random permutation cut into m parts of exactly ⌊N/m⌋ samples; the remainder is left out, and logged."""

    name = "equal"

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> Table:
        _check_enough_samples(samples.count, clients, self.name)
        size = samples.count // clients
        order = draw.permutation(samples.count)[: size * clients].astype(np.int32)
        return Table(order, np.arange(clients + 1) * size)
