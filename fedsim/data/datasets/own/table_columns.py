"""Columns of a table: a CSV or Parquet file, a data frame, or a mapping from names to values."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.data.datasets.own.samples import client_or_label_name

MISSING_VALUE_WORDS = ("", "na", "n/a", "nan", "null", "none", "?")  # whatever the case
CSV_SEPARATORS = (",", ";", "\t", "|")
MAX_CSV_FIELD_CHARACTERS = 2**20  # largest CSV field: an unclosed quote would otherwise extend to the end of the file


@dataclass
class Columns:
    """The columns of a table.

    Attributes:
        source: its origin, for messages.
        arrays: the columns by name, [N] each, as read: columns of a CSV file are strings.
        row_label: the name of row n in messages.
    """

    source: str
    arrays: dict[str, np.ndarray]
    row_label: Callable[[int], str]

    def __len__(self) -> int:
        return len(next(iter(self.arrays.values()), ()))

    def rows(self, positions: np.ndarray) -> Columns:
        """These rows of the table."""
        row_name = self.row_label
        return Columns(
            self.source, {k: v[positions] for k, v in self.arrays.items()}, lambda n: row_name(int(positions[n]))
        )

    def __getitem__(self, name: str) -> np.ndarray:
        return self.arrays[name]


def read_columns(table: Any, separator: str | None = None, key: str = "dataset.path") -> Columns:
    """Read the columns of a path, a data frame (pandas, polars or pyarrow) or a mapping.

    Raises:
        ConfigError: it cannot be read, or is not a table.
    """
    if isinstance(table, (str, Path)):
        path = Path(table).expanduser()
        if not path.is_file():
            raise MissingDataError(f"{key}={path} is not a file (looked for {path.resolve()})")
        if path.suffix.lower() in (".parquet", ".pq"):
            return _checked_columns(Columns(str(path), _read_parquet(path, key), "row {}".format))
        return _read_csv(path, separator, key)
    if isinstance(table, Mapping):
        arrays = {str(name): _column_values(values, key) for name, values in table.items()}
    else:
        names = getattr(table, "column_names", getattr(table, "columns", None))
        if names is None:
            raise ConfigError(
                f"{key} is a {type(table).__name__}, not a table; give a path, a data frame, or a mapping from names "
                "to columns"
            )
        arrays = {str(name): _column_values(table[name], key) for name in names}
    return _checked_columns(Columns(key, arrays, "row {}".format))


def _checked_columns(table: Columns) -> Columns:
    lengths = {name: values.shape for name, values in table.arrays.items()}
    first_length = next(iter(lengths.items()), None)
    if first_length is None or not len(table):
        raise ConfigError(f"{table.source}: the table has no rows")
    for name, shape in lengths.items():
        if len(shape) != 1:
            raise ConfigError(
                f"{table.source}: column {name!r} holds {len(shape)}-dimensional values; give numbers or words"
            )
        if shape != first_length[1]:
            raise ConfigError(
                f"{table.source}: column {name!r} has {shape[0]} entries, {first_length[0]!r} "
                f"{first_length[1][0]}; make the lengths "
                "equal"
            )
    return table


def _column_values(values: Any, key: str) -> np.ndarray:
    """One column of a frame or mapping."""
    if hasattr(values, "to_numpy"):
        values = values.to_numpy()
    elif hasattr(values, "detach"):
        values = values.detach().cpu().numpy()
    if isinstance(values, np.ndarray):
        return values
    if not isinstance(values, Iterable) or isinstance(values, str):
        raise ConfigError(f"{key} has a column that is {values!r}; give one value per row")
    entries = list(values)
    array = np.empty(len(entries), dtype=object)
    array[:] = entries
    return array


def _read_parquet(path: Path, key: str) -> dict[str, np.ndarray]:
    try:
        import pyarrow
        import pyarrow.parquet as parquet
    except ImportError as error:
        raise MissingDataError(
            f"{key}={path} is read by pyarrow, which is not installed; pip install 'fedsim-torch[table]'"
        ) from error
    try:
        table = parquet.ParquetFile(path).read()
    except (OSError, pyarrow.ArrowException) as error:
        raise MissingDataError(f"{key}={path} cannot be read as Parquet: {' '.join(str(error).split())}") from error
    if len(set(table.column_names)) < len(table.column_names):
        raise ConfigError(f"{key}={path} has several columns with the same name; rename them")
    return {name: _column_values(table[name], key) for name in table.column_names}


def _read_csv(path: Path, separator: str | None, key: str) -> Columns:
    """Strings, in columns named by the first line; empty lines are ignored."""
    csv.field_size_limit(MAX_CSV_FIELD_CHARACTERS)
    lines: list[list[str]] = []
    numbers: list[int] = []
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            header_line = file.readline()
            file.seek(0)
            separator_mark = separator or max(CSV_SEPARATORS, key=header_line.count)
            for number, line in _numbered_lines(csv.reader(file, delimiter=separator_mark, strict=True)):
                lines.append(line)
                numbers.append(number)
    except (OSError, UnicodeDecodeError, csv.Error, TypeError) as error:
        raise MissingDataError(f"{key}={path} cannot be read as CSV ({error})") from error
    if len(lines) < 2:
        raise ConfigError(f"{path}: a table needs a header line and at least one row, but this has {len(lines)} lines")
    names = [name.strip() for name in lines[0]]
    if not all(names):
        raise ConfigError(f"{path}: column {names.index('') + 1} has no name; the first line must name all columns")
    duplicate_name = next((name for name in names if names.count(name) > 1), None)
    if duplicate_name is not None:
        raise ConfigError(f"{path}: several columns are named {duplicate_name!r}; rename them")
    for line, number in zip(lines[1:], numbers[1:], strict=True):
        if len(line) != len(names):
            raise ConfigError(f"{path}: line {number} has {len(line)} entries, but there are {len(names)} columns")
    rows = np.empty((len(lines) - 1, len(names)), dtype=object)
    rows[:] = lines[1:]
    arrays = {name: rows[:, index] for index, name in enumerate(names)}
    return Columns(str(path), arrays, lambda n: f"line {numbers[n + 1]}")


def _numbered_lines(reader: Any) -> Iterator[tuple[int, list[str]]]:
    """The nonempty lines and their numbers."""
    for line in reader:
        if any(field.strip() for field in line):
            yield reader.line_num, line


def is_missing(values: np.ndarray) -> np.ndarray:
    """[N] which entries are missing."""
    if values.dtype.kind == "f":
        return np.isnan(values)
    if values.dtype.kind in "biu":
        return np.zeros(len(values), dtype=bool)
    return np.array(
        [
            (name := client_or_label_name(value)) is None or name.lower() in MISSING_VALUE_WORDS
            for value in values.tolist()
        ]
    )


def as_numbers(values: np.ndarray, missing_mask: np.ndarray) -> np.ndarray | None:
    """[N] float64, NaN for missing entries; None if an entry is not a number."""
    if values.dtype.kind in "iufb":
        return values.astype(np.float64)
    numbers = np.full(len(values), np.nan)
    present_values = values[~missing_mask].tolist()
    if any(
        isinstance(value, bool) or not hasattr(value, "__float__")
        for value in present_values
        if not isinstance(value, str)
    ):
        return None
    if any(isinstance(value, str) and "_" in value for value in present_values):  # which Python takes for 1000s
        return None
    try:
        numbers[~missing_mask] = np.array(present_values, dtype=object).astype(np.float64)
    except (TypeError, ValueError):
        return None
    return numbers


def numbers_or_nan(values: np.ndarray) -> np.ndarray:
    """[N] float64, NaN for entries that are missing or not numbers."""
    missing_mask = is_missing(values)
    numbers = as_numbers(values, missing_mask)
    if numbers is not None:
        return numbers
    entries = [as_numbers(values[row : row + 1], missing_mask[row : row + 1]) for row in range(len(values))]
    return np.array([np.nan if entry is None else entry[0] for entry in entries])
