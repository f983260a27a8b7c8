"""The natural partition of the data: by writer, by device, by construction."""

from __future__ import annotations

import numpy as np

from fedsim.core.constraints import CountOrZero, Fraction
from fedsim.core.errors import ConfigError
from fedsim.data.partition.partition import Partition, Samples, Table


class Natural(Partition):
    """Client i has the samples of natural client i of the data.

    Args:
        shuffle: whether the order of natural clients is drawn for every replicate; if there are more than m, only m are
            used.
        seed: for choosing m natural clients for all replicates, if there are more and `shuffle` is false; test samples
            of the others are excluded too.
        validation: of every partition.
    """

    name = "natural"
    by_owner = True
    remedy = "give every client samples, or set clients to the number of owners with samples"

    def __init__(self, validation: Fraction = 0.0, shuffle: bool = False, seed: CountOrZero = 0) -> None:
        super().__init__(validation)
        self.seed = seed
        self.shuffle = shuffle

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> Table:
        owners = samples.owners
        if owners is None:
            raise ConfigError("partition=natural needs a data set with natural owners; use partition=dirichlet or iid")
        owner_count = int(owners.max()) + 1
        if owner_count < clients or (owner_count > clients and not self.shuffle):
            raise ConfigError(
                f"clients={clients}, but the data set has {owner_count} natural owners; set "
                f"clients={owner_count}, or all"
            )
        order = np.argsort(owners, kind="stable")
        owner_samples = np.split(order, np.searchsorted(owners[order], np.arange(1, owner_count)))
        natural_numbers = draw.permutation(owner_count)[:clients] if self.shuffle else range(owner_count)
        table = Table.from_shares([owner_samples[owner] for owner in natural_numbers])
        table.names = None if samples.names is None else tuple(samples.names[owner] for owner in natural_numbers)
        return table
