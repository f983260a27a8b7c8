"""Measured devices: a table of computing times and bandwidths, of which each client has one row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core import rng
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.table_columns import Columns, as_numbers, is_missing, read_columns

KEY = "clock.devices"
BACKWARD = 3.0  # a training sample takes as long as so many inferences, as FedScale assumes
KILOBIT = 128.0  # bytes; FedScale measures sizes in units of 1,024 bits


class DeviceTable:
    """Computing times and bandwidths of n devices.

    The columns are `compute` (seconds per training sample) and, if devices differ in their links, `down` and `up`
    (bytes per second); or those of FedScale's device capacities (Lai et al. 2022), `computation` (milliseconds of an
    inference per sample; training takes three times as long) and `communication` (kilobits per second in both
    directions). FedScale's pickled dictionary becomes such a table by `pandas.DataFrame(devices).T.to_csv(path,
    index=False)`.

    Args:
        source: a path (.csv, .tsv, .parquet), a data frame, or a mapping from names to columns.

    Attributes:
        compute: [n] seconds per training sample.
        down, up: [n] bytes per second; None without such a column.
    """

    def __init__(self, source: Any) -> None:
        table = read_columns(source, key=KEY)
        label = f"{KEY}={source}" if isinstance(source, (str, Path)) else KEY
        self.down: np.ndarray | None
        self.up: np.ndarray | None
        if "compute" in table.of:
            self.compute = _positive(table, "compute", label)
            self.down, self.up = (
                _positive(table, name, label) if name in table.of else None for name in ("down", "up")
            )
        elif {"computation", "communication"} <= table.of.keys():
            self.compute = BACKWARD * _positive(table, "computation", label) / 1000
            self.down = self.up = KILOBIT * _positive(table, "communication", label)
        else:
            raise ConfigError(
                f"{label} has the columns {', '.join(table.of)}; it needs compute (and down, up), or FedScale's "
                "computation and communication"
            )

    def rows(self, seeds: Sequence[int], clients: int) -> np.ndarray:
        """[R·m] the device of each client: all devices in a random order by the replicate's seed, repeated if there are
        more clients.
        """
        count = len(self.compute)
        orders = rng.draws_by_seed(seeds, lambda draw: draw.permutation(count), rng.Purpose.DEVICE)
        return np.asarray(orders[:, np.arange(clients) % count].reshape(-1))

    def record_of(self) -> dict[str, np.ndarray]:
        """The numbers, by name: a resumed run must meet the same."""
        return {name: values for name, values in vars(self).items() if values is not None}


def _positive(table: Columns, name: str, label: str) -> np.ndarray:
    """[n] the numbers of a column, which must be positive."""
    gaps = is_missing(table[name])
    numbers = as_numbers(table[name], gaps)
    if not len(table):
        raise ConfigError(f"{label} has no rows; give at least one device")
    bad = np.flatnonzero(gaps if numbers is None else ~(np.isfinite(numbers) & (numbers > 0)))
    if numbers is None or len(bad):
        row = int(bad[0]) if len(bad) else 0
        raise ConfigError(f"{label}: {name}={table[name][row]} of {table.row_label(row)} must be a positive number")
    return numbers
