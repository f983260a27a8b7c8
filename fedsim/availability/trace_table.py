"""Availability from a long table with one line per round and client."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedsim.availability.log import check_role_columns, index_clients
from fedsim.availability.recorded import (
    UNKNOWN_PROBABILITIES_REASON,
    MatchMode,
    MissingRecordsPolicy,
    RecordedAvailability,
    UnmatchedRecordsPolicy,
)
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.table_columns import Columns, as_numbers, is_missing, read_columns

PROBABILITY_BY_WORD = {"true": 1.0, "false": 0.0, "yes": 1.0, "no": 0.0}


class TraceTable(RecordedAvailability):
    """A line states the availability of a client in a round: true or 1, false or 0, or a probability between.

    Rounds are integers; the smallest is round 0 of the run, and all rounds between the smallest and the largest exist,
    also those without a line. A client without a line in a round was not available.

    Args:
        path, repeat, match, unknown, missing: see `fedsim.availability.recorded.RecordedAvailability`.
        client, round: the names of columns.
        available: likewise; null: every line means that the client was available.
    """

    def __init__(
        self,
        path: Any,
        client: str = "client",
        round: str = "round",
        available: str | None = "available",
        repeat: bool = True,
        match: MatchMode = "names",
        unknown: UnmatchedRecordsPolicy = "refuse",
        missing: MissingRecordsPolicy = "refuse",
    ) -> None:
        super().__init__(path, repeat, match, unknown, missing)
        trace_columns = read_columns(self.path, key="availability.path")
        check_role_columns(trace_columns, self.source, {"client": client, "round": round, "available": available})
        client_names, client_index = index_clients(trace_columns, client)
        self.names = client_names
        round_numbers = round_column(trace_columns, round)
        line_probabilities = (
            np.ones(len(trace_columns)) if available is None else probability_column(trace_columns, available)
        )
        self.unknown_reason = UNKNOWN_PROBABILITIES_REASON if np.isin(line_probabilities, (0.0, 1.0)).all() else ""
        round_numbers = round_numbers - round_numbers.min()
        self.length = int(round_numbers.max()) + 1
        line_order = np.lexsort((client_index, round_numbers))
        self._line_clients, self._line_rounds, self._line_probabilities = (
            client_index[line_order],
            round_numbers[line_order],
            line_probabilities[line_order],
        )
        duplicate_mask = (self._line_clients[1:] == self._line_clients[:-1]) & (
            self._line_rounds[1:] == self._line_rounds[:-1]
        )
        if duplicate_mask.any():
            row = int(line_order[1:][duplicate_mask].min())
            raise ConfigError(
                f"{self.source}: {trace_columns.row_label(row)} is a second row of "
                f"{client_names[client_index[row]]!r} in the same round"
            )

    def recorded_probabilities(self, t: int) -> np.ndarray:
        round_slice = slice(*np.searchsorted(self._line_rounds, [t, t + 1]))
        record_values = np.zeros(len(self.names or []))
        record_values[self._line_clients[round_slice]] = self._line_probabilities[round_slice]
        return record_values


def round_column(trace_columns: Columns, column_name: str) -> np.ndarray:
    """[N] int64, the rounds of the lines."""
    column_numbers = as_numbers(trace_columns[column_name], is_missing(trace_columns[column_name]))
    if column_numbers is None:
        column_numbers = np.full(len(trace_columns), np.nan)
        for row, value in enumerate(trace_columns[column_name].tolist()):
            column_numbers[row] = float(value) if str(value).strip().lstrip("+-").isdecimal() else np.nan
    invalid_mask = ~(
        np.isfinite(column_numbers) & (column_numbers == np.floor(column_numbers)) & (np.abs(column_numbers) < 2**53)
    )
    if invalid_mask.any():
        row = int(invalid_mask.argmax())
        raise ConfigError(
            f"{trace_columns.source}: {trace_columns.row_label(row)}: {str(trace_columns[column_name][row])!r} "
            f"in {column_name!r} is not a round; rounds are whole numbers"
        )
    return column_numbers.astype(np.int64)


def probability_column(trace_columns: Columns, column_name: str) -> np.ndarray:
    """[N] numbers from 0 to 1, or words for both ends."""
    column_values = trace_columns[column_name]
    column_numbers = as_numbers(column_values, is_missing(column_values))
    if column_numbers is None:
        column_numbers = np.array([_probability_or_nan(value) for value in column_values.tolist()])
    invalid_mask = ~((column_numbers >= 0) & (column_numbers <= 1))
    if invalid_mask.any():
        row = int(invalid_mask.argmax())
        raise ConfigError(
            f"{trace_columns.source}: {trace_columns.row_label(row)}: {str(column_values[row])!r} in "
            f"{column_name!r} is neither between 0 and 1 nor true or false"
        )
    return column_numbers


def _probability_or_nan(value: Any) -> float:
    """Return a probability; NaN if the entry is none."""
    cell_text = str(value).strip().lower()
    if cell_text in PROBABILITY_BY_WORD:
        return PROBABILITY_BY_WORD[cell_text]
    try:
        return float(cell_text)
    except ValueError:
        return np.nan
