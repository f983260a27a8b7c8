"""Availability from a file with a matrix of rounds × clients."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from fedsim.availability.availability import Population
from fedsim.availability.recorded import (
    UNKNOWN_PROBABILITIES_REASON,
    MatchMode,
    MissingRecordsPolicy,
    RecordedAvailability,
    UnmatchedRecordsPolicy,
)
from fedsim.availability.trace_table import probability_column, round_column
from fedsim.core import checks
from fedsim.core.errors import ConfigError, MissingDataError
from fedsim.core.files import check_regular_path
from fedsim.data.datasets.own.samples import client_or_label_name
from fedsim.data.datasets.own.table_columns import CSV_SEPARATORS, Columns, read_columns


class Trace(RecordedAvailability):
    """Line t contains p_i^t of every client: 0 and 1 (or false and true) for recorded availability, or probabilities
    between.

    The first line may contain the names of the columns' clients. It is recognised if an entry is neither 0 or 1 nor a
    number with a decimal fraction; if this is ambiguous because clients are named 0 and 1, `header` decides.

    Args:
        path: a CSV or Parquet file with a line per round and a column per client, or an NPY array [rounds, clients]; in
            Python also a data frame, or an array, tensor or nested list [rounds, clients].
        header: whether a CSV file begins with a line of names: true, false, or auto by that rule.
        round: name of the column with round numbers, in any order; null: lines are rounds in order.
        repeat, match, unknown, missing: see `fedsim.availability.recorded.RecordedAvailability`.

    Raises:
        ConfigError: for a wrong shape, gaps, or values outside [0, 1]; the message names the line.
    """

    def __init__(
        self,
        path: Any,
        repeat: bool = True,
        header: str | bool = "auto",
        round: str | None = None,
        match: MatchMode = "names",
        unknown: UnmatchedRecordsPolicy = "refuse",
        missing: MissingRecordsPolicy = "refuse",
    ) -> None:
        super().__init__(path, repeat, match, unknown, missing)
        if not isinstance(header, bool):
            checks.check_choice("header", header, ("auto", "true", "false"))
        self.header = {"true": True, "false": False}.get(str(header).lower())
        self.names: list[str] | None = None
        self._possible_names: list[str] | None = None
        is_array = isinstance(path, (np.ndarray, Tensor, list))
        suffix = self.path.suffix.lower() if isinstance(self.path, Path) else ".array" if is_array else ".frame"
        if isinstance(self.path, Path) and not self.path.exists():
            raise MissingDataError(f"{self.source} does not exist")
        if suffix == ".npy":
            self._table = self._checked_table(self._read_npy(), "line {}".format, 1)
        elif suffix == ".array":
            self._table = self._checked_table(_numeric_array(path, self.source), "line {}".format, 1)
        elif suffix in (".parquet", ".pq", ".frame"):
            self._table = self._table_from_columns(read_columns(self.path, key="availability.path"), round)
        else:
            self._table = self._read_csv(round)
        if round is not None and self.names is None:
            raise ConfigError(
                f"{{round}}={round} names a column, but {self.source} has no line of names", mentions=("round",)
            )
        self.length = len(self._table)
        self.unknown_reason = UNKNOWN_PROBABILITIES_REASON if np.isin(self._table, (0.0, 1.0)).all() else ""

    def recorded_probabilities(self, t: int) -> np.ndarray:
        return self._table[t]

    def setup(self, population: Population) -> None:
        if self._possible_names is not None:
            client_names = population.names or [str(number) for number in range(population.clients)]
            if set(client_names) == set(self._possible_names):
                raise ConfigError(
                    f"{self.source}: line 1 may be the names of the clients or their first round; say "
                    "availability.header=true or false"
                )
        super().setup(population)

    def _checked_table(self, presence_table: np.ndarray, row_label: Callable[[int], str], first_row: int) -> np.ndarray:
        """A table [rounds, clients] of probabilities."""
        if presence_table.ndim != 2 or 0 in presence_table.shape:
            raise ConfigError(f"{self.source} has shape {list(presence_table.shape)}; expected [rounds, clients]")
        invalid_indices = np.argwhere(~((presence_table >= 0) & (presence_table <= 1)))
        if len(invalid_indices):
            row, column = invalid_indices[0]
            hint = "" if self.names is None else f"; if it counts rounds, set availability.round={self.names[column]}"
            raise ConfigError(
                f"{self.source}, {row_label(row + first_row)}, column {column + 1}: "
                f"{presence_table[row, column]:g} is not between 0 and 1{hint}"
            )
        return presence_table

    def _read_npy(self) -> np.ndarray:
        try:
            table = np.load(check_regular_path(self.path), allow_pickle=False)
            if not isinstance(table, np.ndarray) or table.dtype.kind not in "biuf":
                raise ValueError(f"it holds {getattr(table, 'dtype', type(table).__name__)}")
            return table.astype(np.float64)
        except (ValueError, OSError, EOFError) as error:
            raise ConfigError(f"{self.source} is not a numeric .npy array ({error})") from error

    def _table_from_columns(self, trace_columns: Columns, round: str | None) -> np.ndarray:
        """Return [T, n] from a table whose columns are the clients, and possibly one column of rounds."""
        line_order = np.arange(len(trace_columns))
        if round is not None:
            if round not in trace_columns.arrays:
                raise ConfigError(
                    f"{self.source} has no column {round!r} "
                    f"(availability.round){checks.nearest_name_hint(round, trace_columns.arrays)}"
                )
            round_numbers = round_column(trace_columns, round)
            line_order = np.argsort(round_numbers, kind="stable")
            gap = np.diff(round_numbers[line_order]) != 1
            if gap.any():
                row = int(line_order[int(gap.argmax()) + 1])
                raise ConfigError(
                    f"{self.source}: {trace_columns.row_label(row)}: the rounds in {round!r} must follow one "
                    f"another, each once; {round_numbers[row]} does not"
                )
        clients = [name for name in trace_columns.arrays if name != round]
        if not clients:
            raise ConfigError(f"{self.source} has no column of a client")
        self.names = [client_or_label_name(name) or name for name in clients]
        return np.stack([probability_column(trace_columns, name) for name in clients], axis=1)[line_order]

    def _read_csv(self, round_column: str | None) -> np.ndarray:
        """Return [T, n] from a file of words."""
        try:
            with open(check_regular_path(self.path), newline="", encoding="utf-8-sig") as file:
                header_line = file.readline()
                file.seek(0)
                csv_lines = list(csv.reader(file, delimiter=max(CSV_SEPARATORS, key=header_line.count)))
        except (OSError, UnicodeDecodeError, csv.Error) as error:
            raise ConfigError(f"{self.source} cannot be read as CSV ({error})") from error
        if csv_lines and not csv_lines[0]:
            raise ConfigError(f"{self.source}, line 1 is empty; expected one column per client")
        if self._has_header(csv_lines):
            self._check_client_names([name.strip() for name in csv_lines[0]])
            self.names = [name.strip() for name in csv_lines.pop(0)]
        first_line_number = 1 + (self.names is not None)
        for line_number, csv_line in enumerate(csv_lines, start=first_line_number):
            num_columns = len(csv_lines[0] if self.names is None else self.names)
            if len(csv_line) != num_columns:
                raise ConfigError(f"{self.source}, line {line_number}: {len(csv_line)} columns, expected {num_columns}")
            for column, cell in enumerate(csv_line, start=1):
                if _parse_number(cell) is None:
                    raise ConfigError(f"{self.source}, line {line_number}, column {column}: {cell!r} is not a number")
        if self.names is not None and round_column is not None and csv_lines:
            cells = np.array(csv_lines, dtype=object)
            column_by_name = {name: cells[:, column_index] for column_index, name in enumerate(self.names)}
            return self._table_from_columns(
                Columns(self.source, column_by_name, lambda n: f"line {n + first_line_number}"), round_column
            )
        table = np.array([[_parse_number(cell) for cell in csv_line] for csv_line in csv_lines], dtype=np.float64)
        return self._checked_table(table, "line {}".format, first_line_number)

    def _has_header(self, csv_lines: list[list[str]]) -> bool:
        """Return whether the first line consists of names; if that is unclear, `setup` decides by the clients."""
        cells = [cell.strip() for cell in csv_lines[0]] if csv_lines else []
        if self.header is not None or not cells:
            return bool(self.header and cells)
        if "" in cells:
            if all(cell == "" or _parse_number(cell) is not None for cell in cells):
                return False  # a missing value, which is reported as one
            raise ConfigError(f"{self.source}, line 1, column {cells.index('') + 1}: '' is not a number, and no name")
        if all(_parse_number(cell) in (0.0, 1.0) for cell in cells) and len(set(cells)) == len(cells):
            self._possible_names = cells
        numbers = [_parse_number(cell) for cell in cells]
        if None not in numbers and len(csv_lines) == 1:
            return False
        return any(number is None or (cell.lstrip("+-").isdecimal() and number not in (0.0, 1.0))
                   for cell, number in zip(cells, numbers, strict=True))  # fmt: skip

    def _check_client_names(self, client_names: list[str]) -> None:
        duplicate_name = next((name for name in client_names if client_names.count(name) > 1), None)
        if duplicate_name is not None:
            raise ConfigError(
                f"{self.source}, line 1: several columns are named {duplicate_name!r}; name each client once"
            )
        if "" in client_names:
            raise ConfigError(f"{self.source}, line 1, column {client_names.index('') + 1}: a client has no name")


def _parse_number(cell: str) -> float | None:
    """Return an entry as a number, or a word for 0 or 1."""
    cell_text = cell.strip().lower()
    try:
        return {"true": 1.0, "false": 0.0}.get(cell_text) if cell_text in ("true", "false") else float(cell_text)
    except ValueError:
        return None


def _numeric_array(values: np.ndarray | Tensor | list[Any], source_label: str) -> np.ndarray:
    """An array, tensor or nested list as float64."""
    try:
        array = np.asarray(values.cpu() if isinstance(values, Tensor) else values)
        if array.dtype.kind not in "biuf":
            raise ValueError(f"it holds {array.dtype}")
        return array.astype(np.float64)
    except ValueError as error:
        raise ConfigError(f"{source_label} is not a numeric array [rounds, clients] ({error})") from error
