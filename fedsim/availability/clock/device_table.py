"""Measured devices: a table of computing times and bandwidths, of which each client has one row."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.availability.clock.device_profiles import device_profile_columns
from fedsim.core import rng
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.table_columns import Columns, numbers_or_nan, read_columns

DEVICES_KEY = "clock.devices"
TRAINING_COST_FACTOR = 3.0  # a training sample takes as long as this many inferences, as FedScale assumes
ENERGY_COLUMNS = ("power", "joules_down", "joules_up")
OPTIONAL_COLUMNS = ("down", "up", *ENERGY_COLUMNS)
BYTES_PER_KILOBIT = 128.0  # bytes; FedScale measures sizes in units of 1,024 bits


class DeviceProfiles:
    """Computing times and bandwidths of n devices.

    The columns are `compute` (seconds per training sample) and, if devices differ in their links, `down` and `up`
    (bytes per second), or in their energy, `power` (watts), `joules_down` and `joules_up` (per byte); or those of
    FedScale's device capacities (Lai et al. 2022), `computation` (milliseconds of an inference per sample; training
    takes three times as long) and `communication` (kilobits per second in both directions). FedScale's pickled
    dictionary becomes such a table by `pandas.DataFrame(devices).T.to_csv(path, index=False)`.

    A column `device` names profiles of `fedsim.availability.clock.device_profiles` instead, each alone or with its link
    (`jetson_nano@4g`), and a column `factor` multiplies the computing times, for example by the operations of the run's
    network over those of MobileNetV2. A name, or a list of names, is a table with this column alone.

    Args:
        source: a path (.csv, .tsv, .parquet), a data frame, a mapping from names to columns, or names of profiles.

    Attributes:
        compute: [n] seconds per training sample.
        down, up: [n] bytes per second; None without such a column.
        power: [n] watts while a device computes; None without such a column.
        joules_down, joules_up: [n] joules per byte; None without such a column.
    """

    def __init__(self, source: Any) -> None:
        source_label = f"{DEVICES_KEY}={source}" if isinstance(source, (str, Path)) else DEVICES_KEY
        device_table = _with_device_profiles(read_columns(_device_table_source(source), key=DEVICES_KEY))
        self.down: np.ndarray | None
        self.up: np.ndarray | None
        if "compute" in device_table.arrays:
            self.compute = _positive_column_numbers(device_table, "compute", source_label)
            self.down, self.up = (
                _positive_column_numbers(device_table, name, source_label) if name in device_table.arrays else None
                for name in ("down", "up")
            )
        elif {"computation", "communication"} <= device_table.arrays.keys():
            self.compute = (
                TRAINING_COST_FACTOR * _positive_column_numbers(device_table, "computation", source_label) / 1000
            )
            self.down = self.up = BYTES_PER_KILOBIT * _positive_column_numbers(
                device_table, "communication", source_label
            )
        else:
            raise ConfigError(
                f"{source_label} has the columns {', '.join(device_table.arrays)}; it needs compute (and down, up), "
                "FedScale's computation and communication, or device (names of profiles)"
            )
        if "factor" in device_table.arrays:
            self.compute = self.compute * _positive_column_numbers(device_table, "factor", source_label)
        self.power, self.joules_down, self.joules_up = (
            _positive_column_numbers(device_table, name, source_label, or_zero=True)
            if name in device_table.arrays
            else None
            for name in ENERGY_COLUMNS
        )

    def rows(self, seeds: Sequence[int], clients: int) -> np.ndarray:
        """[R·m] the device of each client: all devices in a random order by the replicate's seed, repeated if there are
        more clients.
        """
        count = len(self.compute)
        orders = rng.draws_by_seed(seeds, lambda draw: draw.permutation(count), rng.Purpose.DEVICE)
        return np.asarray(orders[:, np.arange(clients) % count].reshape(-1))

    def loaded_arrays(self) -> dict[str, np.ndarray]:
        """Return the numbers by name, to be compared when a run is resumed."""
        return {name: values for name, values in vars(self).items() if values is not None}


def _device_table_source(source: Any) -> Any:
    """Return a table of the named profiles for one name or a list of names; other sources as they are."""
    if isinstance(source, str) and not Path(source).suffix and not Path(source).expanduser().exists():
        return {"device": [source]}
    return {"device": list(source)} if isinstance(source, (list, tuple)) else source


def _with_device_profiles(table: Columns) -> Columns:
    """Return the table with the numbers of the devices that its column `device` names."""
    if "device" not in table.arrays or "compute" in table.arrays:
        return table
    profiles = device_profile_columns([str(name) for name in table["device"]], DEVICES_KEY)
    arrays = {name: np.asarray(values) for name, values in profiles.items()}
    arrays["compute"] = TRAINING_COST_FACTOR * arrays.pop("computation") / 1000
    return Columns(table.source, table.arrays | arrays, table.row_label)


def _positive_column_numbers(
    device_table: Columns, column_name: str, source_label: str, or_zero: bool = False
) -> np.ndarray:
    """Return the numbers [n] of a column, which must be positive, or 0."""
    column_numbers = numbers_or_nan(device_table[column_name])
    if not len(device_table):
        raise ConfigError(f"{source_label} has no rows; give at least one device")
    is_valid = np.isfinite(column_numbers) & ((column_numbers > 0) | (or_zero & (column_numbers == 0)))
    if not is_valid.all():
        row = int(is_valid.argmin())
        raise ConfigError(
            f"{source_label}: {column_name}={device_table[column_name][row]} of {device_table.row_label(row)} "
            f"must be {'0 or ' * or_zero}a positive number"
        )
    return column_numbers
