"""The partition the data came with: by writer, by device, by construction."""

from __future__ import annotations

import numpy as np

from fedsim.core.errors import ConfigError
from fedsim.partition.base import Partition, Samples


class Natural(Partition):
    """Client i holds the samples whose natural owner is i.

    Args:
        shuffle: which owner is client i is drawn for every replicate; of more owners than clients, m take part, and
            the others' samples are left out.
        validation: of every partition.
    """

    name = "natural"
    remedy = "give every client samples, or set clients to the number of owners that have some"

    def __init__(self, validation: float = 0.0, shuffle: bool = False) -> None:
        super().__init__(validation)
        self.shuffle = shuffle

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        owners = samples.owners
        if owners is None:
            raise ConfigError("partition=natural needs a data set with natural owners; use partition=dirichlet or iid")
        found = int(owners.max()) + 1
        if found < clients or (found > clients and not self.shuffle):
            raise ConfigError(f"clients={clients}, but the data set has {found} natural owners; set clients={found}")
        order = np.argsort(owners, kind="stable")
        parts = np.split(order, np.searchsorted(owners[order], np.arange(1, found)))
        return [parts[owner] for owner in draw.permutation(found)[:clients]] if self.shuffle else parts
