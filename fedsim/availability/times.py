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
        values: [N] float64 numbers, or int64 microseconds since 1970 (in UTC, where they have a time zone).
    """

    kind: str
    values: np.ndarray


def parse_round_duration(config_key: str, duration: float | str, time_kind: str) -> float:
    """Return the duration of a round, in the unit of times of this kind.

    Raises:
        ConfigError: it is not positive, or no length for such times.
    """
    if time_kind == "numbers":
        if isinstance(duration, str):
            raise ConfigError(
                key=config_key,
                value=duration,
                needs="is for timestamps, but the times in the log are numbers; give a number in their "
                "unit, such as 3600 for an hour where they are seconds",
            )
        return checks.check_positive(config_key, duration)
    duration_match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", duration) if isinstance(duration, str) else None
    if duration_match is None or duration_match[2] not in MICROSECONDS_PER_UNIT or float(duration_match[1]) <= 0:
        raise ConfigError(
            key=config_key,
            value=duration,
            needs=f"must be a length such as 1h or 30min, since the times in the log are timestamps; units "
            f"are {', '.join(MICROSECONDS_PER_UNIT)}",
        )
    length = round(float(duration_match[1]) * MICROSECONDS_PER_UNIT[duration_match[2]])
    if length < 1:
        raise ConfigError(key=config_key, value=duration, needs="is shorter than a microsecond")
    return length


def time_column(trace_columns: Columns, column_name: str) -> Times:
    """A column of numbers or timestamps.

    Raises:
        ConfigError: an entry is missing or neither, naming its line; or they are of several kinds.
    """
    column_values = trace_columns[column_name]
    missing_mask = np.isnat(column_values) if column_values.dtype.kind == "M" else is_missing(column_values)
    if missing_mask.any():
        location = trace_columns.row_label(int(missing_mask.argmax()))
        raise ConfigError(
            f"{trace_columns.source}: {location} has no {column_name!r}; give a time, or leave the line out"
        )
    if column_values.dtype.kind == "M":
        return Times("local", column_values.astype("datetime64[us]").astype(np.int64))
    column_numbers = None if column_values.dtype.kind == "b" else as_numbers(column_values, missing_mask)
    if column_numbers is None:
        return _parse_timestamps(trace_columns, column_name, column_values)
    invalid_mask = ~np.isfinite(column_numbers)
    if invalid_mask.any():
        row = int(invalid_mask.argmax())
        raise ConfigError(
            f"{trace_columns.source}: {trace_columns.row_label(row)}: {column_values[row]} in {column_name!r} "
            "is not a time"
        )
    return Times("numbers", column_numbers)


def parse_instant(config_key: str, instant: Any, time_kind: str) -> float:
    """A single time of this kind."""
    label = f"availability.{config_key}"
    instants = time_column(Columns(label, {label: np.array([instant], dtype=object)}, lambda n: "it"), label)
    if instants.kind != time_kind:
        raise ConfigError(
            key=config_key,
            value=instant,
            needs=f"is of other times than the log, which has {TIME_KIND_DESCRIPTIONS[time_kind]}",
        )
    return instants.values[0].item()


def _parse_timestamps(trace_columns: Columns, column_name: str, values: np.ndarray) -> Times:
    """Parse timestamps given as text or as objects of Python's datetime."""
    microseconds, timestamp_kinds = np.empty(len(values), dtype=np.int64), set()
    epoch = datetime.datetime(1970, 1, 1)
    for row, value in enumerate(values.tolist()):
        parsed_timestamp = value if isinstance(value, datetime.datetime) else _parse_iso_timestamp(value)
        if parsed_timestamp is None:
            raise ConfigError(
                f"{trace_columns.source}: {trace_columns.row_label(row)}: {str(value)!r} in {column_name!r} is "
                "neither a number nor a timestamp such as 2024-05-01T13:30"
            )
        timestamp_kinds.add("local" if parsed_timestamp.tzinfo is None else "zoned")
        if parsed_timestamp.tzinfo is not None:
            parsed_timestamp = parsed_timestamp.astimezone(datetime.timezone.utc).replace(tzinfo=None)
        microseconds[row] = (parsed_timestamp - epoch) // datetime.timedelta(microseconds=1)
    if len(timestamp_kinds) > 1:
        raise ConfigError(
            f"{trace_columns.source}: some entries of {column_name!r} have a time zone and some have none"
        )
    return Times(timestamp_kinds.pop(), microseconds)


def _parse_iso_timestamp(value: Any) -> datetime.datetime | None:
    """Parse ISO 8601; Python 3.10 requires +00:00 for Z, and three or six digits of a second."""
    text = re.sub(r"\.(\d{1,6})\d*", lambda match: "." + match[1].ljust(6, "0"), str(value).strip())
    try:
        return datetime.datetime.fromisoformat(re.sub("[zZ]$", "+00:00", text))
    except ValueError:
        return None
