"""Problems of every size for partitions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from fedsim.core import ConfigError
from fedsim.data.partition import (
    IID,
    ClassSplit,
    Dirichlet,
    Equal,
    Grouped,
    Hierarchical,
    Matched,
    Natural,
    Partition,
    Quantity,
    Table,
)
from fedsim.data.partition.partition import Samples

SETTINGS = settings(max_examples=40, deadline=None)


EVERY: dict[str, Callable[[], Partition]] = {
    "iid": IID,
    "equal": Equal,
    "natural": Natural,
    "natural_shuffled": lambda: Natural(shuffle=True),
    "grouped": Grouped,
    "quantity_lognormal": Quantity,
    "quantity_power": lambda: Quantity("power", exponent=2.0),
    "matched": Matched,
    "hierarchical": lambda: Hierarchical(2, inner=Dirichlet(1.0)),
    "classes": lambda: ClassSplit(2),
    "shards": lambda: ClassSplit(2, "shards"),
    "blocks": lambda: ClassSplit(2, "blocks"),
    "dirichlet_cut": lambda: Dirichlet(0.3, "proportional", attempts=20, min_of_class=3),
    "dirichlet_equal": lambda: Dirichlet(0.3, "equal"),
    "dirichlet_proportional": lambda: Dirichlet(0.3, "proportional", attempts=20),
    "dirichlet_per_class": lambda: Dirichlet(0.3, "per_class", attempts=20),
}


def samples_of(total: int, clients: int, classes: int, seed: int) -> Samples:
    """Random labels and owners, every owner with at least one sample where there are enough."""
    draw = np.random.default_rng(seed)
    owners = np.concatenate([np.arange(clients), draw.integers(0, clients, max(total - clients, 0))])[:total]
    return Samples(total, draw.integers(0, classes, total), draw.permutation(owners))


def parts_of(table: Table) -> list[np.ndarray]:
    return np.split(table.order, table.offsets[1:-1])


def table_or_error(partition: Partition, samples: Samples, clients: int, seed: int) -> Table | str:
    """The table, or the message of the error that says why there is none."""
    try:
        return partition.table(samples, clients, seed)
    except ConfigError as error:
        return str(error)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Samples, int, int]:
    total = draw(st.integers(2, 300))
    clients = draw(st.integers(1, min(total, 40)))
    classes = draw(st.integers(1, 12))
    seed = draw(st.integers(0, 2**20))
    return samples_of(total, clients, classes, seed), clients, seed
