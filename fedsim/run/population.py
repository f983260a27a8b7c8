"""First step of a setup: the clients of a run, and the samples that each of them holds."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass

from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.data.datasets import Dataset
from fedsim.data.datasets.pooled import PooledData
from fedsim.data.partition import Table
from fedsim.data.samples import ClientData
from fedsim.run.parts import Parts
from fedsim.run.wiring import (
    ComputeSettings,
    make_client_data,
    partition_samples,
    resolve_data_and_client_count,
    settings_per_seed,
)
from fedsim.shift import Shift
from fedsim.shift.pooled import PooledShift

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Population:
    """The clients of a run, the samples that each of them holds, and how the samples react to the deployed model.

    Attributes:
        dataset: that the samples are of.
        tables: which samples belong to whom, newcomers included: one table for each replicate, none for a stream.
        member_tables: the same of the clients that train.
        data: samples of the clients that train, the members; its `federation` has their sizes and label distributions.
        data_with_newcomers: the same with newcomers, who join when training is over; `data` itself where there are
            none.
        num_newcomers: how many of `all_clients` they are.
        shift: how samples react to the deployed model; not set up yet.
        values_per_seed: settings that were given one number per seed, by key.
    """

    dataset: Dataset
    tables: list[Table]
    member_tables: list[Table]
    data: ClientData
    data_with_newcomers: ClientData
    num_newcomers: int
    shift: Shift
    values_per_seed: dict[str, Sequence[float]]

    @classmethod
    def build(
        cls, components: Parts, clients: int | str, seeds: tuple[int, ...], compute: ComputeSettings
    ) -> Population:
        """Distribute the samples among the clients.

        Args:
            components: of the run.
            clients: how many, or 'all' that come with the data.
            seeds: of the replicates.
            compute: where the samples are.

        Raises:
            ConfigError: data, partition, clients, seeds and newcomers do not fit together.
        """
        per_seed = settings_per_seed(components.strategy, components.local, components.drift, seeds)
        dataset, clients = resolve_data_and_client_count(components.dataset, components.partition, clients)
        partition, shift, drift = components.partition, components.shift, components.drift
        check_drift_support(components)
        if components.local.pooled:
            log.info("one client holds the data of all %d; partition and availability do not apply", clients)
            shift = PooledShift(shift, dataset, clients)
            dataset = PooledData(dataset, clients, components.local.one_at_a_time)
            clients, partition = 1, None
        tables = partition_samples(dataset, partition, clients, seeds)
        validation = not tables or tables[0].validation is not None
        components.personal.check(clients, validation, components.attack is not None and components.attack.active)
        newcomers = components.personal.newcomers
        num_members = clients - newcomers
        member_tables = [table.first(num_members) for table in tables]
        build_client_data = functools.partial(
            make_client_data, compute=compute, weighting=components.strategy.weighting, drift=drift
        )
        data = build_client_data(seeds, num_members, dataset, member_tables, num_newcomers=newcomers)
        all_clients = build_client_data(seeds, clients, dataset, tables, members=num_members) if newcomers else data
        drift.setup(all_clients.federation, dataset)
        return cls(dataset, tables, member_tables, data, all_clients, newcomers, shift, per_seed)

    @property
    def federation(self) -> Federation:
        """The clients that train."""
        return self.data.federation


def check_drift_support(components: Parts) -> None:
    """Refuse a drift together with parts that use the samples of round 0.

    Raises:
        ConfigError: naming both.
    """
    drift, shift, local_rule = components.drift, components.shift, components.local
    if not drift.active:
        return
    drift_label = f"drift={type(drift).__name__}"
    if local_rule.pooled:
        raise ConfigError(
            f"{drift_label} displaces the samples of each client, and local={type(local_rule).__name__} has one "
            "client with the data of all; use drift=none, or another local rule"
        )
    if components.personal.newcomers:
        raise ConfigError(
            f"personal.newcomers={components.personal.newcomers} join after the last round, and {drift_label} "
            "ends with it; use drift=none"
        )
    if shift.knows_stored_samples:
        raise ConfigError(
            f"shift={type(shift).__name__} knows the clients' groups as they are in round 0, and {drift_label} "
            "changes them; use drift=none, or another shift"
        )
