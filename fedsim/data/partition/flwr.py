"""Flower's partitioners (flwr-datasets) as partitions."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from fedsim.core.constraints import Fraction
from fedsim.core.errors import ConfigError
from fedsim.core.targets import ComponentKind
from fedsim.data.partition.partition import Partition, Samples

PARTITIONER_KIND = ComponentKind(
    "a partitioner of Flower's", required_methods=("load_partition",), modules=("flwr_datasets.partitioner",)
)  # classes that define load_partition, or base classes of them


class Flwr(Partition):
    """A partitioner of `flwr_datasets.partitioner`, applied to the column `label` and, if samples belong to natural
    clients, `client`. Needs the extra `flwr`.

    The partitioner's own seed is used, so all replicates have the same partition.

    Args:
        partitioner: given by `_target_` on the command line. It must make as many parts as there are clients.
        validation: of every partition.
    """

    name = "flwr"
    remedy = "change partition.partitioner"
    by_owner = True

    def __init__(self, partitioner: Any, validation: Fraction = 0.0) -> None:
        super().__init__(validation)
        if not hasattr(partitioner, "load_partition"):
            raise ConfigError(
                f"{{partitioner}}={partitioner!r} is not a partitioner of Flower; name one by its _target_, such as "
                "flwr_datasets.partitioner.DirichletPartitioner",
                mentions=("partitioner",),
            )
        self.partitioner = partitioner

    def split(self, samples: Samples, clients: int, draw: np.random.Generator) -> list[np.ndarray]:
        try:
            import datasets
        except ImportError as error:
            raise ConfigError("partition=flwr needs flwr-datasets; pip install 'fedsim-torch[flwr]'") from error
        columns: dict[str, Any] = {"number": np.arange(samples.count)}
        if samples.labels is not None:
            columns["label"] = samples.labels
        if samples.owners is not None:
            names = samples.names or [str(owner) for owner in range(int(samples.owners.max()) + 1)]
            columns["client"] = [names[owner] for owner in samples.owners]
        partitioner = copy.deepcopy(self.partitioner)  # one that has divided a data set cannot divide another
        try:
            partitioner.dataset = datasets.Dataset.from_dict(columns)
            count = partitioner.num_partitions
            partitions = [np.array(partitioner.load_partition(partition)["number"]) for partition in range(count)]
        except Exception as error:  # whatever it may say
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ConfigError(f"partition.partitioner={type(partitioner).__name__} fails: {reason}") from error
        if count != clients:
            raise ConfigError(f"clients={clients}, but partition.partitioner makes {count} parts; make them the same")
        return [partition.astype(np.int64) for partition in partitions]
