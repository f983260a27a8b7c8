"""The bold cells of a table: the best of a block and column, and those that are not distinguishable from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsim.studies.results.paired import paired_difference
from fedsim.studies.results.run_measures import TableCell, TableMeasure

MIN_RELIABLE_REPLICATES = 5  # with fewer seeds an interval is unreliable


def is_distinguishable(first_cell: TableCell, second_cell: TableCell, confidence: float = 0.95) -> bool:
    """Return whether the means differ, by Student's paired interval, or by Welch's if the seeds differ.

    With fewer than two numbers there is no interval, and unequal means count as different.
    """
    if first_cell.seeds is not None and first_cell.seeds == second_cell.seeds:
        differences = paired_difference(
            first_cell.values, second_cell.values, first_cell.seeds, second_cell.seeds, confidence
        )
        (low, high), has_interval = differences.confidence_interval, differences.num_pairs > 1
    else:
        has_interval = min(len(first_cell.finite_values), len(second_cell.finite_values)) > 1
        low, high = _welch_interval(first_cell, second_cell, confidence) if has_interval else (math.nan, math.nan)
    return not low <= 0 <= high if has_interval else first_cell.mean != second_cell.mean


def _welch_interval(first_cell: TableCell, second_cell: TableCell, confidence: float) -> tuple[float, float]:
    """Return the interval of a difference of means of independent samples (Welch 1947, Satterthwaite's freedom)."""
    difference, variances = (
        first_cell.mean - second_cell.mean,
        [cell.standard_error**2 for cell in (first_cell, second_cell)],
    )
    if not sum(variances):
        return difference, difference
    degrees_of_freedom = sum(variances) ** 2 / sum(
        variance**2 / (len(cell.finite_values) - 1)
        for variance, cell in zip(variances, (first_cell, second_cell), strict=True)
    )
    from scipy import stats  # here: pictures of a run need not wait for it

    half_width = float(stats.t.ppf(0.5 + confidence / 2, degrees_of_freedom)) * math.sqrt(sum(variances))
    return difference - half_width, difference + half_width


def best_line_indices(cells: Sequence[object], measure: TableMeasure, confidence: float) -> set[int]:
    """Return the positions of the best cell and of those that are not distinguishable from it.

    With fewer than `MIN_RELIABLE_REPLICATES` seeds only the best, since nearly nothing is distinguishable from it.
    Empty for fewer than two cells, for differences, and where no direction is better. Cells in which a smaller share
    of replicates has a number are left out, since their means are over the successful replicates only.
    """
    candidates = {n: cell for n, cell in enumerate(cells) if isinstance(cell, TableCell) and not math.isnan(cell.mean)}
    if not measure.has_best_value or len(candidates) < 2:
        return set()
    share = max(len(cell.finite_values) / len(cell.values) for cell in candidates.values())
    complete_cells = {n: cell for n, cell in candidates.items() if len(cell.finite_values) / len(cell.values) == share}
    best = (max if measure.higher_is_better else min)(complete_cells, key=lambda n: complete_cells[n].mean)
    best_cell = complete_cells[best]

    def is_tied_with_best(cell: TableCell) -> bool:
        has_enough_seeds = min(len(cell.finite_values), len(best_cell.finite_values)) >= MIN_RELIABLE_REPLICATES
        return has_enough_seeds and not is_distinguishable(best_cell, cell, confidence)

    return {n for n, cell in complete_cells.items() if cell.mean == best_cell.mean or is_tied_with_best(cell)}
