"""Availability from a session log: when each client was connected."""

from __future__ import annotations

import logging
import math
from typing import Any

import numpy as np

from fedsim.availability.recorded import (
    UNKNOWN_PROBABILITIES_REASON,
    MatchMode,
    MissingRecordsPolicy,
    RecordedAvailability,
    UnmatchedRecordsPolicy,
)
from fedsim.availability.times import parse_instant, parse_round_duration, time_column
from fedsim.core import checks
from fedsim.core.constraints import Fraction
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.samples import client_or_label_name, sort_names
from fedsim.data.datasets.own.table_columns import Columns, read_columns

log = logging.getLogger(__name__)


class TraceLog(RecordedAvailability):
    """Sessions, one per line: a client, and the start and end of its session.

    Time is divided into rounds from `begin` on. A client is available in a round if its sessions, with overlapping ones
    merged, cover at least the fraction `cover` of it; sessions of zero length cover nothing. The last round may extend
    beyond the end of the log, where no client is available. Times are numbers, or ISO 8601 timestamps.

    Args:
        path, repeat, match, unknown, missing: see `fedsim.availability.recorded.RecordedAvailability`.
        round: duration of a round: a number in the unit of the times, or for timestamps a duration such as 1h or 30min.
        client, start, end: the names of the columns.
        cover: fraction of a round, from 0 (any moment of it) to 1 (all of it).
        begin: start of round 0; null: start of the first session.
        until: end of the log; null: end of the last session.
    """

    unknown_reason = UNKNOWN_PROBABILITIES_REASON

    def __init__(  # noqa: PLR0913 (the parameters are configuration keys)
        self,
        path: Any,
        round: float | str,
        client: str = "client",
        start: str = "from",
        end: str = "to",
        cover: Fraction = 0.5,
        begin: float | str | None = None,
        until: float | str | None = None,
        repeat: bool = True,
        match: MatchMode = "names",
        unknown: UnmatchedRecordsPolicy = "refuse",
        missing: MissingRecordsPolicy = "refuse",
    ) -> None:
        super().__init__(path, repeat, match, unknown, missing)
        self.cover = cover
        table = read_columns(self.path, key="availability.path")
        check_role_columns(table, self.source, {"client": client, "start": start, "end": end})
        self.names, client_index = index_clients(table, client)
        self._read(table, start, end, client_index, round, begin, until)

    def _read(
        self,
        session_table: Columns,
        start_column: str,
        end_column: str,
        client_index: np.ndarray,
        round_length: float | str,
        recording_start: float | str | None,
        recording_end: float | str | None,
    ) -> None:
        """Read the sessions, sorted and merged, and the rounds that they cover."""
        start_times, end_times = time_column(session_table, start_column), time_column(session_table, end_column)
        if start_times.kind != end_times.kind:
            raise ConfigError(
                f"{self.source}: {start_column!r} and {end_column!r} are times of different kinds; use the same "
                "kind for both"
            )
        is_reversed = end_times.values < start_times.values
        if is_reversed.any():
            row = int(is_reversed.argmax())
            raise ConfigError(f"{self.source}: {session_table.row_label(row)}: the session ends before it begins")
        self._step = parse_round_duration("round", round_length, start_times.kind)
        log_start = (
            start_times.values.min()
            if recording_start is None
            else parse_instant("begin", recording_start, start_times.kind)
        )
        log_end = (
            end_times.values.max() if recording_end is None else parse_instant("until", recording_end, start_times.kind)
        )
        if not log_end > log_start:
            raise ConfigError(
                f"{self.source}: no time lies between its beginning and end; see availability.begin and until"
            )
        rounds = float(log_end - log_start) / self._step
        self.length = max(1, math.ceil(rounds - 1e-9))
        if self.length > 2**31:
            raise ConfigError(
                key="round", value=round_length, needs=f"cuts {self.source} into {self.length} rounds; give more"
            )
        relative_start, relative_end = (
            np.clip(times.values, log_start, log_end) - log_start for times in (start_times, end_times)
        )
        self._merge_client_sessions(client_index, relative_start.astype(np.float64), relative_end.astype(np.float64))
        present_share = (
            float((self._session_ends - self._session_starts).sum())
            / float(log_end - log_start)
            / len(self.names or [])
        )
        log.info(
            "%s: %d clients, %d sessions, %d rounds; a client is available %.1f %% of the time",
            self.source, len(self.names or []), len(client_index), self.length, 100 * present_share,
        )  # fmt: skip

    def _merge_client_sessions(
        self, client_index: np.ndarray, session_starts: np.ndarray, session_ends: np.ndarray
    ) -> None:
        """Merge each client's sessions that overlap or touch; drop those of length 0.

        A session is known by its client and by the rank of its time among all times: whole numbers, compared exactly.
        """
        nonempty_mask = session_ends > session_starts
        client_index, session_starts, session_ends = (
            client_index[nonempty_mask],
            session_starts[nonempty_mask],
            session_ends[nonempty_mask],
        )
        end_instants = np.unique(session_ends)
        order = np.lexsort((session_ends, session_starts, client_index))
        client_index, session_starts, session_ends = client_index[order], session_starts[order], session_ends[order]
        rank = np.maximum.accumulate(
            client_index * len(end_instants) + np.searchsorted(end_instants, session_ends)
        ) - client_index * len(end_instants)
        latest_end = (
            end_instants[rank] if len(client_index) else session_ends
        )  # latest end of the client's sessions so far
        opens_mask = np.ones(len(client_index), dtype=bool)
        opens_mask[1:] = (client_index[1:] != client_index[:-1]) | (session_starts[1:] > latest_end[:-1])
        closes_mask = np.append(opens_mask[1:], True)[: len(client_index)]
        self._session_clients, self._session_starts, self._session_ends = (
            client_index[opens_mask],
            session_starts[opens_mask],
            latest_end[closes_mask],
        )
        self._distinct_starts = np.unique(self._session_starts)
        self._keys = self._session_clients * (len(self._distinct_starts) + 1) + np.searchsorted(
            self._distinct_starts, self._session_starts, "right"
        )
        time_before_session = np.concatenate([[0.0], np.cumsum(self._session_ends - self._session_starts)])
        self._time_before_session, self._first_session = (
            time_before_session,
            np.searchsorted(self._session_clients, np.arange(len(self.names or []))),
        )

    def _time_present_before(self, instant: float) -> np.ndarray:
        """Return how long each client was connected before this moment, [n]."""
        clients = np.arange(len(self.names or []))
        query = clients * (len(self._distinct_starts) + 1) + np.searchsorted(self._distinct_starts, instant, "right")
        session_index = np.searchsorted(self._keys, query, "right") - 1  # the last session that started by then
        started_mask = session_index >= self._first_session
        if not len(self._session_clients):
            return np.zeros(len(clients))
        session_index = np.where(started_mask, session_index, 0)
        completed_time = self._time_before_session[session_index] - self._time_before_session[self._first_session]
        return np.where(
            started_mask,
            completed_time
            + np.minimum(instant, self._session_ends[session_index])
            - self._session_starts[session_index],
            0.0,
        )

    def recorded_probabilities(self, t: int) -> np.ndarray:
        """[n] zeros and ones."""
        present_time = self._time_present_before((t + 1) * self._step) - self._time_present_before(t * self._step)
        threshold = self.cover * self._step
        return (present_time > 1e-9 * self._step if threshold == 0 else present_time >= threshold * (1 - 1e-9)).astype(
            np.float64
        )


def check_role_columns(session_table: Columns, source: str, column_by_role: dict[str, str | None]) -> None:
    """Refuse a table without the columns that keys name, and keys that name one column twice; None names no column."""
    for role_name, column_name in column_by_role.items():
        if column_name is not None and column_name not in session_table.arrays:
            raise ConfigError(
                f"{source} has no column {column_name!r} (availability.{role_name}); it has "
                f"{', '.join(session_table.arrays)}{checks.nearest_name_hint(str(column_name), session_table.arrays)}"
            )
    if len(set(column_by_role.values())) < len(column_by_role):
        *first_roles, last_role = (
            f"{{{role_name}}}={column_name}" for role_name, column_name in column_by_role.items()
        )
        raise ConfigError(
            f"{', '.join(first_roles)} and {last_role} must be columns of their own", mentions=tuple(column_by_role)
        )


def index_clients(table: Columns, name: str) -> tuple[list[str], np.ndarray]:
    """Return the names of the clients in a column, in order, and for each line [N] the position of its client."""
    line_clients = _clients_of_lines(table, name)
    names = sort_names(set(line_clients))
    index_of = {client: index for index, client in enumerate(names)}
    return names, np.array([index_of[client] for client in line_clients])


def _clients_of_lines(session_table: Columns, column_name: str) -> list[str]:
    """Return the client of each line, [N]."""
    client_names = [client_or_label_name(value) for value in session_table[column_name].tolist()]
    nameless_line = next((row for row, value in enumerate(client_names) if value is None), None)
    if nameless_line is not None:
        raise ConfigError(
            f"{session_table.source}: {session_table.row_label(nameless_line)} has no {column_name!r}; name a "
            "client, or leave it out"
        )
    return [str(value) for value in client_names]
