"""Times in a log (numbers or timestamps), and the duration of a round."""

from __future__ import annotations

import datetime
import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedsim.core import checks
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.table_columns import Columns, as_numbers, is_missing

MICROSECONDS_PER_SECOND = 1_000_000  # in microseconds, in which timestamps are counted
MICROSECONDS_PER_UNIT = {
    "ms": MICROSECONDS_PER_SECOND // 1000,
    "s": MICROSECONDS_PER_SECOND,
    "min": 60 * MICROSECONDS_PER_SECOND,
    "h": 3600 * MICROSECONDS_PER_SECOND,
    "d": 86_400 * MICROSECONDS_PER_SECOND,
    "w": 7 * 86_400 * MICROSECONDS_PER_SECOND,
}
TIME_KIND_DESCRIPTIONS = {
    "numbers": "numbers",
    "local": "timestamps without a time zone",
    "zoned": "timestamps with a time zone",
}


@dataclass
class Times:
    """A column of times.

    Attributes:
        kind: of KINDS.
        of: [N] float64 numbers, or int64 microseconds since 1970 (in UTC, where they have a time zone).
    """

    kind: str
    of: np.ndarray


def round_duration(key: str, value: float | str, kind: str) -> float:
    """How long a round is, in the unit of times of this kind.

    Raises:
        ConfigError: it is not positive, or no length for such times.
    """
    if kind == "numbers":
        if isinstance(value, str):
            raise ConfigError(
                key=key,
                value=value,
                needs="is for timestamps, but the times in the log are numbers; give a number in their "
                "unit, such as 3600 for an hour where they are seconds",
            )
        return checks.positive(key, value)
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", value) if isinstance(value, str) else None
    if match is None or match[2] not in MICROSECONDS_PER_UNIT or float(match[1]) <= 0:
        raise ConfigError(
            key=key,
            value=value,
            needs=f"must be a length such as 1h or 30min, since the times in the log are timestamps; units "
            f"are {', '.join(MICROSECONDS_PER_UNIT)}",
        )
    length = round(float(match[1]) * MICROSECONDS_PER_UNIT[match[2]])
    if length < 1:
        raise ConfigError(key=key, value=value, needs="is shorter than a microsecond")
    return length


def time_column(table: Columns, name: str) -> Times:
    """A column of numbers or timestamps.

    Raises:
        ConfigError: an entry is missing or neither, naming its line; or they are of several kinds.
    """
    values = table[name]
    gaps = np.isnat(values) if values.dtype.kind == "M" else is_missing(values)
    if gaps.any():
        location = table.row_label(int(gaps.argmax()))
        raise ConfigError(f"{table.source}: {location} has no {name!r}; give a time, or leave the line out")
    if values.dtype.kind == "M":
        return Times("local", values.astype("datetime64[us]").astype(np.int64))
    numbers = None if values.dtype.kind == "b" else as_numbers(values, gaps)
    if numbers is None:
        return _parse_timestamps(table, name, values)
    invalid_mask = ~np.isfinite(numbers)
    if invalid_mask.any():
        row = int(invalid_mask.argmax())
        raise ConfigError(f"{table.source}: {table.row_label(row)}: {values[row]} in {name!r} is no time")
    return Times("numbers", numbers)


def parse_instant(key: str, value: Any, kind: str) -> float:
    """A single time of this kind."""
    label = f"availability.{key}"
    instants = time_column(Columns(label, {label: np.array([value], dtype=object)}, lambda n: "it"), label)
    if instants.kind != kind:
        raise ConfigError(
            key=key, value=value, needs=f"is of other times than the log, which has {TIME_KIND_DESCRIPTIONS[kind]}"
        )
    return instants.of[0].item()


def _parse_timestamps(table: Columns, name: str, values: np.ndarray) -> Times:
    """Timestamps that stand in words, or are objects of Python's datetime."""
    microseconds, kinds = np.empty(len(values), dtype=np.int64), set()
    epoch = datetime.datetime(1970, 1, 1)
    for row, value in enumerate(values.tolist()):
        timestamp = value if isinstance(value, datetime.datetime) else _parse_iso_timestamp(value)
        if timestamp is None:
            raise ConfigError(
                f"{table.source}: {table.row_label(row)}: {str(value)!r} in {name!r} is neither a number nor a "
                "timestamp "
                "such as 2024-05-01T13:30"
            )
        kinds.add("local" if timestamp.tzinfo is None else "zoned")
        if timestamp.tzinfo is not None:
            timestamp = timestamp.astimezone(datetime.timezone.utc).replace(tzinfo=None)
        microseconds[row] = (timestamp - epoch) // datetime.timedelta(microseconds=1)
    if len(kinds) > 1:
        raise ConfigError(f"{table.source}: some entries of {name!r} have a time zone and some have none")
    return Times(kinds.pop(), microseconds)


def _parse_iso_timestamp(value: Any) -> datetime.datetime | None:
    """What ISO 8601 makes of it; Python 3.10 wants +00:00 for Z, and three or six digits of a second."""
    text = re.sub(r"\.(\d{1,6})\d*", lambda match: "." + match[1].ljust(6, "0"), str(value).strip())
    try:
        return datetime.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    except ValueError:
        return None
