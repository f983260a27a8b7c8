"""The bold cells of a table: the best of a block and column, and those that are not distinguishable from it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedsim.studies.results.paired import paired_difference
from fedsim.studies.results.run_measures import Cell, Measure

MIN_RELIABLE_REPLICATES = 5  # with fewer seeds an interval is unreliable


def distinguishable(first: Cell, second: Cell, confidence: float = 0.95) -> bool:
    """Return whether the means differ, by Student's paired interval, or by Welch's if the seeds differ.

    With fewer than two numbers there is no interval, and unequal means count as different.
    """
    if first.seeds is not None and first.seeds == second.seeds:
        differences = paired_difference(first.values, second.values, first.seeds, second.seeds, confidence)
        (low, high), has_interval = differences.interval, differences.pairs > 1
    else:
        has_interval = min(len(first.finite_values), len(second.finite_values)) > 1
        low, high = _welch(first, second, confidence) if has_interval else (math.nan, math.nan)
    return not low <= 0 <= high if has_interval else first.mean != second.mean


def _welch(first: Cell, second: Cell, confidence: float) -> tuple[float, float]:
    """Return the interval of a difference of means of independent samples (Welch 1947, Satterthwaite's freedom)."""
    difference, variances = first.mean - second.mean, [cell.error**2 for cell in (first, second)]
    if not sum(variances):
        return difference, difference
    freedom = sum(variances) ** 2 / sum(
        variance**2 / (len(cell.finite_values) - 1) for variance, cell in zip(variances, (first, second), strict=True)
    )
    from scipy import stats  # here: pictures of a run need not wait for it

    half_width = float(stats.t.ppf(0.5 + confidence / 2, freedom)) * math.sqrt(sum(variances))
    return difference - half_width, difference + half_width


def best_lines(cells: Sequence[object], measure: Measure, confidence: float) -> set[int]:
    """Return the positions of the best cell and of those that are not distinguishable from it.

    Empty for fewer than two cells, for differences, and where no direction is better. Cells in which a smaller share of
    replicates has a number are left out, since their means are over the successful replicates only.
    """
    candidates = {n: cell for n, cell in enumerate(cells) if isinstance(cell, Cell) and not math.isnan(cell.mean)}
    if not measure.directed or len(candidates) < 2:
        return set()
    share = max(len(cell.finite_values) / len(cell.values) for cell in candidates.values())
    complete = {n: cell for n, cell in candidates.items() if len(cell.finite_values) / len(cell.values) == share}
    best = (max if measure.higher_is_better else min)(complete, key=lambda n: complete[n].mean)
    return {n for n, cell in complete.items() if n == best or not distinguishable(complete[best], cell, confidence)}
