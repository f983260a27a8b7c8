"""What a run gives: one number per replicate, read from its metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from fedsim.plots.runs import Run

TOLERANCE = 1e-9  # of a target: 0.7 is reached by 0.7 however it was computed


@dataclass
class Measure:
    """A number per replicate.

    Attributes:
        metric: a column of metrics.csv.
        last: mean over the evaluations of the last so many rounds; 0 takes the last evaluation alone.
        reach: instead of a mean: the first evaluated round at which the replicates' mean reaches this fraction of
            the target (nan where it never does).
        best_over: with `reach`: the target is the best run along this axis, see `best_rounded`.
        every: with `reach`: only evaluations at multiples of so many rounds count.
        percent: multiply by 100.
        unit: behind the number, in tables and on axes.
    """

    metric: str
    last: int = 0
    reach: float | None = None
    best_over: str | None = None
    every: int = 1
    percent: bool = False
    unit: str = ""

    def __call__(self, run: Run, target: float = math.nan) -> np.ndarray:
        """[R] values; a single one for `reach`.

        Args:
            run: a finished run.
            target: with `reach`: of what a fraction is to be reached.
        """
        rounds, values = run.curve(self.metric)
        if self.reach is not None:
            looked = rounds % self.every == 0
            there = rounds[looked][values[looked].mean(1) >= self.reach * target - TOLERANCE]
            return np.array([float(there[0]) if len(there) else math.nan])
        window = rounds > rounds[-1] - self.last if self.last else rounds == rounds[-1]
        return values[window].mean(0) * (100 if self.percent else 1)


def best_rounded(runs: list[Run], metric: str, last: int, step: float = 0.1) -> float:
    """The best mean of the runs, rounded down to a multiple of `step` (fedawe Table 8)."""
    final = Measure(metric, last=last)
    return math.floor(max(final(run).mean() for run in runs) / step + TOLERANCE) * step
