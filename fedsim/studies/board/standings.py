"""Standings of a board's algorithms: ranks over cells, wins by paired intervals, the order after half of the rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedsim.studies.board.board import Leaderboard
from fedsim.studies.board.costs import AlgorithmRoundTimes
from fedsim.studies.board.rows import DONE_STATUS, REFUSED_STATUS, CellRows, Row, TunedRates, read_cell_rows
from fedsim.studies.results.friedman import (
    FriedmanTest,
    critical_difference,
    friedman_test,
    indistinguishable_groups,
    rank_scores,
)
from fedsim.studies.results.paired import PairedDifference, paired_difference

DIVERGED_SCORE = -np.inf  # the score of a row that diverged


class HalfwayRankCorrelation(NamedTuple):
    """The order after half of the rounds compared with the order at the end.

    Attributes:
        mean_kendall_tau: Kendall's τ between the two orders, averaged over cells; NaN where there are no curves.
        min_kendall_tau: the smallest τ of a cell.
        num_separated_pairs: number of pairs, over all cells, that a cell's paired interval distinguishes at the end.
        num_kept_pairs: number of these pairs that were in the same order after half of the rounds.
    """

    mean_kendall_tau: float
    min_kendall_tau: float
    num_separated_pairs: int
    num_kept_pairs: int


@dataclass
class Standings:
    """The results of a board, from which ranks and comparisons are computed.

    Attributes:
        board: the board.
        cell_rows: the cells that have rows.
        round_times: the processor time of a round.
        tuned_rates: the learning rates that tuning chose.
    """

    board: Leaderboard
    cell_rows: list[CellRows]
    round_times: AlgorithmRoundTimes = field(default_factory=AlgorithmRoundTimes)
    tuned_rates: TunedRates = field(default_factory=TunedRates)

    @classmethod
    def read_folder(cls, board: Leaderboard, folder: Path) -> Standings:
        """Read the standings of a board from its results folder.

        Raises:
            ConfigError: a row cannot be compared with the other rows of its cell.
        """
        all_cells = [read_cell_rows(folder, cell, board) for cell in board.cells()]
        return cls(
            board,
            [cells for cells in all_cells if cells.rows],
            AlgorithmRoundTimes.read(folder),
            TunedRates.read(folder),
        )

    def restricted_to_track(self, track: str) -> Standings:
        """Return the standings of one track."""
        cells = [cells for cells in self.cell_rows if cells.cell.track == track]
        return replace(self, cell_rows=cells)

    def restricted_to_cells(self, includes_cell: Callable[[str], bool]) -> Standings:
        """Return the standings of the cells whose names `includes_cell` accepts."""
        cells = [cells for cells in self.cell_rows if includes_cell(cells.cell.name)]
        return replace(self, cell_rows=cells)

    def restricted_to_cells_of(self, name: str) -> Standings:
        """Return the standings of the cells in which an entry has numbers."""
        cells = [cells for cells in self.cell_rows if name in cells.rows and cells.rows[name].status == DONE_STATUS]
        return replace(self, cell_rows=cells)

    def milliseconds_per_round(self, name: str) -> float | None:
        """Return the processor time of a round of all seeds, averaged over the tracks; None if a track has no time."""
        timings = [self.round_times.milliseconds_per_round(track, name) for track in self.tracks]
        measured_timings = [ms for ms in timings if ms is not None]
        return float(np.mean(measured_timings)) if measured_timings and len(measured_timings) == len(timings) else None

    @functools.cached_property
    def tracks(self) -> list[str]:
        """The tracks that have rows."""
        return list(dict.fromkeys(cells.cell.track for cells in self.cell_rows))

    @functools.cached_property
    def ranked_entries(self) -> list[str]:
        """The entries that were run in each cell and not refused there, ordered by mean rank, best first."""
        names = [name for name in self.board.entries if all(self._was_run(cells, name) for cells in self.cell_rows)]
        scores = self._scores(names, self.board.main_measure)
        means = rank_scores(scores).mean(0) if len(names) else np.zeros(0)
        return [names[index] for index in np.argsort(means, kind="stable")]

    @staticmethod
    def _was_run(cells: CellRows, name: str) -> bool:
        return name in cells.rows and cells.rows[name].status != REFUSED_STATUS

    @property
    def unranked_reasons(self) -> dict[str, str]:
        """The entries that are not ranked, each with the reason."""
        reason_by_entry = {}
        for name in self.board.entries:
            if name not in self.ranked_entries:
                refused_rows = [
                    c.rows[name] for c in self.cell_rows if name in c.rows and c.rows[name].status == REFUSED_STATUS
                ]
                reason_by_entry[name] = refused_rows[0].message if refused_rows else "not in every cell yet"
        return reason_by_entry

    def scores(self, measure: str | None = None) -> np.ndarray:
        """Return the means over seeds [N, k], cells × `ranked`, larger is better; −∞ where a seed diverged."""
        return self._scores(self.ranked_entries, measure or self.board.main_measure)

    def _scores(self, names: Sequence[str], measure: str) -> np.ndarray:
        return np.array(
            [[self._rounded_mean_score(cells.rows[name], measure) for name in names] for cells in self.cell_rows]
        )

    def _rounded_mean_score(self, row: Row, measure: str) -> float:
        """Return the mean over seeds to six digits, so that values that are equal up to rounding share a rank."""
        sign = 1 if self.board.measures[measure].higher_is_better else -1
        values = row.values_of(measure)
        if row.status != DONE_STATUS or not np.isfinite(values).all():
            return DIVERGED_SCORE
        return sign * float(f"{values.mean():.6g}")

    @functools.cached_property
    def friedman_test(self) -> FriedmanTest | None:
        """Friedman's test of the ranks; None with fewer than two cells or entries."""
        too_few = len(self.cell_rows) < 2 or len(self.ranked_entries) < 2
        return None if too_few else friedman_test(rank_scores(self.scores()))

    @property
    def critical_difference(self) -> float:
        """Nemenyi's critical difference of mean ranks."""
        return critical_difference(len(self.ranked_entries), len(self.cell_rows))

    def indistinguishable_groups(self) -> list[tuple[int, int]]:
        """Return the first and last index in `ranked` of each group that Nemenyi's test does not distinguish."""
        assert self.friedman_test is not None
        return indistinguishable_groups(self.friedman_test.mean_ranks, self.critical_difference)

    def paired_differences(self, first_name: str, second_name: str, measure: str | None = None) -> PairedDifference:
        """Return the differences by seed, first − second, of the means over cells.

        Cells where one of the two entries has no finite number are left out.
        """
        pairs = self._value_pairs(first_name, second_name, measure or self.board.main_measure)
        if not pairs:
            return PairedDifference(np.zeros(0))
        a, b = np.array(pairs).mean(0)
        return paired_difference(a, b, self.board.seeds, self.board.seeds)

    def num_shared_cells(self, first_name: str, second_name: str, measure: str) -> int:
        """Return the number of cells in which both entries have numbers."""
        return len(self._value_pairs(first_name, second_name, measure))

    def _value_pairs(self, first_name: str, second_name: str, measure: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the numbers of two entries in the cells where both have finite ones."""
        rows = [cells.rows for cells in self.cell_rows if {first_name, second_name} <= cells.rows.keys()]
        pairs = [(row[first_name].values_of(measure), row[second_name].values_of(measure)) for row in rows]
        return [(a, b) for a, b in pairs if len(a) and len(b) and np.isfinite([a, b]).all()]

    @functools.cached_property
    def pairwise_win_counts(self) -> np.ndarray:
        """The number of cells [k, k] in which the row's entry beats the column's by the cell's paired interval.

        An entry that diverged loses to one that did not.
        """
        no_wins = np.zeros((len(self.ranked_entries), len(self.ranked_entries)), dtype=int)
        return sum(self._better_matrices, no_wins)

    @functools.cached_property
    def _better_matrices(self) -> list[np.ndarray]:
        """For each cell, whether the row's entry is better than the column's there [k, k]."""
        main = self.board.main_measure
        higher_is_better = self.board.measures[main].higher_is_better
        rows = [[cells.rows[name] for name in self.ranked_entries] for cells in self.cell_rows]
        return [
            np.array(
                [
                    [a is not b and self._is_significantly_better(a, b, main, higher_is_better) for b in rows_by_entry]
                    for a in rows_by_entry
                ]
            )
            for rows_by_entry in rows
        ]

    def _is_significantly_better(self, first_name: Row, second_name: Row, measure: str, higher_is_better: bool) -> bool:
        has_diverged = [self._rounded_mean_score(row, measure) == DIVERGED_SCORE for row in (first_name, second_name)]
        if any(has_diverged):
            return not has_diverged[0]
        low, high = paired_difference(
            first_name.values_of(measure), second_name.values_of(measure), self.board.seeds, self.board.seeds
        ).confidence_interval
        return low > 0 if higher_is_better else high < 0

    def halfway_rank_correlation(self) -> HalfwayRankCorrelation:
        """Compare the order after half of the rounds with the order at the end, for the entries with finite curves."""
        metric_sign = 1 if self.board.measures[self.board.main_measure].higher_is_better else -1
        kendall_taus, agreeing_pairs, separated_pairs = [], 0, 0
        for cells, better_matrix in zip(self.cell_rows, self._better_matrices, strict=True):
            metric_curves = [np.array(cells.rows[name].curve, dtype=float) for name in self.ranked_entries]
            curve_indices = [k for k, curve in enumerate(metric_curves) if curve.size and np.isfinite(curve).all()]
            if len(curve_indices) > 1:
                rounds = metric_curves[curve_indices[0]][0]
                halfway_index = int(np.searchsorted(rounds, rounds[-1] / 2))
                half_values, end = (
                    np.array([metric_sign * metric_curves[k][1][index] for k in curve_indices])
                    for index in (halfway_index, -1)
                )
                kendall_taus.append(float(stats.kendalltau(half_values, end).statistic))
                separated_mask = better_matrix[np.ix_(curve_indices, curve_indices)]
                separated_pairs += int(separated_mask.sum())
                agreeing_pairs += int((half_values[:, None] > half_values)[separated_mask].sum())
        return HalfwayRankCorrelation(
            float(np.mean(kendall_taus or [np.nan])), min(kendall_taus, default=np.nan), separated_pairs, agreeing_pairs
        )
