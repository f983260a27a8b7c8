"""How the algorithms of a board stand: ranks over cells, wins by paired intervals, whether the order has settled."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import numpy as np
from scipy import stats

from fedsim.studies.board.board import Board
from fedsim.studies.board.costs import RoundTimes
from fedsim.studies.board.findings import Comparison
from fedsim.studies.board.rows import DONE, REFUSED, CellRows, Row, read
from fedsim.studies.results.friedman import (
    Friedman,
    critical_difference,
    friedman,
    indistinguishable_groups,
    rank_scores,
)
from fedsim.studies.results.paired import PairedDifference, paired_difference

DIVERGED_SCORE = -np.inf  # what a row that diverged scores


class HalfwayOrder(NamedTuple):
    """The order after half of the rounds beside that at the end.

    Attributes:
        tau: Kendall's τ between them, the mean over cells; NaN where there are no curves.
        min_tau: τ in the cell where it is least.
        separated_pairs: pairs that the paired interval of a cell tells apart at the end, in all cells.
        kept_pairs: how many of them half of the rounds had put in that order.
    """

    tau: float
    min_tau: float
    separated_pairs: int
    kept_pairs: int


@dataclass
class Standings:
    """Attributes:

    board: whose.
    cells: those that have rows.
    times: what rounds cost.
    """

    board: Board
    cells: list[CellRows]
    times: RoundTimes = field(default_factory=RoundTimes)

    @classmethod
    def of(cls, board: Board, folder: Path) -> Standings:
        """Of what is on disk.

        Raises:
            ConfigError: a cell has a row that does not belong beside the others.
        """
        all_cells = [read(folder, cell, board) for cell in board.cells()]
        return cls(board, [cells for cells in all_cells if cells.rows], RoundTimes.read(folder))

    def at(self, track: str) -> Standings:
        """Those of one track."""
        return Standings(self.board, [cells for cells in self.cells if cells.cell.track == track], self.times)

    def milliseconds(self, name: str) -> float | None:
        """Processor time of a round of all seeds, the mean over the tracks that have rows; None where one lacks it."""
        timings = [self.times.ms(track, name) for track in self.tracks]
        measured_timings = [ms for ms in timings if ms is not None]
        return float(np.mean(measured_timings)) if measured_timings and len(measured_timings) == len(timings) else None

    @functools.cached_property
    def tracks(self) -> list[str]:
        """That have rows."""
        return list(dict.fromkeys(cells.cell.track for cells in self.cells))

    @functools.cached_property
    def ranked(self) -> list[str]:
        """The entries that have been run in every cell, and were refused in none, best mean rank first."""
        names = [name for name in self.board.entries if all(self._was_run(cells, name) for cells in self.cells)]
        scores = self._scores(names, self.board.main_measure)
        means = rank_scores(scores).mean(0) if len(names) else np.zeros(0)
        return [names[index] for index in np.argsort(means, kind="stable")]

    @staticmethod
    def _was_run(cells: CellRows, name: str) -> bool:
        return name in cells.rows and cells.rows[name].status != REFUSED

    @property
    def unranked_reasons(self) -> dict[str, str]:
        """Entries that are not ranked, and why."""
        reasons = {}
        for name in self.board.entries:
            if name not in self.ranked:
                refused_rows = [c.rows[name] for c in self.cells if name in c.rows and c.rows[name].status == REFUSED]
                reasons[name] = refused_rows[0].message if refused_rows else "not in every cell yet"
        return reasons

    def scores(self, measure: str | None = None) -> np.ndarray:
        """[N, k] means over seeds, larger ones better, cells × `ranked`; −∞ where a seed was given up."""
        return self._scores(self.ranked, measure or self.board.main_measure)

    def _scores(self, names: Sequence[str], measure: str) -> np.ndarray:
        return np.array([[self._score(cells.rows[name], measure) for name in names] for cells in self.cells])

    def _score(self, row: Row, measure: str) -> float:
        """To six digits, of the seven that are kept: what is equal but for rounding shares a rank."""
        sign = 1 if self.board.measures[measure].higher_is_better else -1
        values = row.of(measure)
        if row.status != DONE or not np.isfinite(values).all():
            return DIVERGED_SCORE
        return sign * float(f"{values.mean():.6g}")

    @functools.cached_property
    def test(self) -> Friedman | None:
        """Of the ranks; None of fewer than two cells or entries."""
        too_few = len(self.cells) < 2 or len(self.ranked) < 2
        return None if too_few else friedman(rank_scores(self.scores()))

    @property
    def difference(self) -> float:
        """Nemenyi's, of mean ranks."""
        return critical_difference(len(self.ranked), len(self.cells))

    def groups(self) -> list[tuple[int, int]]:
        """First and last of `ranked` that it does not tell apart."""
        assert self.test is not None
        return indistinguishable_groups(self.test.ranks, self.difference)

    def paired(self, first: str, second: str, measure: str | None = None) -> PairedDifference:
        """Differences by seed of the means over cells: what one has more than the other. Cells where either has no
        number are left out."""
        pairs = self._value_pairs(first, second, measure or self.board.main_measure)
        if not pairs:
            return PairedDifference(np.zeros(0))
        a, b = np.array(pairs).mean(0)
        return paired_difference(a, b, self.board.seeds, self.board.seeds)

    def _value_pairs(self, first: str, second: str, measure: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """The numbers of two entries in the cells where both have them."""
        rows = [cells.rows for cells in self.cells if {first, second} <= cells.rows.keys()]
        pairs = [(cell_rows[first].of(measure), cell_rows[second].of(measure)) for cell_rows in rows]
        return [(a, b) for a, b in pairs if len(a) and len(b) and np.isfinite([a, b]).all()]

    def compared_difference(self, comparison: Comparison) -> tuple[PairedDifference, int, bool]:
        """Differences by seed, of how many cells they are, and whether they show what is said."""
        subset = Standings(self.board, [cells for cells in self.cells if comparison.of(cells.cell.name)])
        measure = comparison.measure or self.board.main_measure
        paired = subset.paired(comparison.one, comparison.other, measure)
        return (
            paired,
            len(subset._value_pairs(comparison.one, comparison.other, measure)),
            comparison.is_shown(paired, self.board.measures[measure].higher_is_better),
        )

    @functools.cached_property
    def wins(self) -> np.ndarray:
        """[k, k] in how many cells the one of a line is better than the one of a column, by the paired interval of the
        cell alone. Who was given up loses to who was not."""
        none = np.zeros((len(self.ranked), len(self.ranked)), dtype=int)
        return sum(self._better, none)

    @functools.cached_property
    def _better(self) -> list[np.ndarray]:
        """Cell by cell, [k, k] whether the one of a line is better than the one of a column there."""
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
        """Whether half of the rounds had given the same order, by the curves of who was not given up."""
        sign = 1 if self.board.measures[self.board.main_measure].higher_is_better else -1
        taus, agreeing_pairs, separated_pairs = [], 0, 0
        for cells, better in zip(self.cells, self._better, strict=True):
            curves = [np.array(cells.rows[name].curve, dtype=float) for name in self.ranked]
            curve_indices = [k for k, curve in enumerate(curves) if curve.size and np.isfinite(curve).all()]
            if len(curve_indices) > 1:
                rounds = curves[curve_indices[0]][0]
                halfway_index = int(np.searchsorted(rounds, rounds[-1] / 2))
                halfway_scores, final_scores = (
                    np.array([sign * curves[k][1][index] for k in curve_indices]) for index in (halfway_index, -1)
                )
                taus.append(float(stats.kendalltau(halfway_scores, final_scores).statistic))
                separated_mask = better[np.ix_(curve_indices, curve_indices)]
                separated_pairs += int(separated_mask.sum())
                agreeing_pairs += int((halfway_scores[:, None] > halfway_scores)[separated_mask].sum())
        return HalfwayOrder(
            float(np.mean(taus or [np.nan])), min(taus, default=np.nan), separated_pairs, agreeing_pairs
        )
