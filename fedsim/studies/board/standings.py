"""Standings of a board's algorithms: ranks over cells, wins by paired intervals, the order after half of the rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedsim.studies.board.board import Board
from fedsim.studies.board.costs import RoundTimes
from fedsim.studies.board.rows import DONE, REFUSED, CellRows, Rates, Row, read
from fedsim.studies.results.friedman import (
    Friedman,
    critical_difference,
    friedman,
    indistinguishable_groups,
    rank_scores,
)
from fedsim.studies.results.paired import PairedDifference, paired_difference

DIVERGED_SCORE = -np.inf  # the score of a row that diverged


class HalfwayOrder(NamedTuple):
    """The order after half of the rounds compared with the order at the end.

    Attributes:
        tau: Kendall's τ between the two orders, averaged over cells; NaN where there are no curves.
        min_tau: the smallest τ of a cell.
        separated_pairs: number of pairs, over all cells, that a cell's paired interval distinguishes at the end.
        kept_pairs: number of these pairs that were in the same order after half of the rounds.
    """

    tau: float
    min_tau: float
    separated_pairs: int
    kept_pairs: int


@dataclass
class Standings:
    """The results of a board, from which ranks and comparisons are computed.

    Attributes:
        board: the board.
        cells: the cells that have rows.
        times: the processor time of a round.
        rates: the learning rates that tuning chose.
    """

    board: Board
    cells: list[CellRows]
    times: RoundTimes = field(default_factory=RoundTimes)
    rates: Rates = field(default_factory=Rates)

    @classmethod
    def of(cls, board: Board, folder: Path) -> Standings:
        """Read the standings of a board from its results folder.

        Raises:
            ConfigError: a row cannot be compared with the other rows of its cell.
        """
        all_cells = [read(folder, cell, board) for cell in board.cells()]
        return cls(board, [cells for cells in all_cells if cells.rows], RoundTimes.read(folder), Rates.read(folder))

    def at(self, track: str) -> Standings:
        """Return the standings of one track."""
        cells = [cells for cells in self.cells if cells.cell.track == track]
        return replace(self, cells=cells)

    def within(self, includes: Callable[[str], bool]) -> Standings:
        """Return the standings of the cells whose names `includes` accepts."""
        cells = [cells for cells in self.cells if includes(cells.cell.name)]
        return replace(self, cells=cells)

    def with_numbers_of(self, name: str) -> Standings:
        """Return the standings of the cells in which an entry has numbers."""
        cells = [cells for cells in self.cells if name in cells.rows and cells.rows[name].status == DONE]
        return replace(self, cells=cells)

    def milliseconds(self, name: str) -> float | None:
        """Return the processor time of a round of all seeds, averaged over the tracks; None if a track has no time."""
        timings = [self.times.ms(track, name) for track in self.tracks]
        measured_timings = [ms for ms in timings if ms is not None]
        return float(np.mean(measured_timings)) if measured_timings and len(measured_timings) == len(timings) else None

    @functools.cached_property
    def tracks(self) -> list[str]:
        """The tracks that have rows."""
        return list(dict.fromkeys(cells.cell.track for cells in self.cells))

    @functools.cached_property
    def ranked(self) -> list[str]:
        """The entries that were run in each cell and not refused there, ordered by mean rank, best first."""
        names = [name for name in self.board.entries if all(self._was_run(cells, name) for cells in self.cells)]
        scores = self._scores(names, self.board.main_measure)
        means = rank_scores(scores).mean(0) if len(names) else np.zeros(0)
        return [names[index] for index in np.argsort(means, kind="stable")]

    @staticmethod
    def _was_run(cells: CellRows, name: str) -> bool:
        return name in cells.rows and cells.rows[name].status != REFUSED

    @property
    def unranked_reasons(self) -> dict[str, str]:
        """The entries that are not ranked, each with the reason."""
        reasons = {}
        for name in self.board.entries:
            if name not in self.ranked:
                refused = [c.rows[name] for c in self.cells if name in c.rows and c.rows[name].status == REFUSED]
                reasons[name] = refused[0].message if refused else "not in every cell yet"
        return reasons

    def scores(self, measure: str | None = None) -> np.ndarray:
        """Return the means over seeds [N, k], cells × `ranked`, larger is better; −∞ where a seed diverged."""
        return self._scores(self.ranked, measure or self.board.main_measure)

    def _scores(self, names: Sequence[str], measure: str) -> np.ndarray:
        return np.array([[self._score(cells.rows[name], measure) for name in names] for cells in self.cells])

    def _score(self, row: Row, measure: str) -> float:
        """Return the mean over seeds to six digits, so that values that are equal up to rounding share a rank."""
        sign = 1 if self.board.measures[measure].higher_is_better else -1
        values = row.of(measure)
        if row.status != DONE or not np.isfinite(values).all():
            return DIVERGED_SCORE
        return sign * float(f"{values.mean():.6g}")

    @functools.cached_property
    def test(self) -> Friedman | None:
        """Friedman's test of the ranks; None with fewer than two cells or entries."""
        too_few = len(self.cells) < 2 or len(self.ranked) < 2
        return None if too_few else friedman(rank_scores(self.scores()))

    @property
    def difference(self) -> float:
        """Nemenyi's critical difference of mean ranks."""
        return critical_difference(len(self.ranked), len(self.cells))

    def groups(self) -> list[tuple[int, int]]:
        """Return the first and last index in `ranked` of each group that Nemenyi's test does not distinguish."""
        assert self.test is not None
        return indistinguishable_groups(self.test.ranks, self.difference)

    def paired(self, first: str, second: str, measure: str | None = None) -> PairedDifference:
        """Return the differences by seed, first − second, of the means over cells.

        Cells where one of the two entries has no finite number are left out.
        """
        pairs = self._value_pairs(first, second, measure or self.board.main_measure)
        if not pairs:
            return PairedDifference(np.zeros(0))
        a, b = np.array(pairs).mean(0)
        return paired_difference(a, b, self.board.seeds, self.board.seeds)

    def shared_cells(self, first: str, second: str, measure: str) -> int:
        """Return the number of cells in which both entries have numbers."""
        return len(self._value_pairs(first, second, measure))

    def _value_pairs(self, first: str, second: str, measure: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the numbers of two entries in the cells where both have finite ones."""
        rows = [cells.rows for cells in self.cells if {first, second} <= cells.rows.keys()]
        pairs = [(of[first].of(measure), of[second].of(measure)) for of in rows]
        return [(a, b) for a, b in pairs if len(a) and len(b) and np.isfinite([a, b]).all()]

    @functools.cached_property
    def wins(self) -> np.ndarray:
        """The number of cells [k, k] in which the row's entry beats the column's by the cell's paired interval.

        An entry that diverged loses to one that did not.
        """
        none = np.zeros((len(self.ranked), len(self.ranked)), dtype=int)
        return sum(self._better, none)

    @functools.cached_property
    def _better(self) -> list[np.ndarray]:
        """For each cell, whether the row's entry is better than the column's there [k, k]."""
        main = self.board.main_measure
        higher_is_better = self.board.measures[main].higher_is_better
        rows = [[cells.rows[name] for name in self.ranked] for cells in self.cells]
        return [
            np.array([[a is not b and self._beats(a, b, main, higher_is_better) for b in of] for a in of])
            for of in rows
        ]

    def _beats(self, first: Row, second: Row, measure: str, higher_is_better: bool) -> bool:
        failed = [self._score(row, measure) == DIVERGED_SCORE for row in (first, second)]
        if any(failed):
            return not failed[0]
        low, high = paired_difference(
            first.of(measure), second.of(measure), self.board.seeds, self.board.seeds
        ).interval
        return low > 0 if higher_is_better else high < 0

    def halfway_orders(self) -> HalfwayOrder:
        """Compare the order after half of the rounds with the order at the end, for the entries with finite curves."""
        sign = 1 if self.board.measures[self.board.main_measure].higher_is_better else -1
        taus, agreeing_pairs, separated_pairs = [], 0, 0
        for cells, better in zip(self.cells, self._better, strict=True):
            curves = [np.array(cells.rows[name].curve, dtype=float) for name in self.ranked]
            curve_indices = [k for k, curve in enumerate(curves) if curve.size and np.isfinite(curve).all()]
            if len(curve_indices) > 1:
                rounds = curves[curve_indices[0]][0]
                at = int(np.searchsorted(rounds, rounds[-1] / 2))
                half, end = (np.array([sign * curves[k][1][index] for k in curve_indices]) for index in (at, -1))
                taus.append(float(stats.kendalltau(half, end).statistic))
                separated_mask = better[np.ix_(curve_indices, curve_indices)]
                separated_pairs += int(separated_mask.sum())
                agreeing_pairs += int((half[:, None] > half)[separated_mask].sum())
        return HalfwayOrder(
            float(np.mean(taus or [np.nan])), min(taus, default=np.nan), separated_pairs, agreeing_pairs
        )
