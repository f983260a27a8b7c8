"""Clients that each combine several natural clients of the data."""

from __future__ import annotations

import numpy as np

from fedsim.core.constraints import Fraction
from fedsim.core.errors import ConfigError
from fedsim.data.partition.partition import Partition, Samples, Table

MAX_OWNERS_IN_NAME = 2  # largest number of owners in a client's name


class Grouped(Partition):
    """The k natural clients of the data in m groups of ⌊k/m⌋ or ⌈k/m⌉: a client has all samples of its group.

    Args:
        shuffle: whether groups are drawn at random for every replicate; else they are consecutive.
        validation: of every partition.
    """

    name = "grouped"
    by_owner = True

    def __init__(self, shuffle: bool = True, validation: Fraction = 0.0) -> None:
        super().__init__(validation)
        self.shuffle = shuffle

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> Table:
        if samples.owners is None:
            raise ConfigError("partition=grouped needs a data set with natural owners; use partition=dirichlet or iid")
        owners = np.unique(samples.owners)
        if len(owners) < clients:
            raise ConfigError(
                f"clients={clients} exceeds the {len(owners)} natural owners that partition=grouped groups; lower it"
            )
        order = np.argsort(samples.owners, kind="stable")
        first_positions = np.searchsorted(samples.owners[order], owners)
        owner_samples = np.split(order, first_positions[1:])
        groups = np.array_split(draw.permutation(len(owners)) if self.shuffle else np.arange(len(owners)), clients)
        table = Table.from_shares([np.concatenate([owner_samples[k] for k in group]) for group in groups])
        if samples.names is not None:
            table.names = tuple(join_client_names([samples.names[owners[k]] for k in group]) for group in groups)
        return table


def join_client_names(names: list[str]) -> str:
    """The name of a group of natural clients."""
    unnamed_count = len(names) - MAX_OWNERS_IN_NAME
    return (
        " + ".join(names) if unnamed_count <= 1 else f"{' + '.join(names[:MAX_OWNERS_IN_NAME])} + {unnamed_count} more"
    )
