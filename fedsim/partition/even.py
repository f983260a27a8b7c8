"""Splits that ignore the labels: shuffled and cut evenly."""

from __future__ import annotations

import numpy as np

from fedsim.errors import ConfigError
from fedsim.partition.base import Partition, Samples


def _enough(total: int, clients: int, name: str) -> None:
    if total < clients:
        raise ConfigError(f"clients={clients} exceeds the {total} samples that partition={name} can share out")


class IID(Partition):
    """A random permutation cut into m parts whose sizes differ by at most one; every sample is used."""

    name = "iid"

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        _enough(samples.total, clients, self.name)
        return np.array_split(draw.permutation(samples.total), clients)


class Equal(Partition):
    """A random permutation cut into m parts of exactly ⌊N/m⌋ samples; the remainder is left out, and logged."""

    name = "equal"

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        _enough(samples.total, clients, self.name)
        return list(draw.permutation(samples.total)[: samples.total // clients * clients].reshape(clients, -1))
