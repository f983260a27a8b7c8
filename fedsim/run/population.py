"""First step of a setup: the clients of a run, and the samples that each of them holds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.core.federation import Federation
from fedsim.data.datasets import Dataset
from fedsim.data.datasets.pooled import PooledData
from fedsim.data.partition import Table
from fedsim.data.samples import ClientData
from fedsim.run.parts import Parts
from fedsim.run.wiring import Compute, client_data, clients_of, per_seed_of, split_samples
from fedsim.shift import Shift
from fedsim.shift.pooled import PooledShift

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Population:
    """Who takes part in a run, which samples each client holds, and how they react to the deployed model.

    Attributes:
        dataset: that the samples are of.
        tables: which samples belong to whom, newcomers included: one table for each replicate, none for a stream.
        member_tables: the same of the clients that train.
        data: samples of the clients that train, the members; its `federation` has their sizes and label distributions.
        everybody: the same with newcomers, who join when training is over; `data` itself where there are none.
        newcomers: how many of `everybody` they are.
        shift: how samples react to the deployed model; not set up yet.
        per_seed: settings that were given one number per seed, by key.
    """

    dataset: Dataset
    tables: list[Table]
    member_tables: list[Table]
    data: ClientData
    everybody: ClientData
    newcomers: int
    shift: Shift
    per_seed: dict[str, Sequence[float]]

    @classmethod
    def build(cls, components: Parts, clients: int | str, seeds: tuple[int, ...], compute: Compute) -> Population:
        """Deal the samples out.

        Args:
            components: of the run.
            clients: how many, or 'all' that come with the data.
            seeds: of the replicates.
            compute: where the samples are.

        Raises:
            ConfigError: data, partition, clients, seeds and newcomers do not fit together.
        """
        per_seed = per_seed_of(components.strategy, components.local, seeds)
        dataset, clients = clients_of(components.dataset, components.partition, clients)
        partition, shift = components.partition, components.shift
        if components.local.pooled:
            log.info("one client holds the data of all %d; partition and availability do not apply", clients)
            shift = PooledShift(shift, dataset, clients)
            dataset = PooledData(dataset, clients, components.local.one_at_a_time)
            clients, partition = 1, None
        tables = split_samples(dataset, partition, clients, seeds)
        components.personal.check(clients, not tables or tables[0].validation is not None)
        newcomers = components.personal.newcomers
        members = clients - newcomers
        member_tables = [table.first(members) for table in tables]
        build_client_data = functools.partial(client_data, compute=compute, weighting=components.strategy.weighting)
        data = build_client_data(seeds, members, dataset, member_tables, num_newcomers=newcomers)
        everybody = build_client_data(seeds, clients, dataset, tables, members=members) if newcomers else data
        return cls(dataset, tables, member_tables, data, everybody, newcomers, shift, per_seed)

    @property
    def federation(self) -> Federation:
        """The clients that train."""
        return self.data.federation
