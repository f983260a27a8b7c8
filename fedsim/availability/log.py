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
    Recorded,
    UnmatchedRecordsPolicy,
)
from fedsim.availability.times import parse_instant, round_duration, time_column
from fedsim.core import checks
from fedsim.core.constraints import Fraction
from fedsim.core.errors import ConfigError
from fedsim.data.datasets.own.samples import entry_name, sort_names
from fedsim.data.datasets.own.table_columns import Columns, read_columns

log = logging.getLogger(__name__)


class TraceLog(Recorded):
    """Sessions, one per line: a client, and the start and end of its session.

    Time is divided into rounds from `begin` on. A client is available in a round if its sessions, with overlapping ones
    merged, cover at least the fraction `cover` of it; sessions of zero length cover nothing. The last round may extend
    beyond the end of the log, where no client is available. Times are numbers, or ISO 8601 timestamps.

    Args:
        path, repeat, match, unknown, missing: see `fedsim.availability.recorded.Recorded`.
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
        check_roles(table, self.source, {"client": client, "start": start, "end": end})
        self.names, client_index = numbered_clients(table, client)
        self._read(table, start, end, client_index, round, begin, until)

    def _read(
        self,
        table: Columns,
        start: str,
        end: str,
        client_index: np.ndarray,
        round: float | str,
        begin: float | str | None,
        until: float | str | None,
    ) -> None:
        """Sessions, sorted and united, and the rounds that they fill."""
        first, last = time_column(table, start), time_column(table, end)
        if first.kind != last.kind:
            raise ConfigError(
                f"{self.source}: {start!r} and {end!r} are times of different kinds; use the same kind for both"
            )
        is_reversed = last.of < first.of
        if is_reversed.any():
            row = int(is_reversed.argmax())
            raise ConfigError(f"{self.source}: {table.row_label(row)}: the session ends before it begins")
        self._step = round_duration("round", round, first.kind)
        log_start = first.of.min() if begin is None else parse_instant("begin", begin, first.kind)
        log_end = last.of.max() if until is None else parse_instant("until", until, first.kind)
        if not log_end > log_start:
            raise ConfigError(
                f"{self.source}: no time lies between its beginning and end; see availability.begin and until"
            )
        rounds = float(log_end - log_start) / self._step
        self.length = max(1, math.ceil(rounds - 1e-9))
        if self.length > 2**31:
            raise ConfigError(
                key="round", value=round, needs=f"cuts {self.source} into {self.length} rounds; give more"
            )
        low, high = (np.clip(times.of, log_start, log_end) - log_start for times in (first, last))
        self._unite(client_index, low.astype(np.float64), high.astype(np.float64))
        share = (
            float((self._session_ends - self._session_starts).sum())
            / float(log_end - log_start)
            / len(self.names or [])
        )
        log.info(
            "%s: %d clients, %d sessions, %d rounds; a client is available %.1f %% of the time",
            self.source, len(self.names or []), len(client_index), self.length, 100 * share,
        )  # fmt: skip

    def _unite(self, client_index: np.ndarray, start: np.ndarray, end: np.ndarray) -> None:
        """Each client's sessions that overlap or touch become one; those of no length go.

        A session is known by its client and by the rank of its time among all times: whole numbers, compared exactly.
        """
        nonempty_mask = end > start
        client_index, start, end = client_index[nonempty_mask], start[nonempty_mask], end[nonempty_mask]
        moments = np.unique(end)
        order = np.lexsort((end, start, client_index))
        client_index, start, end = client_index[order], start[order], end[order]
        rank = np.maximum.accumulate(client_index * len(moments) + np.searchsorted(moments, end)) - client_index * len(
            moments
        )
        latest = moments[rank] if len(client_index) else end  # the end so far of the client's sessions
        opens_mask = np.ones(len(client_index), dtype=bool)
        opens_mask[1:] = (client_index[1:] != client_index[:-1]) | (start[1:] > latest[:-1])
        closes_mask = np.append(opens_mask[1:], True)[: len(client_index)]
        self._session_clients, self._session_starts, self._session_ends = (
            client_index[opens_mask],
            start[opens_mask],
            latest[closes_mask],
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

    def _time_present_before(self, moment: float) -> np.ndarray:
        """[n] how long each client was there before this moment."""
        clients = np.arange(len(self.names or []))
        query = clients * (len(self._distinct_starts) + 1) + np.searchsorted(self._distinct_starts, moment, "right")
        session = np.searchsorted(self._keys, query, "right") - 1  # the last one that began
        started_mask = session >= self._first_session
        if not len(self._session_clients):
            return np.zeros(len(clients))
        session = np.where(started_mask, session, 0)
        completed_time = self._time_before_session[session] - self._time_before_session[self._first_session]
        return np.where(
            started_mask,
            completed_time + np.minimum(moment, self._session_ends[session]) - self._session_starts[session],
            0.0,
        )

    def recorded_probabilities(self, t: int) -> np.ndarray:
        """[n] zeros and ones."""
        present_time = self._time_present_before((t + 1) * self._step) - self._time_present_before(t * self._step)
        threshold = self.cover * self._step
        return (present_time > 1e-9 * self._step if threshold == 0 else present_time >= threshold * (1 - 1e-9)).astype(
            np.float64
        )


def check_roles(table: Columns, source: str, roles: dict[str, str | None]) -> None:
    """Refuse a table without the columns that keys name, and keys that name one column twice; None names none."""
    for key, name in roles.items():
        if name is not None and name not in table.of:
            raise ConfigError(
                f"{source} has no column {name!r} (availability.{key}); it has {', '.join(table.of)}"
                f"{checks.nearest(str(name), table.of)}"
            )
    if len(set(roles.values())) < len(roles):
        *first_roles, last_role = (f"{{{key}}}={name}" for key, name in roles.items())
        raise ConfigError(
            f"{', '.join(first_roles)} and {last_role} must be columns of their own", mentions=tuple(roles)
        )


def numbered_clients(table: Columns, name: str) -> tuple[list[str], np.ndarray]:
    """The clients in a column by their names, in order, and the place among them of each line's [N]."""
    line_clients = _clients_of_lines(table, name)
    names = sort_names(set(line_clients))
    index_of = {client: index for index, client in enumerate(names)}
    return names, np.array([index_of[client] for client in line_clients])


def _clients_of_lines(table: Columns, name: str) -> list[str]:
    """[N] whose line it is."""
    client_names = [entry_name(value) for value in table[name].tolist()]
    nameless_line = next((row for row, value in enumerate(client_names) if value is None), None)
    if nameless_line is not None:
        raise ConfigError(
            f"{table.source}: {table.row_label(nameless_line)} has no {name!r}; name a client, or leave it out"
        )
    return [str(value) for value in client_names]
