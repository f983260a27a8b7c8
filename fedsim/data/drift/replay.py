"""A recorded drift: displacements are read from a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import numpy as np

from fedsim.core.constraints import OneOf, RealPerSeed
from fedsim.core.effects import EffectiveIf
from fedsim.core.errors import ConfigError
from fedsim.core.federation import Federation
from fedsim.core.per_seed import as_per_seed
from fedsim.data.datasets import Dataset
from fedsim.data.datasets.own.table_columns import Columns, numbers_or_nan, read_columns
from fedsim.data.drift.drift import Drift, of_replicates

KEY = "drift.path"
BETWEEN_MODES = ("hold", "linear")


class Replay(Drift):
    """s(t) follows a recorded series: a table with the columns `round` and `displacement`, one row for each recorded
    round, and optionally `client`, for a series per client. Round 0 is recorded; later rounds may be left out.

    Args:
        path: of the table (.csv, .tsv, .parquet); in Python also a data frame, or a mapping from names to columns.
        size: factor of the displacements; a list: one number per seed.
        between: rounds that are left out: 'hold': the displacement of the last recorded round before; 'linear':
            interpolated linearly.
        repeat: start again after the last recorded round; otherwise its displacement remains.
        **options: of every drift.
    """

    effective_if = (
        EffectiveIf("between", lambda component, run: component.leaves_out_rounds, "a round that {at}.path leaves out"),
        EffectiveIf("repeat", lambda component, run: run.rounds >= component.length, "rounds after those of {at}.path"),
    )

    def __init__(
        self,
        path: Any,
        size: RealPerSeed = 1.0,
        between: Annotated[str, OneOf(*BETWEEN_MODES)] = "hold",
        repeat: bool = False,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.size, self.between, self.repeat = as_per_seed(size), between, repeat
        self.source = f"{KEY}={path}" if isinstance(path, (str, Path)) else KEY
        table = read_columns(path, key=KEY)
        rounds, displacements = (self._finite_column(table, column) for column in ("round", "displacement"))
        invalid_mask = (rounds < 0) | (rounds != np.floor(rounds))
        if invalid_mask.any():
            self._refuse(table, "round", int(invalid_mask.argmax()), "a whole number from 0 on")
        self.client_names = sorted(set(map(str, table["client"]))) if "client" in table.arrays else None
        row_groups = [np.arange(len(table))]
        if self.client_names is not None:
            labels = np.array([str(label) for label in table["client"]])
            row_groups = [np.flatnonzero(labels == name) for name in self.client_names]
        self.recorded_rounds = np.unique(rounds)  # [K], of all series
        self.length = int(rounds.max()) + 1
        self.leaves_out_rounds = any(len(rows) < rounds[rows].max() + 1 for rows in row_groups)
        self.displacements = np.stack(  # [series, K]
            [self._displacements_of_one_series(table, rows, rounds, displacements) for rows in row_groups]
        )
        self._series_of_client = np.zeros(0, dtype=np.int64)

    def _finite_column(self, table: Columns, column: str) -> np.ndarray:
        """[N] the finite numbers of a column."""
        if column not in table.arrays:
            raise ConfigError(
                f"{self.source} has the columns {', '.join(table.arrays)}; it needs round and displacement, and may "
                "have client"
            )
        numbers = numbers_or_nan(table[column])
        invalid_mask = ~np.isfinite(numbers)
        if invalid_mask.any():
            self._refuse(table, column, int(invalid_mask.argmax()), "a finite number")
        return numbers

    def _refuse(self, table: Columns, column: str, row: int, needs: str) -> NoReturn:
        raise ConfigError(f"{self.source}: {column}={table[column][row]} of {table.row_label(row)} must be {needs}")

    def _displacements_of_one_series(
        self, table: Columns, rows: np.ndarray, rounds: np.ndarray, displacements: np.ndarray
    ) -> np.ndarray:
        """[K] the displacements of one series in the recorded rounds of all series."""
        of_client = "" if self.client_names is None else f" of client {table['client'][rows[0]]}"
        rows = rows[np.argsort(rounds[rows], kind="stable")]
        if rounds[rows[0]] != 0:
            raise ConfigError(
                f"{self.source} begins in round {int(rounds[rows[0]])}{of_client}; give a row for round 0"
            )
        repeated_rows = np.flatnonzero(np.diff(rounds[rows]) == 0)
        if len(repeated_rows):
            repeated_round = int(rounds[rows[repeated_rows[0]]])
            raise ConfigError(f"{self.source} has several rows for round {repeated_round}{of_client}; leave one")
        if self.between == "linear":
            return np.interp(self.recorded_rounds, rounds[rows], displacements[rows])
        return displacements[rows[np.searchsorted(rounds[rows], self.recorded_rounds, side="right") - 1]]

    def setup(self, federation: Federation, dataset: Dataset) -> None:
        super().setup(federation, dataset)
        names = federation.client_names or tuple(str(number) for number in range(federation.clients))
        if self.client_names is None:
            self._series_of_client = np.zeros(len(names), dtype=np.int64)
            return
        missing_names = [name for name in names if name not in self.client_names]
        unknown_names = [name for name in self.client_names if name not in names]
        if missing_names or unknown_names:
            problem = f"no row of client {missing_names[0]}" if missing_names else f"client {unknown_names[0]}"
            raise ConfigError(
                f"{self.source} has {problem}, but the run's clients are {names[0]} to {names[-1]}; give a series for "
                "each of them, or leave out the column client"
            )
        self._series_of_client = np.array([self.client_names.index(name) for name in names])

    def path(self, t: np.ndarray, replicate: np.ndarray) -> np.ndarray:
        return self._series_displacements(t, replicate, np.zeros(len(t), dtype=np.int64))

    def displacement(self, t: np.ndarray, replicate: np.ndarray, client: np.ndarray) -> np.ndarray:
        return self._factors[client] * self._series_displacements(t, replicate, self._series_of_client[client])

    def _series_displacements(self, t: np.ndarray, replicate: np.ndarray, series: np.ndarray) -> np.ndarray:
        """[c] the displacements of these series in rounds [c]."""
        rounds = t % self.length if self.repeat else np.minimum(t, self.length - 1)
        before = np.searchsorted(self.recorded_rounds, rounds, side="right") - 1
        displacements = self.displacements[series, before]
        if self.between == "linear":
            after = np.minimum(before + 1, len(self.recorded_rounds) - 1)
            gaps = np.maximum(self.recorded_rounds[after] - self.recorded_rounds[before], 1.0)
            fractions = (rounds - self.recorded_rounds[before]) / gaps
            displacements = displacements + fractions * (self.displacements[series, after] - displacements)
        return of_replicates(self.size, replicate) * displacements

    def loaded_arrays(self) -> dict[str, np.ndarray]:
        return {"round": self.recorded_rounds, "displacement": self.displacements}
