"""Partition on two levels: among groups, and among the clients of each group."""

from __future__ import annotations

import numpy as np

from fedsim.core.constraints import Count, Fraction
from fedsim.core.errors import ConfigError
from fedsim.data.partition.dirichlet import Dirichlet
from fedsim.data.partition.even import IID
from fedsim.data.partition.partition import Partition, Samples, Table


class Hierarchical(Partition):
    """`outer` divides the samples among groups, `inner` those of each group among its clients.

    Clients are ordered by group, ⌊m/G⌋ or ⌈m/G⌉ in each, and named GROUP.CLIENT, both starting at 0.

    Args:
        groups: G.
        outer, inner: partitions; by default Dirichlet(0.3, 'proportional') and iid.
        validation: of every partition.
    """

    name = "hierarchical"
    remedy = "lower clients, or use more data"

    def __init__(
        self,
        groups: Count = 5,
        outer: Partition | None = None,
        inner: Partition | None = None,
        validation: Fraction = 0.0,
    ) -> None:
        super().__init__(validation)
        self.groups = groups
        self.outer = Dirichlet(form="proportional") if outer is None else outer
        self.inner = IID() if inner is None else inner
        for key, partition in (("outer", self.outer), ("inner", self.inner)):
            if not isinstance(partition, Partition):
                raise ConfigError(
                    f"partition.{key}={partition!r} is not a partition; name a partition class by its _target_"
                )
            if partition.validation:
                raise ConfigError(
                    key=f"{key}.validation", needs="is not used; set {validation}", mentions=("validation",)
                )

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> Table:
        if clients < self.groups:
            raise ConfigError(f"clients={clients} leaves some of partition.groups={self.groups} empty; raise it")
        of_groups = sample_indices_per_client(self.outer.split(samples, self.groups, draw))
        sizes = [len(indices) for indices in np.array_split(np.arange(clients), self.groups)]
        client_samples = []
        for group, (group_samples, count) in enumerate(zip(of_groups, sizes, strict=True)):
            if len(group_samples) < count:
                raise ConfigError(
                    f"partition=hierarchical: group {group} has {len(group_samples)} samples for its {count} clients; "
                    "lower clients or partition.groups, or reduce the skew of partition.outer"
                )
            group_subset = Samples(
                len(group_samples),
                None if samples.labels is None else samples.labels[group_samples],
                None if samples.owners is None else samples.owners[group_samples],
                samples.names,
            )
            client_samples += [
                group_samples[indices]
                for indices in sample_indices_per_client(self.inner.split(group_subset, count, draw))
            ]
        table = Table.from_shares(client_samples)
        table.names = tuple(f"{group}.{client}" for group, count in enumerate(sizes) for client in range(count))
        return table


def sample_indices_per_client(division: list[np.ndarray] | Table) -> list[np.ndarray]:
    """One array of sample numbers per client."""
    return np.split(division.order, division.offsets[1:-1]) if isinstance(division, Table) else division
